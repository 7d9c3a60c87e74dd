"""Writes through each view that ATen has, and through chains of them."""

import torch

from cases import case, parameter

# Each makes a view of a tensor [4, 6].
VIEWS = {
    "select": lambda y: y.select(1, 2),
    "index_with_a_number": lambda y: y[-1],
    "slice": lambda y: y[1:3],
    "slice_with_a_step": lambda y: y[:, ::2],
    "slice_with_a_step_that_does_not_divide": lambda y: y[:, 1:6:4],
    "empty_slice": lambda y: y[2:2],
    "whole_slice": lambda y: y[:],
    "slice_from_the_end": lambda y: y[-2:, -3:-1],
    "ellipsis": lambda y: y[..., 0],
    "new_axis": lambda y: y[:, None],
    "narrow": lambda y: y.narrow(1, 2, 3),
    "diagonal": lambda y: y.diagonal(),
    "diagonal_above": lambda y: y.diagonal(2),
    "diagonal_below": lambda y: y.diagonal(-1),
    "empty_diagonal": lambda y: y.diagonal(6),
    "linalg_diagonal": lambda y: torch.linalg.diagonal(y, offset=1),
    "unfold_without_overlap": lambda y: y.unfold(1, 2, 2),
    "unfold_with_gaps": lambda y: y.unfold(1, 2, 3),
    "unfold_of_rows": lambda y: y.unfold(0, 2, 2),
    "as_strided": lambda y: y.as_strided((2, 3), (7, 2)),
    "as_strided_with_an_offset": lambda y: y.as_strided((2, 2), (6, 1), 5),
    "as_strided_transposed": lambda y: y.as_strided((6, 4), (1, 6)),
    "as_strided_whole": lambda y: y.as_strided((24,), (1,)),
    "view": lambda y: y.view(2, 12),
    "view_with_a_hole": lambda y: y.view(-1, 3),
    "view_as": lambda y: y.view_as(torch.empty(8, 3)),
    "view_same": lambda y: y.view(4, 6),
    "view_of_the_same_type": lambda y: y.view(torch.float32),
    "reshape": lambda y: y.reshape(3, 8),
    "reshape_as": lambda y: y.reshape_as(torch.empty(24)),
    "flatten": lambda y: y.flatten(),
    "flatten_nothing": lambda y: y.flatten(0, 0),
    "ravel": lambda y: y.ravel(),
    "unflatten": lambda y: y.unflatten(1, (2, 3)),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "squeeze": lambda y: y.unsqueeze(0).squeeze(),
    "squeeze_a_dimension": lambda y: y.unsqueeze(0).squeeze(0),
    "squeeze_dimensions": lambda y: y[None, :, None].squeeze((0, 2)),
    "squeeze_nothing": lambda y: y.squeeze(1),
    "transpose": lambda y: y.transpose(0, 1),
    "swapaxes": lambda y: y.swapaxes(0, 1),
    "swapdims": lambda y: y.swapdims(-1, 0),
    "t": lambda y: y.t(),
    "T": lambda y: y.T,
    "mT": lambda y: y.mT,
    "H": lambda y: y.H,
    "mH": lambda y: y.mH,
    "adjoint": lambda y: y.adjoint(),
    "permute": lambda y: y.permute(1, 0),
    "permute_three": lambda y: y.view(2, 2, 6).permute(2, 0, 1),
    "movedim": lambda y: y.movedim(0, 1),
    "movedim_of_several": lambda y: y.view(2, 2, 6).movedim((0, 1), (2, 0)),
    "moveaxis": lambda y: y.moveaxis(1, 0),
    "expand_nothing": lambda y: y.expand(4, 6),
    "expand_by_a_leading_one": lambda y: y.expand(1, -1, -1),
    "expand_as_itself": lambda y: y.expand_as(y),
    "broadcast_to_itself": lambda y: y.broadcast_to((4, 6)),
    "split": lambda y: y.split(4, 1)[1],
    "split_sizes": lambda y: y.split([1, 2, 3], 1)[1],
    "chunk": lambda y: y.chunk(3)[0],
    "tensor_split": lambda y: y.tensor_split(4, 1)[1],
    "tensor_split_at_indices": lambda y: y.tensor_split((1, 4), 1)[1],
    "hsplit": lambda y: y.hsplit(2)[1],
    "vsplit": lambda y: y.vsplit((1, 3))[1],
    "unbind": lambda y: y.unbind(1)[3],
    "detach": lambda y: y.detach()[1],
    "alias": lambda y: torch.ops.aten.alias(y)[1],
    "positive": lambda y: torch.positive(y)[1],
    "real": lambda y: y.real[1],
    "contiguous": lambda y: y.contiguous()[1],
    "to_the_same_type": lambda y: y.to(torch.float32)[1],
    "type_as": lambda y: y.type_as(y)[1],
    "float": lambda y: y.float()[1],
    "meshgrid": lambda y: torch.meshgrid(y[0], torch.ones(1), indexing="ij")[0],
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, torch.ones(6))[0],
    "atleast_3d": lambda y: torch.atleast_3d(y),
    "einsum_of_one": lambda y: torch.einsum("ij->ji", y),
    "dropout_off": lambda y: torch.nn.functional.dropout(y, 0.5, training=False)[1],
    "dropout_of_nothing": lambda y: torch.nn.functional.dropout(y, 0.0)[1],
    "dropout2d_off": lambda y: torch.nn.functional.dropout2d(y.view(2, 2, 6, 1), 0.5, training=False)[1],
    "identity_module": lambda y: torch.nn.Identity()(y)[1],
    "view_of_a_view": lambda y: y[1:3].t()[::2],
    "diagonal_of_a_transposed_slice": lambda y: y[:, 1:5].t().diagonal(1),
    "unfold_of_a_diagonal": lambda y: y.diagonal().unfold(0, 2, 2),
    "slice_of_an_unfold": lambda y: y.unfold(1, 2, 2)[1:, 1],
    "as_strided_of_a_transposed": lambda y: y.t().as_strided((2, 2), (6, 1)),
    "as_strided_of_a_slice": lambda y: y[1:].as_strided((2, 2), (6, 2)),
    "reshape_of_a_transposed": lambda y: y.view(2, 2, 6).transpose(0, 1).reshape(2, 2, 2, 3),
    "flatten_of_a_slice": lambda y: y[1:3].flatten(),
    "chunk_of_a_permuted": lambda y: y.permute(1, 0).chunk(2)[1].unsqueeze(0).squeeze(0),
}

# Results that look like views, but are copies. A write to them leaves the tensor as it is.
COPIES = {
    "clone": lambda y: y.clone(),
    "reshape_that_must_copy": lambda y: y.t().reshape(24),
    "flatten_that_must_copy": lambda y: y.t().flatten(),
    "flatten_of_a_column_slice": lambda y: y[:, 1:3].flatten(),
    "ravel_that_must_copy": lambda y: y.t().ravel(),
    "reshape_of_an_expanded": lambda y: y[:, :1].expand(4, 6).reshape(24),
    "contiguous_of_a_transposed": lambda y: y.t().contiguous(),
    "contiguous_in_another_order": lambda y: y.view(1, 4, 3, 2).contiguous(memory_format=torch.channels_last),
    "to_another_order": lambda y: y.view(1, 4, 3, 2).to(memory_format=torch.channels_last),
    "to_a_copy": lambda y: y.to(torch.float32, copy=True),
    "to_another_type": lambda y: y.double(),
    "index_with_a_list": lambda y: y[[0, 1]],
    "index_with_a_mask": lambda y: y[torch.tensor([True, False, True, False])],
    "index_select": lambda y: y.index_select(0, torch.tensor([1])),
    "diag_of_a_matrix": lambda y: y.diag(),
    "repeat": lambda y: y.repeat(1, 1),
    "tile": lambda y: y.tile((1,)),
    "flip": lambda y: y.flip(0),
    "roll": lambda y: y.roll(0, 0),
    "rot90_by_nothing": lambda y: torch.rot90(y, 0),
    "cat_of_one": lambda y: torch.cat([y]),
    "stack_of_one": lambda y: torch.stack([y]),
    "pad_by_nothing": lambda y: torch.nn.functional.pad(y, (0, 0)),
    "sum_over_nothing": lambda y: y[None].sum(0),
    "add_nothing": lambda y: y + 0,
    "multiply_by_one": lambda y: y * 1,
    "power_of_one": lambda y: y**1,
    "divide_by_one": lambda y: y / 1,
    "masked_fill_nothing": lambda y: y.masked_fill(torch.zeros(4, 6, dtype=torch.bool), 1.0),
    "clamp": lambda y: y.clamp(min=-100),
    "triu": lambda y: y.triu(-10),
    "tril": lambda y: y.tril(10),
    "relu": lambda y: y.abs().relu(),
    "squeeze_copy": lambda y: torch.squeeze_copy(y),
    "cumsum_of_one_row": lambda y: y[None].cumsum(0),
    "where": lambda y: torch.where(torch.ones(4, 6, dtype=torch.bool), y, y),
    "lerp_by_nothing": lambda y: y.lerp(y, 0.0),
    "max_pool_of_one": lambda y: torch.nn.functional.max_pool2d(y[None], 1),
    "pixel_shuffle_by_one": lambda y: torch.pixel_shuffle(y[None], 1),
}

# Operators that the importer does not know.
UNKNOWN = {
    "squeeze_copy": "aten.squeeze_copy.default", "diag_of_a_matrix": "aten.diag.default", "hsplit": "aten.hsplit.int",
    "vsplit": "aten.vsplit.array", "atleast_3d": "aten.atleast_3d.default",
}


def through(make):
    def written(x, w):
        y = w * 2
        view = make(y)
        view.mul_(3)
        y[0, 0] = x[0, 0]
        return (y * x).sum() + (view * view).sum()

    return written


def of_numbers(make):
    """The same on integers, which have no gradient."""

    def written(x, w):
        y = torch.arange(24).view(4, 6)
        make(y).add_(100)
        return (y * x * w).sum()

    return written


OF_FLOATS_ALONE = {
    "real", "to_the_same_type", "float", "view_of_the_same_type", "meshgrid", "dropout_off", "dropout_of_nothing",
    "dropout2d_off",
}
# Outputs of operators that return several views, which PyTorch lets nobody write to where they have a gradient.
MANY = {"split", "split_sizes", "chunk", "unbind", "chunk_of_a_permuted"}
# Backward needs what is overwritten here.
NEEDED = {"power_of_one", "clamp", "relu", "max_pool_of_one"}

for key, make in VIEWS.items():
    expected = dict(refused=UNKNOWN.get(key), pytorch="modified inplace" if key in MANY else None)
    case(x=(4, 6), w=parameter(4, 6), name=f"{key}_is_written", **expected)(through(make))
    if key not in OF_FLOATS_ALONE:
        expected = dict(refused=UNKNOWN.get(key))
        case(x=(4, 6), w=parameter(4, 6), name=f"{key}_of_integers_is_written", **expected)(of_numbers(make))

for key, make in COPIES.items():
    pytorch = "modified by an inplace operation" if key in NEEDED else None
    case(x=(4, 6), w=parameter(4, 6), name=f"{key}_is_a_copy", refused=UNKNOWN.get(key), pytorch=pytorch)(through(make))

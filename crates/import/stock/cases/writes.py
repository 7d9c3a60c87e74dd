"""Operators that write in place, and tensors that others share memory with."""

import torch

from cases import buffer, case, parameter

# Each overwrites a part of `y`, a tensor [3, 4] that has a gradient. `x` has none.
WRITES = {
    "fill_": lambda y, x: y[1].fill_(2.0),
    "fill_with_a_tensor": lambda y, x: y[1].fill_(x[0, 0]),
    "zero_": lambda y, x: y[:, 1].zero_(),
    "copy_": lambda y, x: y[:2].copy_(x[:2]),
    "copy_that_broadcasts": lambda y, x: y[:2].copy_(x[0]),
    "copy_of_another_type": lambda y, x: y[0].copy_(torch.tensor([1, 2, 3, 4])),
    "add_": lambda y, x: y[1].add_(x[0]),
    "add_with_a_factor": lambda y, x: y[1].add_(x[0], alpha=2),
    "sub_": lambda y, x: y.t()[1].sub_(1),
    "mul_": lambda y, x: y[..., 1:].mul_(x[..., 1:]),
    "div_": lambda y, x: y[1].div_(4),
    "pow_": lambda y, x: y[1].pow_(2),
    "neg_": lambda y, x: y[1].neg_(),
    "abs_": lambda y, x: y[1].abs_(),
    "exp_": lambda y, x: y[1].exp_(),
    "tanh_": lambda y, x: y[1].tanh_(),
    "sigmoid_": lambda y, x: y.diagonal().sigmoid_(),
    "relu_": lambda y, x: y[1:].relu_(),
    "relu_of_functional": lambda y, x: torch.nn.functional.relu(y[1:], inplace=True),
    "silu_in_place": lambda y, x: torch.nn.functional.silu(y[1:], inplace=True),
    "leaky_relu_in_place": lambda y, x: torch.nn.functional.leaky_relu(y[:, 0], 0.2, inplace=True),
    "hardtanh_in_place": lambda y, x: torch.nn.functional.hardtanh(y[0], inplace=True),
    "dropout_in_place": lambda y, x: torch.nn.functional.dropout(y[0], 0.0, inplace=True),
    "clamp_": lambda y, x: y[1].clamp_(-0.5, 0.5),
    "clamp_min_": lambda y, x: y[1].clamp_min_(0.1),
    "lerp_": lambda y, x: y[1].lerp_(x[1], 0.25),
    "addcmul_": lambda y, x: y[1].addcmul_(x[0], x[1], value=2),
    "addcdiv_": lambda y, x: y[1].addcdiv_(x[0], x[1].abs() + 1),
    "masked_fill_": lambda y, x: y.masked_fill_(x > 0, 5.0),
    "masked_fill_of_a_view": lambda y, x: y.t().masked_fill_(x.t() > 0, 5.0),
    "a_mask_in_brackets": lambda y, x: y.__setitem__(x > 0, 5.0),
    "a_mask_of_rows": lambda y, x: y.__setitem__(x[:, 0] > 0, 5.0),
    "a_mask_and_values": lambda y, x: y.__setitem__(torch.tensor([True, False, True]), x[:2]),
    "index_put_": lambda y, x: y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 3])), x[0, :2]),
    "index_put_that_adds": lambda y, x: y.index_put_((torch.tensor([0, 0]),), x[:2], accumulate=True),
    "index_put_of_a_view": lambda y, x: y.t().index_put_((torch.tensor([0, 2]),), x[:, :2].t()),
    "a_list_in_brackets": lambda y, x: y.__setitem__([0, 2], x[:2]),
    "a_number_in_brackets": lambda y, x: y.__setitem__((1, 2), 7.0),
    "a_slice_in_brackets": lambda y, x: y.__setitem__((slice(None), slice(0, 4, 2)), x[:, 1:3]),
    "a_step_in_brackets": lambda y, x: y.__setitem__((slice(0, 3, 2), slice(1, 4, 2)), 3.0),
    "a_new_axis_in_brackets": lambda y, x: y.__setitem__((slice(None), None), x[:, None]),
    "index_fill_": lambda y, x: y.index_fill_(1, torch.tensor([0, 2]), 5.0),
    "index_copy_": lambda y, x: y.index_copy_(0, torch.tensor([2, 0]), x[:2]),
    "index_add_": lambda y, x: y.index_add_(0, torch.tensor([2, 2]), x[:2]),
    "scatter_": lambda y, x: y.scatter_(1, torch.tensor([[0], [1], [3]]), x),
    "scatter_of_a_number": lambda y, x: y.scatter_(1, torch.tensor([[0], [1], [3]]), 4.0),
    "scatter_add_": lambda y, x: y.scatter_add_(0, torch.tensor([[0, 0, 1, 2]]), x),
    "masked_scatter_": lambda y, x: y.masked_scatter_(x > 0, x),
    "fill_diagonal_": lambda y, x: y.fill_diagonal_(1.0),
    "tril_": lambda y, x: y.tril_(),
    "triu_of_a_view": lambda y, x: y[:, 1:].triu_(),
    "cumsum_": lambda y, x: y[0].cumsum_(0),
    "baddbmm_": lambda y, x: y[None].baddbmm_(x[None, :, :3], x[None]),
    "addmm_": lambda y, x: y.addmm_(x[:, :3], x),
    "gt_": lambda y, x: y[1].gt_(0),
    "logical_not_": lambda y, x: y[1].logical_not_(),
    "iadd": lambda y, x: y[0].__iadd__(x[0]),
    "imul": lambda y, x: y.t()[0].__imul__(x[:, 0]),
    "unsqueeze_and_write": lambda y, x: y[0].unsqueeze_(0).add_(1),
    "squeeze_and_write": lambda y, x: y[0:1].squeeze_(0).add_(1),
    "t_and_write": lambda y, x: y[:, :3].t_()[0].add_(1),
    "transpose_and_write": lambda y, x: y[:, :2].transpose_(0, 1)[0].mul_(2),
    "swapaxes_and_write": lambda y, x: y[:, :2].swapaxes_(0, 1)[0].mul_(2),
    "as_strided_and_write": lambda y, x: y[:2].as_strided_((2, 2), (4, 2))[0].mul_(2),
    "expanded": lambda y, x: y[:, :1].expand(3, 4).add_(1),
    "expanded_with_fill_": lambda y, x: y[:, :1].expand(3, 4).fill_(1.0),
    "overlapping_windows": lambda y, x: y.unfold(1, 2, 1).add_(1),
    "overlapping_strides": lambda y, x: y.as_strided((3, 3), (1, 1)).mul_(2),
    "a_part_of_itself": lambda y, x: y[1:].add_(y[:-1]),
    "its_own_transposed": lambda y, x: y[:, :3].copy_(y[:, :3].t()),
    "itself": lambda y, x: y.add_(y),
    "a_copy_of_itself": lambda y, x: y[1:].add_(y[:-1].clone()),
    "twice_through_two_views": lambda y, x: (y[0].add_(1), y.t()[0].mul_(2)),
    "through_nested_views": lambda y, x: y[1:][:, 1:][0].t().fill_(3.0),
    "out_of_add": lambda y, x: torch.add(x, 1, out=torch.zeros(3, 4)),
    "out_of_a_view": lambda y, x: torch.add(x[0], 1, out=torch.zeros(3, 4)[0]),
    "resize_": lambda y, x: torch.zeros(3, 4).resize_(2, 2),
    "set_": lambda y, x: y.detach().set_(x),
    "normal_": lambda y, x: torch.zeros(3).normal_(),
}
REFUSED = {
    "overlapping_windows": "elements overlap",
    "overlapping_strides": "elements overlap",
    "out_of_add": "aten.add.out",
    "out_of_a_view": "aten.add.out",
    "normal_": "aten.normal_",
}
PYTORCH = {
    "expanded": "more than one element of the written-to tensor",
    "expanded_with_fill_": "more than one element of the written-to tensor",
    "a_part_of_itself": "some elements of the input tensor and the written-to tensor",
}


def written(write):
    def loss(x, w):
        y = w * 2
        before = y + 1
        view = y[0:2]
        write(y, x)
        return (y * x).sum() + (view * w[:2]).sum() + before.sum()

    return loss


for key, write in WRITES.items():
    case(x=(3, 4), w=parameter(3, 4), name=key, refused=REFUSED.get(key), pytorch=PYTORCH.get(key))(written(write))

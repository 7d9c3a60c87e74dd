"""Parts of a model without gradients: `detach`, `no_grad`, `enable_grad` and checkpoints."""

import torch
from torch.utils.checkpoint import checkpoint

from cases import buffer, case, parameter

SQUARE = dict(x=(3, 3), w=parameter(3, 3))


@case(**SQUARE)
def detach_stops_the_gradient(x, w):
    return (w.detach() * w * x).sum()


@case(**SQUARE)
def a_write_through_detach_keeps_the_gradient(x, w):
    y = w * 2
    y.detach().fill_(3.0)
    return (y * x).sum()


@case(**SQUARE)
def a_write_through_a_view_of_detach(x, w):
    y = w * 2
    y.detach()[1].copy_(x[0])
    return (y * x).sum() + (y[1] * w[1]).sum()


@case(**SQUARE)
def a_write_through_detach_of_a_view(x, w):
    y = w * 2
    y.t()[0].detach().mul_(5)
    return (y * y * x).sum()


@case(**SQUARE)
def a_detached_tensor_sees_writes_to_its_base(x, w):
    y = w * 2
    d = y.detach()
    y.mul_(3)
    return (d * w * x).sum()


@case(**SQUARE)
def a_detached_tensor_learns_from_what_is_written_to_it(x, w):
    y = w * 2
    d = y.detach()
    d.mul_(w)
    return (d * x).sum() + (y * x).sum()


@case(x=(3, 3), w=parameter(3, 3), v=parameter(3, 3))
def both_histories_of_one_memory(x, w, v):
    y = w * 2
    d = y.detach()
    d[0].mul_(v[0])
    y[1].add_(v[1])
    return (d * x).sum() + (y * y).sum()


@case(x=(3, 3), w=parameter(3, 3), v=parameter(3, 3))
def writes_by_turns(x, w, v):
    y = w * 2
    d = y.detach()
    y.add_(v)
    d.add_(w)
    y.add_(1)
    d[0].add_(v[0])
    return (d * x).sum() + (y * x).sum() * 2


@case(**SQUARE)
def two_detached_tensors(x, w):
    y = w * 2
    a, b = y.detach(), y.detach()
    a.add_(w)
    b.add_(x)
    return (a * x).sum() + (b * w).sum() + (y * x).sum()


@case(**SQUARE)
def detach_of_detach(x, w):
    y = w * 2
    y.detach().detach()[0].zero_()
    return (y * x).sum()


@case(**SQUARE)
def infinities_under_detached_writes(x, w):
    y = w.masked_fill(x > 0, float("-inf"))
    y.detach()[x > 0] = 1.0
    return (y * x).sum()


@case(x=(3, 3), w=parameter(3, 3), pytorch="modified by an inplace operation")
def what_backward_needs_is_overwritten_through_detach(x, w):
    y = w * 2
    z = y * w
    y.detach().zero_()
    return (z * x).sum()


@case(**SQUARE)
def detach_in_place(x, w):
    y = w * 2
    y.detach_()
    return (y * w * x).sum()


@case(**SQUARE)
def detach_in_place_and_write(x, w):
    y = w * 2
    y.detach_()
    y.mul_(x)
    return (y * w).sum()


@case(**SQUARE)
def requires_grad_in_the_middle(x, w):
    y = (w * 2).detach().requires_grad_()
    return (y * w * x).sum()


@case(**SQUARE)
def straight_through(x, w):
    y = w * 2
    return ((y + (y.round() - y).detach()) * x).sum()


@case(**SQUARE)
def no_grad_has_no_gradient(x, w):
    with torch.no_grad():
        y = w * 2
    return (y * w * x).sum()


@case(**SQUARE)
def a_write_in_no_grad_keeps_the_gradient(x, w):
    y = w * 2
    with torch.no_grad():
        y.mul_(3)
    return (y * x).sum()


@case(**SQUARE)
def a_write_through_a_view_in_no_grad(x, w):
    y = w * 2
    with torch.no_grad():
        y.diagonal().fill_(1.0)
        y[0] = x[0]
    return (y * x).sum()


@case(**SQUARE)
def what_is_written_in_no_grad_has_no_gradient(x, w):
    y = w * 2
    with torch.no_grad():
        y.add_(w * w)
    return (y * x).sum()


@case(**SQUARE)
def a_view_from_no_grad_sees_later_writes(x, w):
    y = x * 2
    with torch.no_grad():
        v = y[1]
    y.mul_(3)
    return (v * w[0]).sum() + (y * w).sum()


@case(**SQUARE)
def a_view_from_no_grad_has_no_gradient(x, w):
    y = w * 2
    with torch.no_grad():
        v = y[1]
        u = y.t()
    return (v * w[0]).sum() + (u * y).sum()


@case(**SQUARE)
def a_view_in_no_grad_is_written_there(x, w):
    y = w * 2
    with torch.no_grad():
        v = y[1]
        v.mul_(4)
        u = v[1:]
        u.add_(1)
        total = v.sum() + u.sum()
    return (total * w).sum() + (y * x).sum()


@case(x=(3, 3), w=parameter(3, 3), pytorch="A view was created in no_grad mode")
def a_view_from_no_grad_is_written_outside(x, w):
    y = w * 2
    with torch.no_grad():
        v = y[1]
    v.mul_(4)
    return (y * x).sum()


@case(**SQUARE)
def a_result_of_no_grad_is_written_outside(x, w):
    with torch.no_grad():
        y = x + 1
    v = y[0]
    y.add_(1)
    v.mul_(w[0])
    return (y * w).sum() + (v * v).sum()


@case(**SQUARE)
def a_result_of_no_grad_is_written_in_another_no_grad(x, w):
    with torch.no_grad():
        y = w + 1
    with torch.no_grad():
        y[0].add_(1)
    return (y * w).sum()


@case(**SQUARE)
def the_same_tensor_passes_through_no_grad(x, w):
    y = w * 2
    with torch.no_grad():
        z = y.contiguous()
    return (z * x).sum() + y.sum()


@case(**SQUARE)
def an_inplace_result_of_no_grad_keeps_the_gradient(x, w):
    y = w * 2
    with torch.no_grad():
        z = y.add_(1)
    return (z * x).sum()


@case(**SQUARE)
def copy_in_no_grad(x, w):
    y = torch.zeros(3, 3)
    with torch.no_grad():
        y.copy_(w)
    return (y * w * x).sum()


@case(**SQUARE)
def masked_write_in_no_grad(x, w):
    y = w * 2
    with torch.no_grad():
        y[x > 0] = 0.0
    return (y * x).sum() + (y * y).sum()


@case(**SQUARE)
def enable_grad_in_no_grad(x, w):
    with torch.no_grad():
        a = w * 2
        with torch.enable_grad():
            b = a * w
            c = w * 3
        d = b * w
    return (b * x).sum() + (c * x).sum() + (d * w).sum()


@case(**SQUARE)
def a_write_in_enable_grad_in_no_grad(x, w):
    y = w * 2
    with torch.no_grad():
        y.add_(1)
        with torch.enable_grad():
            y.mul_(x)
        y.add_(w)
    return (y * x).sum()


@case(**SQUARE)
def set_grad_enabled(x, w):
    torch.set_grad_enabled(False)
    y = w * 2
    torch.set_grad_enabled(True)
    return (y * w * x).sum()


@case(**SQUARE)
def set_grad_enabled_as_a_context(x, w):
    y = w * 2
    with torch.set_grad_enabled(False):
        y.mul_(x)
        z = y * w
    with torch.set_grad_enabled(True):
        y.mul_(x)
    return (z * w).sum() + (y * x).sum()


@case(**SQUARE)
def no_grad_as_a_decorator(x, w):
    @torch.no_grad()
    def scale(y):
        return y.abs().mean()

    return (w / scale(w) * x).sum()


@case(x=(3, 3), w=parameter(3, 3), b=buffer(3, 3))
def a_moving_average_in_no_grad(x, w, b):
    with torch.no_grad():
        b.mul_(0.9).add_(w, alpha=0.1)
    return (b * w * x).sum()


@case(x=(3, 3), w=parameter(3, 3), b=buffer(3, 3))
def a_moving_average_by_copy(x, w, b):
    b.copy_(b * 0.9 + w.detach() * 0.1)
    return (b * w * x).sum()


@case(x=(3, 3), w=parameter(3, 3), refused='overwrites the parameter "w"')
def a_parameter_is_clamped_in_no_grad(x, w):
    with torch.no_grad():
        w.clamp_(-0.5, 0.5)
    return (w * x).sum()


@case(x=(3, 3), w=parameter(3, 3), refused='overwrites the parameter "w"')
def a_parameter_is_written_through_detach(x, w):
    w.detach()[0].fill_(1.0)
    return (w * x).sum()


@case(x=(3, 3), w=parameter(3, 3), refused='overwrites the parameter "w"')
def a_row_of_a_parameter_is_written_in_no_grad(x, w):
    with torch.no_grad():
        w[0].div_(w[0].norm())
    return (w * x).sum()


@case(x=(3, 3), w=parameter(3, 3), pytorch="fake tensor")
def a_write_through_data(x, w):
    y = w * 2
    y.data.fill_(1.0)
    return (y * x).sum()


@case(x=(3, 3), w=parameter(3, 3), strict=True, refused="as it does with `x.data`; use `x.detach()` instead")
def a_write_through_data_in_strict_mode(x, w):
    y = w * 2
    y.data.fill_(1.0)
    return (y * x).sum()


@case(x=(3, 3), w=parameter(3, 3), b=buffer(3), strict=True)
def parts_without_gradients_in_strict_mode(x, w, b):
    y = w * 2
    with torch.no_grad():
        y.mul_(2)
        v = y[0] + 1
        b.add_(1)
    y.detach()[1].fill_(1.0)
    return (y * x).sum() + (v * w[0] * b).sum()


@case(x=(3, 3), w=parameter(3, 3), refused="_has_compatible_shallow_copy_type")
def an_assignment_to_data(x, w):
    y = w * 2
    y.data = x
    return (y * w).sum()


@case(**SQUARE)
def a_checkpoint(x, w):
    def part(x, w):
        y = w * 2
        y[0].relu_()
        return y.mul_(x)

    return checkpoint(part, x, w, use_reentrant=False).sum()


@case(**SQUARE)
def a_checkpoint_that_writes_outside(x, w):
    y = w * 2

    def part(x, w):
        y.detach()[0].mul_(2)
        return x * w

    return (checkpoint(part, x, w, use_reentrant=False) * y).sum()


@case(**SQUARE)
def no_grad_in_a_checkpoint(x, w):
    def part(x, w):
        with torch.no_grad():
            scale = w.abs().max()
        return w / scale * x

    return checkpoint(part, x, w, use_reentrant=False).sum()


@case(**SQUARE)
def inference_of_a_target(x, w):
    with torch.no_grad():
        target = torch.softmax(x @ w + x, 1)
    return -(target * torch.log_softmax(x @ w, 1)).sum()


@case(**SQUARE)
def a_maximum_is_subtracted_without_gradient(x, w):
    y = x @ w
    return (y - y.max(1, keepdim=True)[0].detach()).exp().sum()


@case(**SQUARE)
def chained_inplace_calls_in_no_grad(x, w):
    y = w.clone()
    with torch.no_grad():
        y.add_(1).mul_(2)[0].sub_(x[0])
    return (y * x).sum()


@case(**SQUARE)
def detached_integers(x, w):
    y = torch.arange(9).view(3, 3)
    y.detach()[0] = 5
    return (y * w * x).sum()


@case(**SQUARE)
def a_split_is_written_in_no_grad(x, w):
    y = w * 2
    with torch.no_grad():
        a, b = y.split([1, 2])
        a.mul_(2)
        b.t()[0].zero_()
    return (y * x).sum()


@case(**SQUARE)
def unsqueeze_in_no_grad(x, w):
    y = w * 2
    with torch.no_grad():
        z = w * 3
        z.unsqueeze_(0)
        z[0, 1].fill_(1.0)
    return (y * z).sum()


@case(**SQUARE)
def a_gumbel_like_hard_choice(x, w):
    soft = torch.softmax(x @ w, -1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return ((hard - soft.detach() + soft) * x).sum()


class Quantised(torch.nn.Module):
    """A codebook with straight-through gradients and moving averages, as in VQ-VAE."""

    def __init__(self):
        super().__init__()
        self.encode = torch.nn.Linear(3, 4)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x):
        z = self.encode(x)
        with torch.no_grad():
            nearest = ((z[:, None] - self.codes) ** 2).sum(-1).argmin(-1)
            hot = torch.nn.functional.one_hot(nearest, 5).float()
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
        q = self.codes[nearest]
        loss = ((z - q.detach()) ** 2).mean()
        return loss + (z + (q - z).detach()).sum()


case(x=(6, 3), name="a_quantised_layer_with_moving_averages")(Quantised)

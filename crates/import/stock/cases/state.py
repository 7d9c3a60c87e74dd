"""Buffers, frozen and tied parameters, inputs and constants that the forward pass writes to."""

import torch

from cases import buffer, case, parameter

STATE = dict(x=(4, 3), w=parameter(3), b=buffer(3))


@case(**STATE)
def a_buffer_is_read(x, w, b):
    return (x * w * b).sum()


@case(**STATE)
def a_buffer_is_updated(x, w, b):
    b.add_(x.sum(0))
    return (x * w * b).sum()


@case(**STATE)
def a_buffer_is_updated_twice(x, w, b):
    b.mul_(0.5)
    y = (x * w + b).sum()
    b.add_(x[0])
    return y + (b * w).sum()


@case(**STATE)
def a_buffer_is_updated_and_not_read(x, w, b):
    b.copy_(x[0])
    return (x * w).sum()


@case(**STATE)
def a_part_of_a_buffer_is_updated(x, w, b):
    b[1:].add_(1)
    return (x * b * w).sum()


@case(**STATE)
def a_buffer_is_updated_through_a_view_of_a_view(x, w, b):
    b.view(1, 3).t()[::2].mul_(3)
    return (x * b * w).sum()


@case(x=(4, 3), w=parameter(3), b=buffer(3, 3))
def a_buffer_is_updated_through_its_diagonal(x, w, b):
    b.diagonal().add_(x[0])
    return (b * w).sum()


@case(**STATE)
def a_buffer_is_updated_through_detach(x, w, b):
    b.detach().add_(1)
    return (x * b * w).sum()


@case(**STATE, refused='needs the old content of buffer "b"')
def a_buffer_is_updated_with_a_gradient(x, w, b):
    b.mul_(w)
    return (x * b).sum()


@case(x=(4, 3), w=parameter(3), b=buffer([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
def a_queue(x, w, b):
    b[0] = b[1]
    b[1] = x.mean(0)
    return (b * w).sum()


@case(x=(4, 3), w=parameter(3), b=buffer(torch.tensor(3)))
def a_counter(x, w, b):
    b += 1
    return (x * w).sum() / b


@case(x=(4, 3), w=parameter(3), b=buffer(torch.tensor([True, False, True])))
def a_mask_is_updated(x, w, b):
    b.logical_not_()
    return (x * w).masked_fill(b, 0.0).sum()


@case(x=(4, 3), w=parameter(3), b=buffer(torch.tensor([True, False, True])))
def a_mask_is_a_constant(x, w, b):
    return (x[:, b] * w[b]).sum()


@case(x=(4, 3), w=parameter(3), b=buffer(torch.tensor([True, False, True])), refused="depends on the data")
def a_mask_is_updated_and_indexes(x, w, b):
    b.logical_not_()
    return (x[:, b] * w[b]).sum()


@case(x=(4, 3), w=parameter(3), b=buffer(3), refused="aten.resize_")
def a_buffer_is_resized(x, w, b):
    b.resize_(2)
    return (x * w).sum()


@case(x=(4, 3), w=parameter(3), pytorch="a leaf Variable that requires grad is being used in an in-place operation")
def a_parameter_is_updated(x, w):
    w.add_(1)
    return (x * w).sum()


@case(x=(4, 3), w=parameter(3), pytorch="a view of a leaf Variable that requires grad is being used")
def a_view_of_a_parameter_is_updated(x, w):
    w[0].add_(1)
    return (x * w).sum()


@case(x=(4, 3), w=parameter(3), v=parameter(3, trained=False))
def a_frozen_parameter_is_read(x, w, v):
    return (x * w * v).sum()


@case(x=(4, 3), w=parameter(3), v=parameter(3, trained=False))
def a_frozen_parameter_is_updated(x, w, v):
    v.mul_(2)
    return (x * w * v).sum()


@case(x=(4, 3), w=parameter(3))
def an_input_is_overwritten(x, w):
    x.mul_(2)
    x[0].zero_()
    return (x * w).sum()


@case(x=(4, 3), w=parameter(3))
def an_input_is_overwritten_with_a_gradient(x, w):
    x[1:].mul_(w)
    return (x * x).sum()


@case(x=(4, 3), w=parameter(3))
def a_constant_of_the_function_is_overwritten(x, w):
    y = torch.tensor([1.0, 2.0, 3.0])
    y[1] = 5.0
    y.mul_(w)
    return (x * y).sum()


@case(x=(4, 3), w=parameter(3))
def zeros_are_filled(x, w):
    y = torch.zeros(4, 3)
    for i in range(4):
        y[i] = x[i] * w
    return (y * y).sum()


@case(x=(4, 3), w=parameter(3))
def empty_memory_is_filled(x, w):
    y = torch.empty(4, 3)
    y[:2] = x[:2] * w
    y[2:] = 1.0
    return (y * y).sum()


def module(name, **expected):
    """A case that is a module with a linear layer `f` from 3 to 3, with inputs [4, 3]."""
    return case(x=(4, 3), name=name, **expected)


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.f = torch.nn.Linear(3, 3)


@module("a_tensor_that_is_no_buffer_is_read")
class Attribute(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x):
        return (self.f(x) * self.scale).sum()


@module("a_tensor_that_is_no_buffer_is_overwritten", refused="make it a buffer")
class WrittenAttribute(Base):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(3)

    def forward(self, x):
        self.count.add_(1)
        return (self.f(x) * self.count).sum()


@module("tied_parameters_in_strict_mode", strict=True)
@module("tied_parameters")
class Tied(Base):
    def __init__(self):
        super().__init__()
        self.g = torch.nn.Linear(3, 3)
        self.g.weight = self.f.weight

    def forward(self, x):
        return self.g(torch.tanh(self.f(x))).square().sum()


@module("a_layer_called_twice")
class Twice(Base):
    def forward(self, x):
        return self.f(torch.tanh(self.f(x))).square().sum()


@module("parameters_that_share_a_part", refused="share")
class Overlapping(Base):
    def __init__(self):
        super().__init__()
        self.row = torch.nn.Parameter(self.f.weight.data[0])

    def forward(self, x):
        return (self.f(x) * self.row).sum()


@module("a_buffer_that_is_a_parameter", refused="share")
class Shadow(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("old", self.f.weight.data)

    def forward(self, x):
        return (self.f(x) @ self.old).sum()


@module("tied_buffers_are_read")
class SharedBuffers(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.randn(3))
        self.register_buffer("b", self.a)
        self.register_buffer("c", self.a[1:])

    def forward(self, x):
        return (self.f(x) * self.a * self.b).sum() + self.c.sum()


@module("tied_buffers_are_updated_in_strict_mode", strict=True)
@module("tied_buffers_are_updated")
class UpdatedSharedBuffers(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.randn(3))
        self.register_buffer("b", self.a)

    def forward(self, x):
        self.a.mul_(2)
        y = (self.f(x) + self.b).square().sum()
        self.b.add_(1)
        return y + (self.f(x) * self.a).sum()


@module("buffers_that_share_a_part_are_updated", refused="share")
class UpdatedOverlap(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.randn(3))
        self.register_buffer("b", self.a[1:])

    def forward(self, x):
        self.b.mul_(2)
        return (self.f(x) * self.a).sum()


@module("a_buffer_that_is_not_saved_is_updated")
class Passing(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.ones(3), persistent=False)

    def forward(self, x):
        self.a.mul_(2)
        return (self.f(x) * self.a).sum()


@module("a_buffer_in_a_transposed_order_is_updated")
class Transposed(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.randn(3, 2).t())

    def forward(self, x):
        self.a[0].add_(x[0])
        return (self.f(x)[:2] * self.a.reshape(2, 3)).sum()


class Normalised(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        # A bias would have no gradient.
        self.f, self.norm = torch.nn.Linear(3, 3, bias=False), torch.nn.BatchNorm1d(3, **options)
        torch.nn.init.normal_(self.norm.weight)


class Once(Normalised):
    def forward(self, x):
        return (self.norm(self.f(x)) * x).pow(3).sum()


class Both(Normalised):
    def forward(self, x):
        return self.norm(torch.tanh(self.norm(self.f(x)))).pow(3).sum()


class Siamese(Normalised):
    """One batch norm for two halves of a batch, as in contrastive learning."""

    def forward(self, x):
        a, b = self.norm(self.f(x[:4])), self.norm(self.f(x[4:]))
        return ((a - b) ** 2).sum() + (a**3).sum()


class OwnStatistics(Normalised):
    def forward(self, x):
        y = self.norm(self.f(x))
        return (y.pow(3) * self.norm.running_mean * self.norm.running_var * x).sum()


class Untracked(Normalised):
    def __init__(self):
        super().__init__(track_running_stats=False)

    def forward(self, x):
        return self.norm(torch.tanh(self.norm(self.f(x)))).pow(3).sum()


class PlainNorm(Normalised):
    def __init__(self):
        super().__init__(momentum=0.3, eps=1e-3)

    def forward(self, x):
        return self.norm(self.norm(self.f(x)) + x).pow(3).sum()


for model in [Once, Both, Siamese, OwnStatistics, PlainNorm]:
    name = f"batch_norm_{model.__name__.lower()}"
    case(x=(8, 3), name=f"{name}_in_training", tolerance=1e-4)(model)
    case(x=(8, 3), name=f"{name}_in_evaluation", training=False, tolerance=1e-4)(model)
    case(x=(8, 3), name=f"{name}_decomposed", decomposed=True, tolerance=1e-4)(model)
case(x=(8, 3), name="batch_norm_untracked", tolerance=1e-4)(Untracked)


class HalfFrozen(Normalised):
    """One call with the statistics of the batch, one with the running ones."""

    def forward(self, x):
        y = self.norm(self.f(x))
        self.norm.eval()
        z = self.norm(y)
        self.norm.train()
        return z.pow(3).sum()


case(x=(8, 3), name="batch_norm_in_both_modes", tolerance=1e-4)(HalfFrozen)


class InNoGrad(Normalised):
    """A teacher that shares the statistics."""

    def forward(self, x):
        with torch.no_grad():
            target = self.norm(self.f(x))
        return ((self.norm(self.f(x * x)) - target) * x).pow(3).sum()


case(x=(8, 3), name="batch_norm_in_no_grad", tolerance=1e-4)(InNoGrad)

"""Values and gradients at the boundaries of elementwise functions: bounds, zeros, ties, saturation."""

import torch
import torch.nn.functional as F

from cases import case, parameter

INFINITY = float("inf")


def at(name, function, *contents, **expected):
    """A case of `function` at parameters with these contents. Each element of the result has another weight."""
    parameters = [torch.as_tensor(content) for content in contents]
    result = function(*parameters)
    weights = 1 + torch.arange(float(max(result.numel(), 1))) / 2
    weights = weights.reshape(result.shape) if result.dim() else weights

    def weighted(x, **kept):
        return (function(*kept.values()) * x).sum()

    weighted.__module__ = function.__module__
    kept = {f"w{i}": parameter(content) for i, content in enumerate(parameters)}
    case(name=name, x=weights, **kept, **expected)(weighted)


LINE = [-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 7.0]
FAR = [-200.0, -100.0, -50.0, -20.0, 20.0, 50.0, 88.0]
LOW, HIGH = [-1.0, -1.0, 0.0, -1.0, -1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
BETWEEN = [-2.0, -1.0, 0.0, 1.0, 2.0, 0.0, 1.0, 2.0]

at("clamp", lambda w: w.clamp(-1, 1), LINE)
at("clamp_from_below", lambda w: w.clamp(min=0), LINE)
at("clamp_min", lambda w: torch.clamp_min(w, -1.0), LINE)
at("clamp_max", lambda w: torch.clamp_max(w, 2.0), LINE)
at("clamp_twice", lambda w: w.clamp(min=0).clamp(max=6), LINE)
at("clamp_to_one_number", lambda w: w.clamp(1, 1), LINE)
at("clamp_between_crossed_bounds", lambda w: w.clamp(2, -1), LINE)
at("clamp_to_tensors", torch.clamp, BETWEEN, LOW, HIGH)
at("clamp_to_a_lower_tensor", lambda w, a: w.clamp(min=a), BETWEEN, LOW)
at("clamp_to_an_upper_tensor", lambda w, a: w.clamp(max=a), BETWEEN, HIGH)
at("clamp_to_crossed_tensors", torch.clamp, BETWEEN, [2.0] * 8, [-1.0] * 8)
at("clamp_min_of_a_tensor", torch.clamp_min, BETWEEN, LOW)
at("clamp_max_of_a_tensor", torch.clamp_max, BETWEEN, HIGH)
at("clamp_that_broadcasts", lambda w, a: w.clamp(min=a), [[-2.0, -1.0], [0.0, 1.0]], [-1.0, -1.0])
at("clamp_to_constant_tensors", lambda w: torch.clamp(w, torch.tensor(-1.0), torch.tensor(1.0)), LINE)
at("log_of_a_clamp", lambda w: w.clamp(min=1e-8).log(), [0.0, 1.0, 1e-8])

at("maximum", torch.maximum, [0.0, 1.0, 2.0], [0.0, 2.0, 1.0])
at("minimum", torch.minimum, [0.0, 1.0, 2.0], [0.0, 2.0, 1.0])
at("max_of_two", torch.max, [0.0, 1.0, 2.0], [0.0, 2.0, 1.0])
at("maximum_of_itself", lambda w: torch.maximum(w, w), [0.0, 1.0])
at("maximum_with_a_constant", lambda w: torch.maximum(w, torch.tensor(1.0)), [0.0, 1.0, 2.0])
at("minimum_with_a_constant", lambda w: torch.minimum(w, torch.ones(3)), [0.0, 1.0, 2.0])

ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh_from_-2_to_3": lambda w: F.hardtanh(w, -2, 3),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_of_a_fifth": lambda w: F.leaky_relu(w, 0.2),
    "elu": F.elu,
    "elu_of_two": lambda w: F.elu(w, 2.0),
    "selu": F.selu,
    "celu": F.celu,
    "celu_of_a_half": lambda w: F.celu(w, 0.5),
    "softplus": F.softplus,
    "softplus_with_a_threshold": lambda w: F.softplus(w, 2.0, 4.0),
    "threshold": lambda w: F.threshold(w, 1.0, -7.0),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "mish": F.mish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_by_tanh": lambda w: F.gelu(w, approximate="tanh"),
    "log_sigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "expm1": torch.expm1,
}
for name, function in ACTIVATIONS.items():
    at(f"{name}_near_zero", function, LINE)
    # The loss of a few times exp(88) is infinite, and so says nothing.
    at(f"{name}_far_away", function, FAR[:-1] if name == "expm1" else FAR)
at("softplus_at_its_threshold", F.softplus, [19.0, 19.9999, 20.0, 20.0001, 21.0])

ROUNDED = {
    "abs": torch.abs,
    "sign": lambda w: w * torch.sign(w),
    "sgn": lambda w: w * torch.sgn(w),
    "round": lambda w: w * torch.round(w),
    "round_half_to_even": lambda w: w * torch.round(w + 0.5),
    "floor": lambda w: w * torch.floor(w),
    "ceil": lambda w: w * torch.ceil(w),
    "trunc": lambda w: w * torch.trunc(w),
    "square_of_relu": lambda w: F.relu(w) ** 2,
    "nan_to_num": torch.nan_to_num,
    "max_with_zeros": lambda w: torch.max(w, torch.zeros_like(w)),
    "product_of_conditions": lambda w: w * (w >= 0) * (w <= 1),
}
for name, function in ROUNDED.items():
    at(name, function, LINE)
at("round_of_a_constant", lambda w: w * torch.round(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])), [1.0] * 6)
at("prelu", F.prelu, [[-1.0, 0.0, 1.0], [0.0, 0.0, 2.0]], [0.25])
at("prelu_by_channel", F.prelu, [[-1.0, 0.0, 1.0], [0.0, 0.0, 2.0]], [0.25, 0.0, -1.0])
at("prelu_of_images", F.prelu, torch.linspace(-1, 1, 8).reshape(1, 2, 2, 2), [0.25, 0.0])

at("zero_to_a_tensor", lambda w: 0.0**w, [1.0, 2.0, 0.5, 0.0])
at("one_to_a_tensor", lambda w: 1.0**w, [1.0, 2.0, 0.0, -1.0])
at("two_to_a_tensor", lambda w: 2.0**w, [1.0, 2.0, 0.0, -1.0])
for exponent in [0, 1, 2, 3, 4, 1.5, 0.0]:
    at(f"to_the_power_of_{exponent!r}", lambda w, n=exponent: w**n + w, [0.0, 1.0, 2.0])
at("to_the_power_of_-2", lambda w: w**-2, [1.0, -1.0, 2.0])
at("tensor_to_a_tensor", lambda a, b: a**b, [0.0, 0.0, 1.0, 2.0, 3.0, 0.5], [1.0, 2.0, 0.0, 0.0, -2.0, 0.5])
at("zero_to_a_constant", lambda w: w ** torch.tensor([0.0, 1.0, 2.0, 3.0]), [0.0] * 4)
at("constant_to_zero", lambda w: torch.tensor([0.0, 1.0, 2.0, 0.0]) ** w, [0.0, 1.0, 2.0, 3.0])
at("zero_to_zero", lambda a, b: a**b, [0.0, 2.0], [0.0, 0.0])
at("sqrt_with_an_epsilon", lambda w: (w * w + 1e-12).sqrt(), [0.0, 1.0])
at("log1p", torch.log1p, [0.0, -0.5, 1e-10])

SIGNS = [5.0, -5.0, 5.0, -5.0, 6.0, 0.0], [3.0, 3.0, -3.0, -3.0, 3.0, 2.0]
at("remainder", torch.remainder, *SIGNS)
at("fmod", torch.fmod, *SIGNS)
at("floored_quotient", lambda a, b: a + torch.div(a, b, rounding_mode="floor"), *SIGNS)
at("truncated_quotient", lambda a, b: a + torch.div(a, b, rounding_mode="trunc"), *SIGNS)
at("remainder_by_a_number", lambda w: torch.remainder(w, -3.0), LINE)
at("fmod_by_a_number", lambda w: torch.fmod(w, -3.0), LINE)
NUMERATORS, DENOMINATORS = torch.tensor([5, -5, 6, -6, 7, 1]), torch.tensor([3, 3, -3, -3, 2, 2])
at("floored_integers", lambda w: w * (NUMERATORS // DENOMINATORS), [1.0] * 6)
at("truncated_integers", lambda w: w * torch.div(NUMERATORS, DENOMINATORS, rounding_mode="trunc"), [1.0] * 6)
at("remainders_of_integers", lambda w: w * (NUMERATORS % DENOMINATORS), [1.0] * 6)
at("an_integer_compared_with_a_fraction", lambda w: torch.where(torch.arange(3) > 1.5, w, 2 * w), [1.0, 2.0, 3.0])

at("copysign_of_signed_zeros", torch.copysign, [0.0, 1.0, -2.0, 3.0], [1.0, -1.0, 0.0, -0.0])
at("where_a_logarithm_is_not_taken", lambda w: torch.where(w > 0, w.log(), w), [-1.0, 1.0, 2.0])
at("where_twice", lambda w: torch.where(w > 0, torch.where(w > 0, w, 1.0).log(), w), [-1.0, 0.0, 2.0])
at("a_division_of_zero", lambda w: w / torch.tensor([1.0, 2.0]), [0.0, 1.0])
at("lerp", torch.lerp, [0.0, 1.0], [2.0, 3.0], [0.7, 0.2])
at("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), [0.0, 1.0], [2.0, 3.0], [0.7, 0.2])
at("outer_of_two_precisions", lambda w: torch.outer(w, torch.ones(2, dtype=torch.float64)).float(), [1.0, 2.0])
at("outer", torch.outer, [1.0, 2.0], [3.0, 4.0, 5.0])

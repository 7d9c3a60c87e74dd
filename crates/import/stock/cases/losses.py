"""Losses where they saturate, at their kinks, and with targets that do not count."""

import torch
import torch.nn.functional as F

from cases import case
from cases.values import INFINITY, at

REDUCTIONS = ["none", "mean", "sum"]

BITS, ENDS = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5]), [0.0, 1.0, 1.0, 0.0, 1.0]
SATURATED = [-200.0, 200.0, 200.0, -200.0, 0.0]
WEIGHTS = torch.tensor([3.0, 1.0, 2.0, 0.0, 1.0])
for reduction in REDUCTIONS:
    at(f"binary_cross_entropy_at_0_and_1_{reduction}",
       lambda w, r=reduction: F.binary_cross_entropy(w, BITS, reduction=r), ENDS)
    at(f"binary_cross_entropy_with_logits_{reduction}",
       lambda w, r=reduction: F.binary_cross_entropy_with_logits(w, BITS, reduction=r), SATURATED)
at("binary_cross_entropy_with_weights", lambda w: F.binary_cross_entropy(w, BITS, weight=WEIGHTS), ENDS)
at("binary_cross_entropy_of_a_sigmoid", lambda w: F.binary_cross_entropy(torch.sigmoid(w), BITS), SATURATED)
at("binary_cross_entropy_of_tiny_numbers",
   lambda w: F.binary_cross_entropy(w, BITS), [1e-20, 1e-13, 1e-7, 1e-38, 1e-6])
at("binary_cross_entropy_with_trained_targets", F.binary_cross_entropy, [0.2, 0.5, 0.9], [0.0, 1.0, 0.5])
at("logits_with_pos_weight",
   lambda w: F.binary_cross_entropy_with_logits(w, BITS, pos_weight=torch.tensor([3.0])), SATURATED)
at("logits_with_both_weights",
   lambda w: F.binary_cross_entropy_with_logits(w, BITS, weight=WEIGHTS, pos_weight=torch.tensor([3.0])), SATURATED)
at("logits_with_trained_targets", F.binary_cross_entropy_with_logits, [-2.0, 3.0, 0.0], [0.0, 1.0, 0.5])

LOGITS = [[1.0, 2.0, 3.0], [-50.0, 0.0, 80.0], [0.0, 0.0, 0.0], [1000.0, -1000.0, 0.0]]
CLASSES, SOME, NONE = torch.tensor([0, 2, 1, 0]), torch.tensor([0, -100, 1, -100]), torch.tensor([-100] * 4)
BY_CLASS = torch.tensor([1.0, 0.0, 2.0])
FORMS = {"plain": {}, "smoothed": {"label_smoothing": 0.1}, "weighted": {"weight": BY_CLASS}}
FORMS["weighted_and_smoothed"] = {"weight": BY_CLASS, "label_smoothing": 0.2}
for reduction in REDUCTIONS:
    for name, options in FORMS.items():
        options = {"reduction": reduction, **options}
        at(f"cross_entropy_{name}_{reduction}", lambda w, o=options: F.cross_entropy(w, CLASSES, **o), LOGITS)
        at(f"cross_entropy_{name}_{reduction}_of_some", lambda w, o=options: F.cross_entropy(w, SOME, **o), LOGITS)
        if reduction != "mean":
            # The mean of no targets is NaN.
            at(f"cross_entropy_{name}_{reduction}_of_none",
               lambda w, o=options: F.cross_entropy(w, NONE, **o), LOGITS)
    at(f"nll_loss_{reduction}",
       lambda w, r=reduction: F.nll_loss(F.log_softmax(w, 1), SOME, weight=BY_CLASS, reduction=r), LOGITS)
at("cross_entropy_that_ignores_a_class",
   lambda w: F.cross_entropy(w, torch.tensor([0, 2, 1, 2]), ignore_index=2, label_smoothing=0.1), LOGITS)
at("cross_entropy_of_one_sample", lambda w: F.cross_entropy(w, torch.tensor(1)), [1.0, 2.0, 3.0])
PIXELS = torch.tensor([[0, 1, 2, -100]])
at("cross_entropy_of_pixels", lambda w: F.cross_entropy(w.reshape(1, 3, 4), PIXELS), LOGITS)
at("cross_entropy_of_pixels_with_all_options",
   lambda w: F.cross_entropy(w.reshape(1, 3, 4), PIXELS, weight=BY_CLASS, label_smoothing=0.3, reduction="none"),
   LOGITS)
MASKED = torch.tensor([[False, True, False]] * 4)
for reduction in REDUCTIONS:
    at(f"cross_entropy_of_masked_logits_{reduction}",
       lambda w, r=reduction: F.cross_entropy(
           w.masked_fill(MASKED, -INFINITY), torch.tensor([0, 2, -100, 0]), reduction=r), LOGITS)
at("an_ignored_row_of_masked_logits",
   lambda w: F.cross_entropy(
       w.masked_fill(torch.tensor([[True, False, False]] * 4), -INFINITY), torch.tensor([1, 2, -100, 2])), LOGITS)
PROBABILITIES = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
at("cross_entropy_of_probabilities", lambda w: F.cross_entropy(w, PROBABILITIES), LOGITS)
at("cross_entropy_of_weighted_probabilities",
   lambda w: F.cross_entropy(w, PROBABILITIES, weight=BY_CLASS, label_smoothing=0.1), LOGITS)
at("kl_div_of_zeros", lambda w: F.kl_div(F.log_softmax(w, 1), PROBABILITIES, reduction="batchmean"), LOGITS)
at("kl_div_of_logarithms",
   lambda w: F.kl_div(F.log_softmax(w, 1), torch.log_softmax(torch.zeros(4, 3), 1), log_target=True, reduction="sum"),
   LOGITS)

DISTANCES, ORIGIN = [-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], torch.zeros(7)
for reduction in REDUCTIONS:
    at(f"huber_loss_{reduction}", lambda w, r=reduction: F.huber_loss(w, ORIGIN, reduction=r), DISTANCES)
    at(f"smooth_l1_loss_{reduction}", lambda w, r=reduction: F.smooth_l1_loss(w, ORIGIN, reduction=r), DISTANCES)
for bound in [0.5, 2.0]:
    at(f"huber_loss_at_{bound}", lambda w, b=bound: F.huber_loss(w, ORIGIN, delta=b, reduction="none"), DISTANCES)
    at(f"smooth_l1_loss_at_{bound}",
       lambda w, b=bound: F.smooth_l1_loss(w, ORIGIN, beta=b, reduction="none"), DISTANCES)
at("smooth_l1_loss_at_0", lambda w: F.smooth_l1_loss(w, ORIGIN, beta=0.0, reduction="none"), DISTANCES)
at("l1_loss", lambda w, t: F.l1_loss(w, t), DISTANCES, ORIGIN)
at("mse_loss", lambda w, t: F.mse_loss(w, t), DISTANCES, ORIGIN)

ROWS, IDS = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 3, 3, 3])
at("embedding", lambda w: F.embedding(IDS, w), ROWS)
at("embedding_with_padding", lambda w: F.embedding(IDS, w, padding_idx=1), ROWS)
at("embedding_with_padding_from_the_end", lambda w: F.embedding(IDS, w, padding_idx=-1), ROWS)
at("embedding_scaled_by_frequency", lambda w: F.embedding(IDS, w, scale_grad_by_freq=True), ROWS,
   refused="scale_grad_by_freq")
at("embedding_of_a_largest_norm", lambda w: F.embedding(IDS, w.clone(), max_norm=1.0), ROWS,
   refused="embedding_renorm_")


class Twice(torch.nn.Module):
    """A module that calls one batch norm twice."""

    options = {}

    def __init__(self):
        super().__init__()
        # A bias before the norm has a gradient of 0, of which only rounding is left.
        self.first, self.second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1)
        self.norm = torch.nn.BatchNorm1d(4, **self.options)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.second(self.norm(x)).square().mean()


class TwiceWithoutStatistics(Twice):
    options = {"track_running_stats": False}


class TwiceWithAnAverage(Twice):
    options = {"momentum": None}


# The gradients of two norms in a row lose digits.
case(name="one_batch_norm_called_twice", x=(8, 4), tolerance=1e-4)(Twice)
case(name="one_batch_norm_called_twice_in_evaluation", x=(8, 4), training=False)(Twice)
case(name="one_batch_norm_called_twice_decomposed", x=(8, 4), decomposed=True, tolerance=1e-4)(Twice)
case(name="one_batch_norm_without_statistics", x=(8, 4), tolerance=1e-4)(TwiceWithoutStatistics)
case(name="one_batch_norm_with_an_average", x=(8, 4), pytorch="data-dependent")(TwiceWithAnAverage)

"""Models that return more than their loss. The loss is the single number that parameters have a gradient of."""

import torch
import torch.nn.functional as F

from cases import case, parameter

CLASSES = dict(x=(6, 3), y=torch.tensor([0, 3, 1, 2, 0, 1]), w=parameter(4, 3))


def loss_and_accuracy(x, y, w):
    logits = x @ w.t()
    return F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()


@case(**CLASSES, loss=1)
def an_accuracy_before_the_loss(x, y, w):
    loss, accuracy = loss_and_accuracy(x, y, w)
    return accuracy, loss


@case(**CLASSES, loss=0)
def an_accuracy_after_the_loss(x, y, w):
    return loss_and_accuracy(x, y, w)


@case(**CLASSES, loss=3)
def logits_a_count_and_a_detached_loss_before_the_loss(x, y, w):
    loss, _ = loss_and_accuracy(x, y, w)
    return x @ w.t(), y.numel(), loss.detach(), loss * 2


@case(**CLASSES, loss="loss")
def an_auxiliary_number_before_the_one_that_is_called_loss(x, y, w):
    loss, accuracy = loss_and_accuracy(x, y, w)
    return {"accuracy": accuracy, "penalty": (w * w).sum(), "loss": loss}


@case(**CLASSES, loss=0)
def the_first_of_two_losses(x, y, w):
    loss, _ = loss_and_accuracy(x, y, w)
    return loss, loss * 3


@case(**CLASSES, loss=1)
def a_distance_in_whole_steps_before_the_loss(x, y, w):
    """PyTorch has a gradient of `round`, which is 0 everywhere."""
    return (x @ w.t()).round().abs().mean(), ((x @ w.t()) ** 2).mean()


@case(**CLASSES, loss=1)
def a_loss_of_one_element_after_numbers_of_a_sample_each(x, y, w):
    logits = x @ w.t()
    return F.cross_entropy(logits, y, reduction="none"), F.cross_entropy(logits, y).reshape(1)


@case(**CLASSES, refused="no parameter has a gradient of output 0 (`mean`)")
def an_accuracy_alone(x, y, w):
    return loss_and_accuracy(x, y, w)[1]


@case(**CLASSES, loss=0, refused="no parameter has a gradient of output 0 (`detach`) and output 1 (`mean`)")
def a_detached_loss_and_an_accuracy(x, y, w):
    loss, accuracy = loss_and_accuracy(x, y, w)
    return loss.detach(), accuracy

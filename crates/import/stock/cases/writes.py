"""Writes through views, and to tensors that have views."""

import torch

from cases import buffer, case, parameter


@case(x=(3, 3), w=parameter(3, 3))
def through_diagonal(x, w):
    y = w * 2
    y.diagonal().fill_(3.0)
    return (y * x).sum()


@case(x=(3, 3), w=parameter(3, 3))
def through_select(x, w):
    y = w * 2
    y[1].mul_(x[0])
    return (y * x).sum()


@case(x=(3, 3), b=buffer(3), w=parameter(3))
def a_part_of_a_buffer(x, b, w):
    b[1:].add_(1)
    return (x * b * w).sum()


@case(x=(3, 3), w=parameter(3, 3), pytorch="leaf")
def a_parameter(x, w):
    w.add_(1)
    return (w * x).sum()

"""Reductions of ties, zeros and constants: products, norms, deviations, extrema, softmax, pooling and normalisation."""

import torch
import torch.nn.functional as F

from cases.values import INFINITY, at

TIES = [[1.0, 2.0, 2.0], [3.0, 3.0, 3.0], [0.0, -1.0, 0.0]]
for name in ["amax", "amin"]:
    extremum = getattr(torch, name)
    at(f"{name}_of_rows", lambda w, f=extremum: f(w, dim=1), TIES)
    at(f"{name}_of_all", lambda w, f=extremum: f(w), TIES)
    at(f"{name}_of_both_dimensions", lambda w, f=extremum: f(w, dim=(0, 1)), TIES)
at("max_of_all", lambda w: w.max(), TIES)
at("min_of_all", lambda w: w.min(), TIES)
at("max_of_rows", lambda w: w.max(1).values, TIES)
at("min_of_rows", lambda w: w.min(1).values, TIES)
at("max_of_columns", lambda w: w.max(0, keepdim=True).values, TIES)
at("topk", lambda w: w.topk(2, dim=1).values, TIES)
at("sort", lambda w: w.sort(dim=1).values, TIES)
at("sort_descending", lambda w: w.sort(dim=1, descending=True).values, TIES)
at("positions_of_a_stable_sort", lambda w: w * w.sort(dim=1, stable=True).indices, TIES)
at("positions_of_a_stable_descending_sort", lambda w: w * w.sort(dim=1, stable=True, descending=True)[1], TIES)
at("argmax", lambda w: w[0] * w.argmax(1), TIES)
at("argmin", lambda w: w[0] * w.argmin(1), TIES)

ZEROS = [[1.0, 2.0, 3.0], [0.0, 2.0, 3.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 2.0]]
at("prod_of_rows", lambda w: w.prod(1), ZEROS)
at("prod_of_columns", lambda w: w.prod(0, keepdim=True), ZEROS)
at("prod_without_a_zero", lambda w: w.prod(), [1.0, 2.0, 3.0])
at("prod_with_a_zero", lambda w: w.prod(), [[1.0, 0.0], [2.0, 3.0]])
at("prod_with_two_zeros", lambda w: w.prod(), [0.0, 0.0, 3.0])
at("prod_of_one_element", lambda w: w.prod(1), [[0.0], [2.0]])
at("cumprod", lambda w: w.cumprod(1), ZEROS, refused="cumprod")
at("cumsum", lambda w: w.cumsum(1), ZEROS)

CONSTANT = [[2.0, 2.0, 2.0], [1.0, 2.0, 3.0]]
at("std_of_rows", lambda w: w.std(1), CONSTANT)
at("std_of_all", lambda w: w.std(), [2.0, 2.0, 2.0])
at("std_with_bias", lambda w: w.std(1, unbiased=False), CONSTANT)
at("std_with_a_correction_of_two", lambda w: w.std(1, correction=2), CONSTANT)
at("std_and_mean", lambda w: sum(torch.std_mean(w, 1)), CONSTANT)
at("var_of_rows", lambda w: w.var(1), CONSTANT)
at("var_and_mean", lambda w: sum(torch.var_mean(w, 1)), CONSTANT)
at("var_of_one_element", lambda w: w.var(1, unbiased=False), [[1.0], [2.0]])
at("division_by_std", lambda w: (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5), CONSTANT)

VECTORS = [[0.0, 0.0, 0.0], [0.0, 3.0, -4.0], [2.0, -2.0, 2.0]]
for p in [0, 0.5, 1, 1.5, 2, 3, 4, INFINITY, -INFINITY, -1]:
    at(f"vector_norm_{p}", lambda w, p=p: torch.linalg.vector_norm(w, p, dim=1), VECTORS)
    at(f"vector_norm_{p}_of_all", lambda w, p=p: torch.linalg.vector_norm(w, p), [0.0, 0.0])
    at(f"norm_{p}", lambda w, p=p: torch.norm(w, p, dim=1), VECTORS)
for p in [1, 2, INFINITY]:
    at(f"normalize_{p}", lambda w, p=p: F.normalize(w, p=p, dim=1), VECTORS)

MASK = torch.tensor([[False, False, True], [True, True, True], [False, False, False]])
FEW = torch.tensor([[False, False, True], [True, True, False], [False, False, False]])
LARGE = [[1.0, 2.0, 3.0], [-50.0, 0.0, 80.0], [0.0, 0.0, 0.0], [1000.0, -1000.0, 0.0]]
at("logsumexp_of_large_numbers", lambda w: torch.logsumexp(w, 1), LARGE)
at("logsumexp_of_masked_elements", lambda w: torch.logsumexp(w.masked_fill(FEW, -INFINITY), 1), TIES)
at("softmax_of_large_numbers", lambda w: torch.softmax(w, 1), LARGE)
at("log_softmax_of_large_numbers", lambda w: F.log_softmax(w, 1), LARGE)
at("softmax_of_huge_numbers", lambda w: torch.softmax(w, 1), [[1e30, -1e30, 0.0], [3e38, 3e38, 0.0]])
at("softmax_of_masked_elements", lambda w: torch.softmax(w.masked_fill(FEW, -INFINITY), 1), TIES)
at("log_softmax_of_masked_elements",
   lambda w: F.log_softmax(w.masked_fill(FEW, -INFINITY), 1).masked_fill(FEW, 0.0), TIES)
at("attention_with_a_masked_row",
   lambda w: F.scaled_dot_product_attention(w[None], w[None], w[None], attn_mask=~MASK), TIES)
at("softmax_in_double_precision", lambda w: torch.softmax(w, 0, dtype=torch.float64).float(), [1.0, 0.0, -1.0])
at("log_of_a_saturated_softmax", lambda w: torch.log(torch.softmax(w, 0) + 1e-10), [100.0, -100.0, 0.0])

EQUAL, COUNTED = torch.zeros(1, 1, 4, 4), torch.arange(16.0).reshape(1, 1, 4, 4)
at("max_pool2d_of_ties", lambda w: F.max_pool2d(w, 2), EQUAL)
at("max_pool1d_of_ties", lambda w: F.max_pool1d(w, 3, 2, 1), EQUAL[0])
at("adaptive_max_pool2d_to_one_of_ties", lambda w: F.adaptive_max_pool2d(w, 1), EQUAL)
at("adaptive_max_pool2d_to_two_of_ties", lambda w: F.adaptive_max_pool2d(w, 2), EQUAL)
for name, pool in {"max": F.max_pool2d, "avg": F.avg_pool2d}.items():
    at(f"{name}_pool2d_with_ceil_mode", lambda w, f=pool: f(w, 3, 2, ceil_mode=True), COUNTED)
    at(f"{name}_pool2d_with_padding", lambda w, f=pool: f(w, 3, 2, 1, ceil_mode=True), -1 - COUNTED)
    at(f"{name}_pool2d_larger_than_its_operand", lambda w, f=pool: f(w, 5, 5, ceil_mode=True), COUNTED)
    at(f"{name}_pool2d_larger_in_one_direction", lambda w, f=pool: f(w, (6, 3), 3, ceil_mode=True), COUNTED)
    at(f"{name}_pool2d_larger_than_padding", lambda w, f=pool: f(w, 9, 7, 2, ceil_mode=True), COUNTED)
at("max_pool2d_dilated_beyond_its_operand", lambda w: F.max_pool2d(w, 3, 3, 0, 2, ceil_mode=True), COUNTED)
at("avg_pool2d_without_counting_padding",
   lambda w: F.avg_pool2d(w, 9, 7, 2, ceil_mode=True, count_include_pad=False), COUNTED)
at("avg_pool1d_larger_than_its_operand", lambda w: F.avg_pool1d(w, 5, 5, ceil_mode=True), COUNTED[0])
at("max_pool1d_larger_than_its_operand", lambda w: F.max_pool1d(w, 5, 5, ceil_mode=True), COUNTED[0])

at("layer_norm_of_a_constant", lambda w: F.layer_norm(w, (3,)), CONSTANT)
at("rms_norm_of_zeros", lambda w: F.rms_norm(w, (3,)), VECTORS)
at("group_norm_of_a_constant", lambda w: F.group_norm(w, 1), torch.ones(2, 2, 2))
at("instance_norm_of_a_constant", lambda w: F.instance_norm(w), torch.ones(2, 2, 2))
at("batch_norm_of_a_constant", lambda w: F.batch_norm(w, None, None, training=True), torch.ones(2, 2, 2))

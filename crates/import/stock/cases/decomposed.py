"""Archives after `run_decompositions()`, of models without `detach` and `no_grad`."""

import torch

from cases import case, parameter
from cases.views import VIEWS, through
from cases.writes import WRITES, written

# PyTorch's decomposition gets writes through windows with gaps wrong, and has no view but the last for these.
LEFT_OUT = {"unfold_with_gaps", "view_of_the_same_type", "detach", "as_strided_of_a_transposed", "as_strided_of_a_slice",
            "split", "split_sizes", "chunk", "unbind", "chunk_of_a_permuted"}
for key, make in VIEWS.items():
    if key not in LEFT_OUT:
        case(x=(4, 6), w=parameter(4, 6), name=f"{key}_is_written", decomposed=True)(through(make))

# The importer does not know these operators. The hint says that decomposing may help, and it does.
for key in ["index_fill_", "fill_diagonal_", "out_of_add", "out_of_a_view"]:
    case(x=(3, 4), w=parameter(3, 4), name=key, decomposed=True)(written(WRITES[key]))


@case(x=(3, 3), w=parameter(3, 3), decomposed=True)
def diag(x, w):
    return (torch.diag(w) @ x).square().sum() + torch.diag(w[0]).sum()

#!/usr/bin/env python3
"""Prints the operators of ATen that `run_decompositions()` replaces by others, one a line.

    python crates/import/stock/decompositions.py > crates/import/src/decomposed.txt

An operator in place, or one with `out`, counts by its name without them, since decomposing replaces it by that.
"""

import torch


def main():
    names = {str(operator).split(".")[1] for operator in torch.export.default_decompositions()}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            names.add(name.removeprefix("aten::").split(".")[0])
    functional = {name.rstrip("_") if not name.startswith("__") else name for name in names}
    print("\n".join(sorted(name for name in functional if name)))


if __name__ == "__main__":
    main()

"""`python -m fusionllm_jax`: serves one peer."""

import argparse
import os

from fusionllm_worker import Framework, serve

parser = argparse.ArgumentParser(prog="fusionllm_jax")
parser.add_argument("--device", type=int, default=0, help="the number of one of JAX's devices (default: 0)")
arguments = parser.parse_args()

# The same operands must give the same bits. JAX reads this when it is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"


def start() -> Framework:
    from fusionllm_jax.framework import Jax

    return Jax(arguments.device)


serve(start)

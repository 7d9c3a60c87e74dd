"""`python -m fusionllm_jax`: serves one peer."""

import os

from fusionllm_worker import Framework, serve

# The same operands must give the same bits. JAX reads this when it is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"


def start() -> Framework:
    from fusionllm_jax.framework import Jax

    return Jax()


serve(start)

"""`python -m fusionllm_numpy`: serves one peer."""

from fusionllm_worker import Framework, serve


def start() -> Framework:
    from fusionllm_numpy.framework import NumPy

    return NumPy()


serve(start)

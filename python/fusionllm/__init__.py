"""FusionLLM trains one model over many machines, with any framework, even where the links are slow.

The package brings the program `fusionllm`, workers for PyTorch, JAX and NumPy, and these functions:

    fusionllm.export(model, (x, y), "model.pt2")             # any PyTorch model whose forward returns the mean loss
    run = fusionllm.train({"model": {"file": "model.pt2"}}, data={"x": x, "y": y}, peers=2)
    model.load_state_dict(run.state_dict())

    run = fusionllm.broker(job, peers=3)                     # over several machines: prints a ticket
    fusionllm.join(ticket)                                   # on each of the others, with all its accelerators
"""

from fusionllm._export import export
from fusionllm._join import join, worker
from fusionllm._program import FusionError
from fusionllm._run import Run, Step
from fusionllm._train import broker, train

__all__ = ["FusionError", "Run", "Step", "broker", "export", "join", "train", "worker"]

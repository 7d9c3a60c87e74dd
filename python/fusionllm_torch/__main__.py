"""`python -m fusionllm_torch`: serves one peer."""

import argparse
import os

from fusionllm_worker import Framework, serve

parser = argparse.ArgumentParser(prog="fusionllm_torch")
parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, xpu, … (default: cpu)")
parser.add_argument("--compile", action="store_true", help="compile each segment with TorchInductor when it first runs")
parser.add_argument("--cuda-graphs", action="store_true", help="replay each segment as a CUDA graph, on a CUDA device")
arguments = parser.parse_args()

# The same operands must give the same bits. cuBLAS reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def start() -> Framework:
    from fusionllm_torch.framework import Torch

    return Torch(arguments.device, compile=arguments.compile, cuda_graphs=arguments.cuda_graphs)


serve(start)

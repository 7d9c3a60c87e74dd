"""PyTorch's worker on the processor, with the kernels and the late checks that it has for devices like GPUs.

So a machine without a GPU runs that code: `python parallel_device.py` takes the place of `python -m fusionllm_torch`.
"""

import platform

import fusionllm_torch.framework
from fusionllm_torch.device import Device
from fusionllm_worker import serve


class Parallel(Device):
    """The processor, treated as a device that is not waited for."""

    label = platform.machine()
    memory_bytes = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_cpu = self.reads = False

    def synchronize(self) -> None:
        self.check()


fusionllm_torch.framework.Device = Parallel
serve(lambda: fusionllm_torch.framework.Torch("cpu"))

"""Writes ResNet-101 of stock torchvision as resnet101.pt2, and images to train on as shards/*.safetensors.

The images are made up, ten classes that differ in colour and pattern, so that nothing has to be fetched; put your own there, as tensors
`x` (float32 [samples, 3, 64, 64]) and `y` (int64 [samples]).
"""

from pathlib import Path

import torch
import torchvision
from safetensors.torch import save_file

SIDE, CLASSES, MICRO_BATCH = 64, 10, 8


class Trained(torch.nn.Module):
    """What FusionLLM trains: a module whose forward gives back the loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.model(x), y)


def images(count, generator):
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    colours = torch.randn(CLASSES, 3, 1, 1, generator=torch.Generator().manual_seed(1))
    stripes = torch.sin(torch.arange(SIDE) * (y[:, None] + 1) * 0.2)[:, None, None, :]
    return colours[y] + stripes + 0.5 * torch.randn(count, 3, SIDE, SIDE, generator=generator), y


torch.manual_seed(0)
model = Trained(torchvision.models.resnet101(num_classes=CLASSES)).train()
sample = torch.randn(MICRO_BATCH, 3, SIDE, SIDE), torch.zeros(MICRO_BATCH, dtype=torch.int64)
torch.export.save(torch.export.export(model, sample), "resnet101.pt2")

Path("shards").mkdir(exist_ok=True)
generator = torch.Generator().manual_seed(2)
for shard in range(4):
    x, y = images(64, generator)
    save_file({"x": x, "y": y}, f"shards/{shard}.safetensors")

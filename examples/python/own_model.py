"""Trains a PyTorch model over two peers, one of which is PyTorch itself, and takes its weights back.

    pip install fusionllm[torch]
    python own_model.py
"""

import torch

import fusionllm


class Classifier(torch.nn.Module):
    """Tells in which third of the circle a point lies. Its forward returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))

    def forward(self, point: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(point), third)


torch.manual_seed(0)
angle = torch.rand(512) * 2 * torch.pi
point = torch.stack([angle.cos(), angle.sin()], dim=1)
third = (angle / (2 * torch.pi) * 3).long()

model = Classifier()
fusionllm.export(model, (point[:4], third[:4]), "model.pt2")
run = fusionllm.train(
    {
        "model": {"file": "model.pt2"},
        "train": {"steps": 60, "batch": 32, "optimizer": {"name": "adamw", "lr": 1e-2}},
    },
    data={"point": point, "third": third},
    peers=2,
    backends=["cpu"],
    workers=[fusionllm.worker("torch")],
)
model.load_state_dict(run.state_dict())
print(f"loss {run.losses[0]:.3f} before, {model(point, third).item():.3f} after")

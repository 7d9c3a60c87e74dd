"""A FusionLLM worker that computes with PyTorch, on any of its devices."""

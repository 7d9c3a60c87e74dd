"""A FusionLLM worker that computes with NumPy. It is the reference: short, and easy to read."""

"""A FusionLLM worker that computes with JAX. It compiles each segment as a whole."""

"""Reading and validating checkpoints, and the model sizes of the architectures."""

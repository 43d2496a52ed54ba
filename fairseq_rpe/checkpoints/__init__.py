"""Checkpoints: reading and validating them, and the model sizes that architecture names stand for."""

"""Attention with Triton kernels. Importing this needs torch alone; the package triton is loaded at the first call."""

from .backend import refusal, triton

__all__ = ["refusal", "triton"]

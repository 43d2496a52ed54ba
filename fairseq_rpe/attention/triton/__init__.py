"""Attention with Triton kernels. Importing this needs torch alone; the package triton is loaded at the first call."""

from .backend import interpreted, refusal, triton

__all__ = ["interpreted", "refusal", "triton"]

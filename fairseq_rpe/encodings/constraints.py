"""Reparametrisations that keep a learned number inside its range with a gradient everywhere inside."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def positive(raw: Tensor, floor: float = 0.0) -> Tensor:
    """``floor + softplus(raw)``: any real number to one above ``floor``."""
    return floor + F.softplus(raw)


def positive_inverse(value: Tensor, floor: float = 0.0) -> Tensor:
    """The ``raw`` that :func:`positive` maps to ``value``; values at or below the floor go just above it."""
    x = (value.double() - floor).clamp_min(1e-6)
    return (x + torch.log(-torch.expm1(-x))).to(value.dtype)


def between(raw: Tensor, low: float, high: float) -> Tensor:
    """``low + (high - low) · sigmoid(raw)``."""
    return low + (high - low) * torch.sigmoid(raw)


def between_inverse(value: Tensor, low: float, high: float) -> Tensor:
    """The ``raw`` that :func:`between` maps to ``value``; ``high`` itself saturates and does not train."""
    x = ((value.double() - low) / (high - low)).clamp(1e-6, 1.0)
    return torch.logit(x).clamp_max(-math.log(1e-17)).to(value.dtype)

"""Bias forms: what an encoding hands to an attention backend, most structured first.

Conventions: i query position, j key position, ``d = i - j >= 0`` is the past. A bias is in nats and is
added to ``q·k / sqrt(D)``. Values for the future (d < 0) are finite but without meaning: the backend masks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .positions import Positions


@dataclass(frozen=True)
class Toeplitz:
    """``bias[h, i, j] = table[h, (q_i - k_j) / step + origin]``, clamped to the table's ends. O(R) memory.

    Attributes:
        table: (H, R) float; carries the gradient to whatever made it.
        origin: column that holds distance 0.
        step: distance between neighbouring columns.
    """

    table: Tensor
    origin: int = 0
    step: float = 1.0


@dataclass(frozen=True)
class Pair:
    """``bias = fn(i, j, *aux)`` for i (B or 1, n) and j (B or 1, m), giving (B or 1, H, n, m).

    ``fn`` is pointwise in the positions, so a backend may call it block by block. ``aux`` are tensors that it
    needs beside the positions.
    """

    fn: Callable[..., Tensor]
    aux: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Dense:
    """The bias itself, (B or 1, H, n, m). Always possible, O(n²)."""

    bias: Tensor


Form = Toeplitz | Pair | Dense


def block(form: Form, pos: Positions, rows: slice, cols: slice) -> Tensor:
    """The bias of some queries against some keys: (B or 1, H, rows, cols)."""
    if isinstance(form, Dense):
        return form.bias[:, :, rows, cols]
    i, j = pos.q[:, rows], pos.k[:, cols]
    if isinstance(form, Pair):
        return form.fn(i, j, *form.aux)
    column = torch.round((i[:, :, None] - j[:, None, :]) / form.step).long() + form.origin
    column = column.clamp_(0, form.table.shape[1] - 1)
    return form.table[:, column].transpose(0, 1)


def lower(form: Form, accepted: tuple[type, ...], pos: Positions) -> Form:
    """``form`` itself where its kind is accepted, otherwise the equal Dense form."""
    if isinstance(form, accepted):
        return form
    return Dense(block(form, pos, slice(None), slice(None)))

"""Which index each token has, and what an encoding hands on: bias forms to attention, log-weights to the analysis.

Conventions: i query position, j key position, ``d = i - j >= 0`` is the past. A bias is in nats and is
added to ``q·k / sqrt(D)``. Values for the future (d < 0) are finite but without meaning: the backend masks them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from .errors import UserError

_ALL = slice(None)


@dataclass(frozen=True)
class Positions:
    """Positions of queries and keys.

    Attributes:
        q: (B or 1, n) query positions; float32 or float64; integers become float32, half precision is refused
            with UserError.
        k: (B or 1, m) key positions; the queries are the last n of the m tokens.
        step: every difference ``q_i - k_j`` is a multiple of it; None where spacing is arbitrary.
        contiguous: neighbouring tokens differ by exactly ``step``, so a difference depends on the
            two *indices* alone (true for plain, offset and interpolated positions, and for rows that
            differ only in a left-padding offset). Tokens that are padding do not count.
        tokens: (B, m) ids of the m tokens, int64, negative at padding, for encodings that read them; None: not known.
    """

    q: Tensor
    k: Tensor
    step: float | None = 1.0
    contiguous: bool = True
    tokens: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k"):
            positions = getattr(self, name)
            if not positions.is_floating_point():
                object.__setattr__(self, name, positions.float())
            elif positions.dtype not in (torch.float32, torch.float64):
                raise UserError(f"positions in {positions.dtype} are rounded: give them in float32 or float64")
        tokens, m = self.tokens, self.k.shape[1]
        if tokens is not None and (tokens.dim() != 2 or tokens.shape[1] != m or tokens.dtype != torch.int64):
            raise UserError(f"tokens are int64 ids (batch, {m}), not {tokens.dtype} of shape {tuple(tokens.shape)}")

    @staticmethod
    def arange(
        n: int, m: int | None = None, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> "Positions":
        """The plain positions: m keys at 0 … m-1, n queries at the last n of them."""
        m = n if m is None else m
        k = torch.arange(m, device=device, dtype=dtype)[None]
        return Positions(k[:, m - n :], k)


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
class Pointwise(Pair):
    """A Pair that is arithmetic of both positions and a few numbers of the head, which a kernel can work out per pair.

    ``bias[h, i, j] = scalar(i, j, *(x[h] for x in numbers))``. ``fn`` is the plain way to the same bias.

    Attributes:
        scalar: of scalars, or of tensors that broadcast.
        numbers: (H,) each; they carry the gradient to whatever made them.
    """

    scalar: Callable[..., Tensor] = field(kw_only=True)
    numbers: tuple[Tensor, ...] = field(kw_only=True)


@dataclass(frozen=True)
class Pieces:
    """A function of one number per head, linear between ``ends``: f_h(x) = value[h, p] + slope[h, p]·(x - middle[p]).

    Attributes:
        ends: (K - 1,) sorted; piece p is where p of them are <= x.
        middle: (K,) a point inside each piece.
        value: (H, K) of f in ``middle``; carries the gradient to whatever made f.
        slope: (H, K) of f in each piece; likewise.
    """

    ends: Tensor
    middle: Tensor
    value: Tensor
    slope: Tensor


@dataclass(frozen=True)
class Curve(Pair):
    """A Pair of contiguous positions that is a function of one number: bias[h, i, j] = f_h(far[i - j] · near[i]).

    ``fn`` is the plain way to the same bias. What knows no curves takes this for the Pair that it is.

    Attributes:
        far: (m,) of the distances 0 … m-1 between *indices*, at least 0 and never falling.
        near: (B or 1, n) of the queries, above 0.
        pieces: called with the largest x, gives f on [0, x].
    """

    far: Tensor = field(kw_only=True)
    near: Tensor = field(kw_only=True)
    pieces: Callable[[float], Pieces] = field(kw_only=True)


@dataclass(frozen=True)
class Dense:
    """The bias itself, (B or 1, H, n, m). Always possible, O(n²)."""

    bias: Tensor


# the most structured first
Form = Toeplitz | Pair | Dense


def block(form: Form, pos: Positions, rows: slice = _ALL, cols: slice = _ALL) -> Tensor:
    """The bias of some queries against some keys, of all if none are named: (B or 1, H, rows, cols)."""
    if isinstance(form, Dense):
        return form.bias[:, :, rows, cols]
    i, j = pos.q[:, rows], pos.k[:, cols]
    if isinstance(form, Pair):
        return form.fn(i, j, *form.aux)
    column = torch.round((i[:, :, None] - j[:, None, :]) / form.step).long() + form.origin
    column = column.clamp_(0, form.table.shape[1] - 1)
    return form.table[:, column].transpose(0, 1)


@dataclass(frozen=True)
class LogWeight:
    """ln b_n = bias(n) of one head at distance n = 0, 1, … tokens: what the analysis of Σ exp(bias) is told.

    Args:
        formula: an expression in n as ``fairseq-rpe verdict --formula`` reads it; :func:`exact` writes parameters.
        note: ends the reason of the verdict, e.g. which parameters decide it.
        at_least: the formula is only a lower bound, up to a constant; then only divergence can follow.
        keys: the formula holds for n < keys, and the bias is -∞ from there on.
    """

    formula: str
    note: str = ""
    at_least: bool = False
    keys: int | None = None


def exact(value: float, decimal: bool = False) -> str:
    """A float as the exact fraction that it is, or with ``decimal`` as the decimal that it is written as.

    >>> exact(0.375), exact(0.1, decimal=True)
    ('(3/8)', '(1/10)')
    """
    return f"({Fraction(repr(value)) if decimal else Fraction(value)})"

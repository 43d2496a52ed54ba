"""Positions of queries and keys."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.arguments import check_count, check_number, describe_value
from fairseq_rpe.core.errors import UserError


@dataclass(frozen=True)
class Positions:
    """Positions of n queries and m keys.

    Attributes:
        q: (B or 1, n) query positions, float32 or float64; integers become float32.
        k: (B or 1, m) key positions; the queries are the last n of the m tokens.
        step: Number of which every difference ``q_i - k_j`` is a multiple; None if the spacing is arbitrary.
        contiguous: Whether neighbouring tokens differ by exactly ``step``, so that a difference depends on the two
            *indices* alone. This holds for plain, offset and interpolated positions, and for rows that differ only in
            their left padding. Padding tokens do not count, nor do pairs of tokens of different documents in a row,
            where each document counts its tokens from 0.
        tokens: (B, m) int64 token ids, negative at padding, for encodings that need them; None if they are not known.

    Raises:
        UserError: q or k is not a dense real tensor (B or 1, tokens) or is in half precision, step is not above 0, or
            tokens are not int64 (B, m).
    """

    q: Tensor
    k: Tensor
    step: float | None = 1.0
    contiguous: bool = True
    tokens: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k"):
            positions = getattr(self, name)
            _check_positions(name, positions)
            if not positions.is_floating_point():
                object.__setattr__(self, name, positions.float())
        if self.step is not None and not (type(self.step) is float and 0 < self.step < math.inf):
            check_number("step of positions", self.step, above=0)
        if self.tokens is not None:
            _check_token_ids(self.tokens, self.k.shape[1])

    @staticmethod
    def arange(
        n: int, m: int | None = None, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> "Positions":
        """Return the positions 0 … m-1 of m keys and the last n of them for the queries.

        Args:
            n: Number of queries.
            m: Number of keys; None: n.
            device: Device of the tensors.
            dtype: float32 or float64.

        Returns:
            Positions with q (1, n) and k (1, m).

        Raises:
            UserError: n or m is not a number of tokens, or m is less than n.
        """
        m = n if m is None else m
        if not torch.compiler.is_compiling():  # sizes may be symbolic while compiling
            check_count("n", n, 0)
            check_count("m", m, 0)
            if m < n:
                raise UserError(f"positions of {n} queries and {m} keys: the queries are the last of the keys")
        k = torch.arange(m, device=device, dtype=dtype)[None]
        return Positions(k[:, m - n :], k)


def _check_positions(name: str, positions: object) -> None:
    """Check that ``q`` or ``k`` is a dense real tensor (B or 1, tokens) that is not in half precision."""
    if not isinstance(positions, Tensor):
        raise UserError(f"positions must be torch tensors, and {name} is {describe_value(positions)}")
    if positions.layout != torch.strided or positions.is_nested or positions.is_quantized:
        raise UserError(f"positions must be dense tensors, and {name} is not: convert it")
    if positions.dim() != 2 or positions.is_complex():
        raise UserError(
            f"positions are real tensors (batch or 1, tokens), and {name} is {positions.dtype} of shape "
            f"{tuple(positions.shape)}"
        )
    if positions.is_floating_point() and positions.dtype not in (torch.float32, torch.float64):
        raise UserError(f"positions in {positions.dtype} are rounded: give them in float32 or float64")


def _check_token_ids(tokens: object, m: int) -> None:
    """Check that tokens are int64 (B, m)."""
    if not isinstance(tokens, Tensor):
        raise UserError(f"tokens are a torch.int64 tensor of ids (batch, {m}), not {describe_value(tokens)}")
    if tokens.dim() != 2 or tokens.shape[1] != m or tokens.dtype != torch.int64:
        raise UserError(f"tokens are int64 ids (batch, {m}), not {tokens.dtype} of shape {tuple(tokens.shape)}")

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
        step: Every difference ``q_i - k_j`` is a multiple of it; None if the spacing is arbitrary.
        contiguous: Neighbouring tokens differ by exactly ``step``, so a difference depends on the two *indices* alone.
            This holds for plain, offset and interpolated positions, and for rows that differ only in their left
            padding. Ignored: padding tokens, and pairs of tokens of different documents of a row (each document counts
            its tokens from 0).
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
            if not isinstance(positions, Tensor):
                raise UserError(f"positions must be torch tensors, and {name} is {describe_value(positions)}")
            if positions.layout != torch.strided or positions.is_nested or positions.is_quantized:
                raise UserError(f"positions must be dense tensors, and {name} is not: convert it")
            if positions.dim() != 2 or positions.is_complex():
                raise UserError(
                    f"positions are real tensors (batch or 1, tokens), and {name} is {positions.dtype} of shape "
                    f"{tuple(positions.shape)}"
                )
            if not positions.is_floating_point():
                object.__setattr__(self, name, positions.float())
            elif positions.dtype not in (torch.float32, torch.float64):
                raise UserError(f"positions in {positions.dtype} are rounded: give them in float32 or float64")
        if self.step is not None and not (type(self.step) is float and 0 < self.step < math.inf):
            check_number("step of positions", self.step, above=0)
        tokens, m = self.tokens, self.k.shape[1]
        if tokens is not None and not isinstance(tokens, Tensor):
            raise UserError(f"tokens are a torch.int64 tensor of ids (batch, {m}), not {describe_value(tokens)}")
        if tokens is not None and (tokens.dim() != 2 or tokens.shape[1] != m or tokens.dtype != torch.int64):
            raise UserError(f"tokens are int64 ids (batch, {m}), not {tokens.dtype} of shape {tuple(tokens.shape)}")

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

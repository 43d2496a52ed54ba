"""Abacus embeddings: the index of each digit within its number, as a vector at the input."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import check_embedding_input
from fairseq_rpe.encodings.adjusted_encoding import (
    AdjustedEncoding,
    base_names,
    interleaved_option,
    rope_base_option,
    rotary_fraction_option,
)
from fairseq_rpe.encodings.base import register
from fairseq_rpe.encodings.number_tokens import digit_ids, digit_indices, empty_digits_like, token_ids


@register("abacus", colour="blue", marker="P")
class Abacus(AdjustedEncoding):
    """Abacus embeddings (McLeish et al. 2024, arXiv 2405.17399): x + table[index of the digit within its number].

    The digits of a number have the indices 1, 2, 3 … from its first digit on; any other token ends the number and has
    the index 0. With the least significant digit first (``addition:order=all``), digits of equal significance in
    operands and sum have the same index. Training adds a random offset k, uniform in 0 … ``max_offset`` - 1 and one for
    each batch, to all indices above 0, so that rows for longer numbers are trained, too. Evaluation uses k = 0. The
    offset is drawn from torch's generator on the CPU.

    The vectors are combined with any encoding in attention, the option ``base``; the paper reports such combinations
    with FIRE. The table (rows, C) starts as N(0, 1), as in the authors' code. Indices depend on earlier tokens only, so
    decoding continues them; padding is not counted.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``abacus``."""

        base: str = option("nope", "encoding in attention", choices=base_names)
        rows: int = option(1024, "rows of the table; a number has at most rows - max_offset digits", minimum=2)
        max_offset: int = option(100, "training: offsets k are Uniform(0, max_offset - 1); 1: no offset", minimum=1)
        rope_base: float = rope_base_option()
        rotary_fraction: float = rotary_fraction_option()
        interleaved: bool = interleaved_option()

    formula = "x + table[index of the digit in its number + k],  k random in training;  base in attention"
    paper = "McLeish et al. 2024 (arXiv 2405.17399)"
    family = "vectors at the input"
    sharing_modes = ("model",)
    needs_token_ids = True
    digits: Tensor

    def setup(self) -> None:
        """Check the options and create the parameters."""
        super().setup()
        cfg = self.config
        if cfg.max_offset >= cfg.rows:
            raise UserError(
                f"'abacus:max_offset={cfg.max_offset}' leaves no row for a digit in a table of rows={cfg.rows}: raise "
                "rows or lower max_offset"
            )
        self.position_type = self.base.position_type
        self.table = nn.Parameter(torch.randn(cfg.rows, self.width))
        ids = [] if self.symbols is None else digit_ids("abacus", self.symbols)
        self.register_buffer("digits", torch.tensor(ids, dtype=torch.int64))

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        """Add the vectors of the indices within numbers to x (B, n, C); same shape."""
        check_embedding_input(x, pos, self.width)
        indices = digit_indices(token_ids("abacus", pos, self.digits), self.digits)[:, -x.shape[1] :]  # (B, n)
        max_offset = self.config.max_offset if self.training else 1
        limit = len(self.table) - max_offset
        if indices.numel() and int(indices.max()) > limit:
            raise UserError(
                f"a number of {int(indices.max())} digits is longer than {limit}, the most that 'abacus:rows="
                f"{len(self.table)}' has {'with its random offsets' if self.training else 'rows for'}: train with more "
                "rows, or use shorter numbers"
            )
        if max_offset > 1:
            indices = torch.where(indices > 0, indices + int(torch.randint(max_offset, ())), 0)
        return x + F.embedding(indices, self.table).to(x.dtype)

    def position_bias(self, pos: Positions) -> Bias | None:
        """Return the bias of ``base``, or None if it has none."""
        return self.base.position_bias(pos)

    @property
    def is_distance_bias(self) -> bool:
        """Whether the bias of ``base`` is a table over distances, which decoding may cache."""
        return self.base.is_distance_bias

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return the formulas of ``base``."""
        return self.base.log_bias_formulas()

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the learned quantities of ``base``, by name."""
        return self.base.logged_scalars()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.digits = empty_digits_like(self.digits, state_dict, prefix + "digits")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

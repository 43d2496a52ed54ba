"""Position coupling: digits of equal significance in operands and sum have the same absolute position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import check_embedding_input
from fairseq_rpe.encodings.absolute import Sinusoidal
from fairseq_rpe.encodings.base import Encoding, register
from fairseq_rpe.encodings.number_tokens import digit_ids, digit_indices, empty_digits_like, token_ids


@register("coupled", colour="blue", marker=">")
class Coupled(Encoding):
    """Position coupling for addition (Cho et al. 2024, arXiv 2405.20671): x + table[position], without attention bias.

    With a start s, "+" has the position s, and the digits of both operands have s + 1, s + 2, … from the least
    significant digit on. If the sum is written with the least digit first, "=" has s, and the digits of the sum have
    s + 1, s + 2, …. With ``order=plain``, operands have n digits and the sum n + 1, as ``addition:padding=true`` writes
    them: "=" has s + n + 2, and the digits of the sum have s + n + 1, …, s + 1. All other tokens, such as </s>, have
    the position 0, as have digits of a plain sum after the (n + 1)-th.

    Training draws s for each row, uniform in 1 … ``max_position`` - (largest position for s = 0), from torch's
    generator on the CPU; for sums with the least digit first this is the authors' ``max_position`` - (digits of the
    sum). Evaluation uses s = 1. The table (``max_position`` + 1, C) starts as N(0, 1), as in the authors' code, whose
    versions before October 2024 give the least significant digit the largest position.

    Positions repeat and decrease within a row. Encodings of the distance cannot use them, and this encoding has none in
    attention. A row is one example of the task ``addition`` without hints. Unless ``order=all``, the position of an
    operand's digit depends on later digits, so decoding starts with a prompt that ends in "=".
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``coupled``."""

        order: str = option(
            "answer",
            "numbers with the least digit first, as in the task 'addition'",
            choices=("plain", "answer", "all"),
        )
        vectors: str = option("learned", "vectors of positions", choices=("learned", "sinusoidal"))
        max_position: int = option(132, "largest position in training, and in evaluation if learned", minimum=3)

    formula = "x + table[s + significance of the digit in its number],  s random in training"
    paper = "Cho et al. 2024 (arXiv 2405.20671)"
    family = "vectors at the input"
    sharing_modes = ("model",)
    position_type = "none"
    needs_token_ids = True
    bounded_reason = "positions add to the input, and scores of bounded vectors are bounded"
    digits: Tensor
    signs: Tensor

    def setup(self) -> None:
        """Check the options and create the parameters."""
        cfg = self.config
        self.table: nn.Parameter | None = None
        if cfg.vectors == "learned":
            self.table = nn.Parameter(torch.randn(cfg.max_position + 1, self.width))
        else:
            self.waves = Sinusoidal(Sinusoidal.Config(), self.heads, self.width)
        digits, signs = [], [-1, -1]  # no token has a sign's id if the dictionary is unknown
        if self.symbols is not None:
            digits, signs = digit_ids("coupled", self.symbols), _sign_ids(self.symbols)
        self.register_buffer("digits", torch.tensor(digits, dtype=torch.int64))
        self.register_buffer("signs", torch.tensor(signs, dtype=torch.int64))

    def offsets(self, tokens: Tensor) -> Tensor:
        """Return the position of each token for a start of s = 0.

        Args:
            tokens: (B, m) int64 ids, negative at padding; each row is one example.

        Returns:
            (B, m) int64, -1 for tokens whose position does not depend on s.
        """
        order, (plus, equals) = self.config.order, self.signs
        from_first = digit_indices(tokens, self.digits)  # (B, m), 1 for the first digit of a number
        from_last = digit_indices(tokens.flip(1), self.digits).flip(1)
        is_digit, is_equals = from_first > 0, tokens == equals
        is_sum = is_digit & (is_equals.cumsum(1) > 0)
        significance = from_first if order == "all" else from_last
        if order == "plain":
            operands = torch.where(is_digit & ~is_sum, from_first, 0)
            size = operands.amax(1, keepdim=True) + 1  # digits of the sum, (B, 1)
            offset_of_equals = size + 1
            in_sum = size + 1 - from_first
            in_sum = torch.where(in_sum > 0, in_sum, -1)  # -1: more digits than the sum can have
        else:
            in_sum, offset_of_equals = from_first, torch.zeros_like(from_first[:, :1])
        offset = torch.where(is_sum, in_sum, torch.where(is_digit, significance, -1))
        offset = torch.where(is_equals, offset_of_equals, offset)
        return torch.where(tokens == plus, 0, offset)

    def positions(self, pos: Positions, n: int) -> Tensor:
        """Return the positions (B, n) int64 of the last n tokens; random in training.

        Raises:
            UserError: the tokens are not known, a number has too many digits, or new tokens change the positions of
                earlier ones.
        """
        tokens = token_ids("coupled", pos, self.digits)
        offset = self.offsets(tokens)  # (B, m)
        first = tokens.shape[1] - n
        if first and not torch.equal(self.offsets(tokens[:, :first]), offset[:, :first]):
            raise UserError(
                f"'coupled:order={self.config.order}' numbers the digits of an operand from its last digit: decode "
                "from a prompt that ends in '=', in one pass"
            )
        largest = offset.amax(1, keepdim=True) if offset.numel() else offset.new_zeros(len(offset), 1)  # (B, 1)
        starts = self.config.max_position - largest  # numbers of possible starts
        if (self.training or self.table is not None) and starts.numel() and int(starts.min()) < 1:
            raise UserError(
                f"'coupled:max_position={self.config.max_position}' has no positions for a row that needs "
                f"{int(largest.max()) + 1}: train with a larger max_position, or use shorter numbers"
            )
        start = torch.ones_like(starts)
        if self.training:
            start += (torch.rand(starts.shape, dtype=torch.float64).to(starts.device) * starts).long()
        return torch.where(offset >= 0, start + offset, 0)[:, first:]

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        """Add the vectors of the coupled positions to x (B, n, C); same shape."""
        check_embedding_input(x, pos, self.width)
        at = self.positions(pos, x.shape[1])
        if self.table is None:
            return x + self.waves.vectors(at.to(pos.k.dtype)).to(x.dtype)
        return x + F.embedding(at, self.table).to(x.dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.digits = empty_digits_like(self.digits, state_dict, prefix + "digits")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _sign_ids(symbols: Sequence[str]) -> list[int]:
    """Return the ids of "+" and "=".

    Raises:
        UserError: the dictionary has no such symbol.
    """
    for sign in "+=":
        if sign not in symbols:
            raise UserError(
                f"'coupled' gives positions to the tokens of an addition, and the dictionary has no symbol '{sign}': "
                "train on the task 'addition'"
            )
    return [list(symbols).index(sign) for sign in "+="]

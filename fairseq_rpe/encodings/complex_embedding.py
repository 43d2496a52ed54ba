"""Complex-valued embeddings: words that turn with their position."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import check_embedded
from fairseq_rpe.encodings.base import Encoding, register


@register("complex")
class Complex(Encoding):
    """The embedding of a word as complex numbers, each of which turns at a learned speed of its own.

    x (C,) is read as C/2 numbers z_c = x_c + i·x_(c + C/2), so that amplitude and phase are what the embedding learns;
    at position t = 0, 1, 2 … it becomes z_c·exp(i·ω_wc·t). The frequencies ω are (V, C/2), one row for each of V words,
    or with ``frequencies=dimension`` (C/2,), the same for all words; each starts at 10000^(-2c/C). Phases are float32.

    Adapted: the paper's network is complex-valued throughout, here real and imaginary parts enter an ordinary real one
    side by side. The authors' code counts positions backwards and drops out phases as well; here they go forward, and
    dropout acts on the embedding alone.
    """

    @dataclass(frozen=True)
    class Config:
        frequencies: str = option(
            "word", "word: a row for each word of the dictionary; dimension: one for all", choices=("word", "dimension")
        )

    formula = "z_c·exp(i·ω_wc·t),  z_c = x_c + i·x_(c + C/2) at the input,  ω learned"
    paper = "Wang et al. 2020 (arXiv 1912.12333)"
    sharing_modes = ("model",)
    bounded_reason = "positions turn the input, and scores of bounded vectors are bounded"

    def setup(self) -> None:
        if self.width % 2:
            raise UserError(f"'complex' reads pairs of numbers: the model width must be even, not {self.width}")
        self.needs_token_ids = self.config.frequencies == "word"
        c = torch.arange(self.width // 2, dtype=torch.float32)
        start = 10000.0 ** (-2 * c / self.width)
        words = len(self.symbols or ())
        self.frequencies = nn.Parameter(start.repeat(words, 1) if self.needs_token_ids else start)

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        check_embedded(x, pos, self.width)
        phase = pos.q[..., None] * self._of(pos, x.shape[1]).to(pos.q.dtype)
        cos, sin = phase.cos(), phase.sin()
        real, imaginary = x.to(phase.dtype).chunk(2, dim=-1)
        return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).to(x.dtype)

    def _of(self, pos: Positions, n: int) -> Tensor:
        """(C/2,) or (B, n, C/2) frequencies of the last n tokens."""
        if not self.needs_token_ids:
            return self.frequencies
        if pos.tokens is None:
            raise UserError(
                "'complex' reads the tokens, which are not at hand here: train and evaluate it as a model, give "
                "Positions(..., tokens=ids), or use complex:frequencies=dimension"
            )
        if not len(self.frequencies):
            raise UserError("'complex' does not know the dictionary: give build(...) its symbols")
        return self.frequencies[pos.tokens[:, -n:].clamp_min(0)]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        given, own = state_dict.get(prefix + "frequencies"), self.frequencies
        if self.needs_token_ids and not len(own) and isinstance(given, Tensor) and given.shape[1:] == own.shape[1:]:
            self.frequencies = nn.Parameter(torch.zeros_like(given, dtype=own.dtype, device=own.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

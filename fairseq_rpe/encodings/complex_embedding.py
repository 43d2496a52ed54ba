"""Complex word embeddings whose phases rotate with the position (Wang et al. 2020)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import check_embedding_input
from fairseq_rpe.encodings.base import Encoding, register


@register("complex", colour="blue", marker="v")
class Complex(Encoding):
    """Complex embedding of words with a learned frequency per element (Wang et al. 2020, arXiv 1912.12333).

    The embedding x (C,) of word w is interpreted as C/2 complex numbers z_c = x_c + i·x_(c + C/2), whose amplitude and
    phase are learned; at position t = 0, 1, 2 … it becomes z_c·exp(i·ω_wc·t). The frequencies ω are (V, C/2), one row
    for each of V words, or (C/2,) for all words with ``frequencies=dimension``; each starts at 10000^(-2c/C). Phases
    are float32.

    Differences: the paper's network is complex-valued throughout; here real and imaginary parts are concatenated and
    enter an ordinary real network. The authors' code counts positions backwards and applies dropout to phases as well;
    here positions count forward, and dropout acts on the embedding only.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``complex``."""

        frequencies: str = option(
            "word", "word: a row for each word of the dictionary; dimension: one for all", choices=("word", "dimension")
        )

    formula = "z_c·exp(i·ω_wc·t),  z_c = x_c + i·x_(c + C/2) at the input,  ω learned"
    paper = "Wang et al. 2020 (arXiv 1912.12333)"
    family = "vectors at the input"
    sharing_modes = ("model",)
    bounded_reason = "positions rotate the input, and scores of bounded vectors are bounded"

    def setup(self) -> None:
        """Check the options and create the parameters."""
        if self.width % 2:
            raise UserError(f"'complex' needs pairs of elements: the model width must be even, not {self.width}")
        self.needs_token_ids = self.config.frequencies == "word"
        c = torch.arange(self.width // 2, dtype=torch.float32)
        start = 10000.0 ** (-2 * c / self.width)
        words = len(self.symbols or ())
        self.frequencies = nn.Parameter(start.repeat(words, 1) if self.needs_token_ids else start)

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        """Rotate the complex embeddings in x (B, n, C) by their phases; same shape."""
        check_embedding_input(x, pos, self.width)
        phase = pos.q[..., None] * self._frequencies_of_tokens(pos, x.shape[1]).to(pos.q.dtype)  # (B or 1, n, C/2)
        cos, sin = phase.cos(), phase.sin()
        real, imaginary = x.to(phase.dtype).chunk(2, dim=-1)
        return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).to(x.dtype)

    def _frequencies_of_tokens(self, pos: Positions, n: int) -> Tensor:
        """Return the frequencies of the last n tokens, (C/2,) or (B, n, C/2)."""
        if not self.needs_token_ids:
            return self.frequencies
        if pos.tokens is None:
            raise UserError(
                "'complex' reads the tokens, which are not available here: train and evaluate it as a model, pass "
                "Positions(..., tokens=ids), or use complex:frequencies=dimension"
            )
        if not len(self.frequencies):
            raise UserError("'complex' does not know the dictionary: pass symbols=… to build(...)")
        return self.frequencies[pos.tokens[:, -n:].clamp_min(0)]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        loaded, current = state_dict.get(prefix + "frequencies"), self.frequencies
        is_empty = self.needs_token_ids and not len(current)  # built without a dictionary
        if is_empty and isinstance(loaded, Tensor) and loaded.shape[1:] == current.shape[1:]:
            # loading needs equal shapes, so create a row for each word
            self.frequencies = nn.Parameter(torch.zeros_like(loaded, dtype=current.dtype, device=current.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

"""Reading on and on without training: the first tokens and the nearest ones, for models trained with ``rope``.

What is between them is not seen, so these go on for ever and remember no more than their window, layer by layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import register
from fairseq_rpe.encodings.rope_extrapolation import Longer, at, far, near


class Forgetful(Longer):
    """Keys of d < ``window``, and of positions j < ``sinks``."""

    window: int

    def bias_profile(self, n: int) -> Tensor:
        """Of the window; the first tokens are no matter of the distance."""
        return super().bias_profile(n).index_fill(1, torch.arange(min(self.window, n), n), float("-inf"))

    def log_bias_formulas(self) -> list[LogBias]:
        note = f"with the first {self.config.sinks} tokens a query still sees finitely many keys"
        return [LogBias("0", note, keys=self.window)] * self.heads

    def _first(self, region: RotationRegion) -> RotationRegion:
        """Of a region of far pairs, those of the first tokens."""
        sinks = self.config.sinks

        def keys(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
            least, most = region.keys(first, last)
            return least, most.clamp_max(sinks - 1)

        return RotationRegion(region.q, region.k, lambda i, j: region.covers(i, j) & (j < sinks), keys)


@register("lm_infinite")
class LMInfinite(Forgetful):
    """LM-Infinite: a Λ-shaped mask and a ceiling of distances.

    A key is seen where j < sinks or d < window, at ρ = min(d, ceiling). The paper has window = ceiling = L and 10 to
    100 first tokens; its drop-in code has 10. Then only first tokens outside the window are moved, all of them to L,
    one more than any distance in training. Time and memory are O(n·(window + sinks)).
    """

    @dataclass(frozen=True)
    class Config(Longer.Config):
        sinks: int = option(10, "first tokens that every query sees", minimum=0)
        window: int = option(0, "nearest keys that a query sees; 0: L", minimum=0)
        ceiling: int = option(0, "largest distance; 0: the window", minimum=0)

    formula = "RoPE at ρ = min(d, ceiling) where d < window or j < sinks, else not seen"
    paper = "Han et al. 2023 (arXiv 2308.16137)"
    name = "lm_infinite"

    def setup(self) -> None:
        super().setup()
        self.window = self.of_length("window")
        self.ceiling = self.config.ceiling or self.window

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        window, ceiling = self.window, self.ceiling
        inner = min(window, ceiling)
        cut = at(ceiling, pos.q), at(0, pos.k)
        found = [near(pos, inner)]
        if inner < window:  # in the window, beyond the ceiling
            found.append(
                RotationRegion(
                    *cut,
                    lambda i, j: (i - j >= inner) & (i - j < window),
                    lambda first, last: (first - window, last - inner),
                )
            )
        if window < ceiling:  # first tokens outside the window, below the ceiling
            found.append(
                self._first(
                    RotationRegion(
                        pos.q,
                        pos.k,
                        lambda i, j: (i - j >= window) & (i - j < ceiling),
                        lambda first, last: (first - ceiling, last - window),
                    )
                )
            )
        return *found, self._first(far(*cut, max(window, ceiling)))


@register("streaming_llm")
class StreamingLLM(Forgetful):
    """StreamingLLM: a cache of the first tokens and the nearest ones, and positions counted inside it.

    A query sees itself and the recent - 1 tokens before it, and the first ``sinks``. Its position is its index in this
    cache, min(i, sinks + recent - 1), so that a nearest key is at ρ = d and first token j at min(i, sinks + recent - 1)
    - j. One pass over a text gives what decoding with that cache gives. The cache is at most L by default; public
    code has 4 first tokens. Tokens that fell out are gone: it is no reader of longer texts. With sinks=0 it is window
    attention, which fails on models that attend to their first tokens. Time and memory are O(n·(recent + sinks)).
    """

    @dataclass(frozen=True)
    class Config(Longer.Config):
        sinks: int = option(4, "first tokens that stay in the cache", minimum=0)
        recent: int = option(0, "nearest keys in it, the query's own included; 0: L less the sinks", minimum=0)

    formula = "RoPE at ρ = d where d < recent, min(i, sinks + recent - 1) - j where j < sinks, else not seen"
    paper = "Xiao et al. 2023 (arXiv 2309.17453)"
    name = "streaming_llm"

    def setup(self) -> None:
        super().setup()
        sinks = self.config.sinks
        if not self.config.recent and 0 < self.original <= sinks:
            raise UserError(f"'streaming_llm': {sinks} sinks leave no room in {self.original} tokens: give recent=N")
        self.window = self.of_length("recent", lambda length: length - sinks)

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        last = pos.q.clamp_max(self.config.sinks + self.window - 1)
        return near(pos, self.window), self._first(far(last, pos.k, self.window))

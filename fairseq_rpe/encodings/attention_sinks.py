"""Training-free streaming for RoPE models (StreamingLLM, LM-Infinite): attend to the first tokens and a recent window.

Tokens between are not seen, so memory is constant for any length, and so is the context.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import register
from fairseq_rpe.encodings.rope_extrapolation import RegionRope, far_region, near_region, shared_position


class SinkRope(RegionRope):
    """Base class of RoPE that sees keys of d < ``window`` and the first tokens, positions j < ``sinks``.

    Attributes:
        window: number of nearest keys that a query sees.
    """

    window: int
    limits_visibility = True

    def bias_profile(self, n: int) -> Tensor:
        """Return the log-bias of the window; the first tokens are left out, as they do not depend on the distance."""
        return super().bias_profile(n).index_fill(1, torch.arange(min(self.window, n), n), float("-inf"))

    def log_bias_formulas(self) -> list[LogBias]:
        """Return a constant log-bias over ``window`` keys for each head."""
        note = f"with the first {self.config.sinks} tokens a query still sees finitely many keys"
        return [LogBias("0", note, keys=self.window)] * self.heads

    def _sink_region(self, region: RotationRegion) -> RotationRegion:
        """Restrict a region of far pairs to keys that are first tokens."""
        sinks = self.config.sinks

        def key_range(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
            low, high = region.key_range(first, last)
            return low, high.clamp_max(sinks - 1)

        return RotationRegion(
            region.q, region.k, covers=lambda i, j: region.covers(i, j) & (j < sinks), key_range=key_range
        )


@register("lm_infinite", colour="blue", marker="<")
class LMInfinite(SinkRope):
    """LM-Infinite (Han et al. 2023, arXiv 2308.16137): a Λ-shaped mask and a largest distance.

    A key is seen if j < sinks or d < window, at the relative position ρ = min(d, M), M = ``max_distance``. The paper
    has window = M = L and 10 to 100 first tokens; its drop-in code has 10. Then ρ differs from d only for first tokens
    outside the window, which are all at L, one more than any distance in training. Time and memory are
    O(n·(window + sinks)).
    """

    @dataclass(frozen=True)
    class Config(RegionRope.Config):
        """Options of ``lm_infinite``."""

        sinks: int = option(10, "first tokens that every query sees", minimum=0)
        window: int = option(0, "nearest keys that a query sees; 0: L", minimum=0)
        max_distance: int = option(0, "M, largest distance; 0: the window", minimum=0)

    formula = "RoPE at ρ = min(d, M) where d < window or j < sinks, else not seen"
    paper = "Han et al. 2023 (arXiv 2308.16137)"
    name = "lm_infinite"

    def setup(self) -> None:
        """Set the window and the largest rotary distance, in tokens."""
        super().setup()
        self.window = self.resolve_length("window")
        self.max_distance = self.config.max_distance or self.window

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions."""
        window, max_distance = self.window, self.max_distance
        unclipped = min(window, max_distance)  # keys nearer than this are in the window, at ρ = d
        at_largest = shared_position(max_distance, pos.q), shared_position(0, pos.k)  # ρ = M
        regions = [near_region(pos, unclipped)]
        if max_distance < window:  # the rest of the window: ρ = M
            regions.append(_band_region(*at_largest, unclipped, window))
        if window < max_distance:  # first tokens outside the window, but nearer than M: ρ = d
            regions.append(self._sink_region(_band_region(pos.q, pos.k, window, max_distance)))
        # first tokens outside the window from M on: ρ = M
        return *regions, self._sink_region(far_region(*at_largest, max(window, max_distance)))


def _band_region(q: Tensor, k: Tensor, low: int, high: int) -> RotationRegion:
    """Return the region of pairs with ``low`` <= d < ``high``, rotated at positions ``q`` and ``k``."""
    return RotationRegion(
        q,
        k,
        covers=lambda i, j: (i - j >= low) & (i - j < high),
        key_range=lambda first, last: (first - high, last - low),
    )


@register("streaming_llm", colour="vermilion", marker="D")
class StreamingLLM(SinkRope):
    """StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): a KV cache of the first and the nearest tokens.

    A query sees itself, the recent - 1 tokens before it, and the first ``sinks`` tokens. Positions count within this
    cache: a query is at min(i, sinks + recent - 1), so a recent key is at ρ = d and first token j at
    ρ = min(i, sinks + recent - 1) - j. One pass over a text equals decoding with that cache. By default the cache has
    L tokens; public code has 4 first tokens. Evicted tokens are lost, so it does not use longer contexts. With sinks=0
    it is window attention, which fails on models that attend to their first tokens. Time and memory are
    O(n·(recent + sinks)).
    """

    @dataclass(frozen=True)
    class Config(RegionRope.Config):
        """Options of ``streaming_llm``."""

        sinks: int = option(4, "first tokens that are never evicted", minimum=0)
        recent: int = option(0, "nearest keys in the cache, the query's own included; 0: L less the sinks", minimum=0)

    formula = "RoPE at ρ = d where d < recent, min(i, sinks + recent - 1) - j where j < sinks, else not seen"
    paper = "Xiao et al. 2023 (arXiv 2309.17453)"
    name = "streaming_llm"

    def setup(self) -> None:
        """Set the window, the number of recent tokens."""
        super().setup()
        sinks = self.config.sinks
        if not self.config.recent and 0 < self.original_length <= sinks:
            raise UserError(
                f"'streaming_llm': {sinks} sinks fill a cache of {self.original_length} tokens: give recent=N"
            )
        self.window = self.resolve_length("recent", lambda length: length - sinks)

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions."""
        last = pos.q.clamp_max(self.config.sinks + self.window - 1)
        return near_region(pos, self.window), self._sink_region(far_region(last, pos.k, self.window))

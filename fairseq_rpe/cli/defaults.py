"""Training defaults per architecture and kind of data; each is an option of ``fairseq-rpe train``."""

from __future__ import annotations

from dataclasses import dataclass

ARCH_PREFIX = "transformer_rpe_lm_"


@dataclass(frozen=True)
class Defaults:
    """One set of defaults.

    ``batch_sentences`` is per process and per accumulation step; ``threads`` is per process,
    ``None`` for an equal share of the cores, and gives way to OMP_NUM_THREADS. ``schedule`` is ``inverse_sqrt``, or
    ``linear`` down to zero at the last update.
    """

    tokens: int
    updates: int
    batch_sentences: int
    lr: float
    warmup: int
    dropout: float
    save_every: int
    threads: int | None
    schedule: str = "inverse_sqrt"


# Minutes on a laptop: enough to see which encodings break beyond the training length. One thread,
# because sums over several depend on their number: so the same command gives the same bits anywhere.
_TINY = Defaults(tokens=64, updates=400, batch_sentences=16, lr=2e-3, warmup=80, dropout=0.0, save_every=200, threads=1)
# The common published setting: 128 sequences of 512 tokens, 50k updates, 4k of them warm-up.
_PAPER = Defaults(
    tokens=512, updates=50000, batch_sentences=128, lr=5e-4, warmup=4000, dropout=0.1, save_every=1000, threads=None
)
_TEXT = {"tiny": _TINY, "wiki103": _PAPER, "base": _PAPER, "large": _PAPER}
# Generated tasks know their training length themselves. A thousand updates learn to copy 20 items, two thousand more
# sharpen it; the published setting is that of the index-warping paper.
_TINY_TASK = Defaults(
    tokens=0,
    updates=3000,
    batch_sentences=64,
    lr=1e-3,
    warmup=200,
    dropout=0.0,
    save_every=500,
    threads=1,
    schedule="linear",
)
_PAPER_TASK = Defaults(
    tokens=0,
    updates=40000,
    batch_sentences=64,
    lr=3e-5,
    warmup=2400,
    dropout=0.1,
    save_every=1000,
    threads=None,
    schedule="linear",
)


def full_name(arch: str) -> str:
    """``tiny`` stands for ``transformer_rpe_lm_tiny``; a full name stays as it is."""
    return ARCH_PREFIX + arch if arch in _TEXT else arch


def defaults_for(arch: str, algorithm: bool) -> Defaults:
    """The defaults of an architecture, for text or for an algorithmic task; one of your own gets the published ones."""
    tiny = full_name(arch) == ARCH_PREFIX + "tiny"
    if algorithm:
        return _TINY_TASK if tiny else _PAPER_TASK
    return _TEXT.get(full_name(arch).removeprefix(ARCH_PREFIX), _PAPER)

"""Training defaults per architecture; every one of them is an option of ``fairseq-rpe train``."""

from __future__ import annotations

from dataclasses import dataclass

ARCH_PREFIX = "transformer_rpe_lm_"


@dataclass(frozen=True)
class Recipe:
    """One set of defaults.

    ``batch_sentences`` is per process and per accumulation step; ``threads`` is per process,
    ``None`` for an equal share of the cores, and gives way to OMP_NUM_THREADS.
    """

    tokens: int
    updates: int
    batch_sentences: int
    lr: float
    warmup: int
    dropout: float
    save_every: int
    threads: int | None


# Minutes on a laptop: enough to see which encodings break beyond the training length. One thread,
# because sums over several depend on their number: so the same command gives the same bits anywhere.
_TINY = Recipe(tokens=64, updates=400, batch_sentences=16, lr=2e-3, warmup=80, dropout=0.0, save_every=200, threads=1)
# The common published setting: 128 sequences of 512 tokens, 50k updates, 4k of them warm-up.
_PAPER = Recipe(
    tokens=512, updates=50000, batch_sentences=128, lr=5e-4, warmup=4000, dropout=0.1, save_every=1000, threads=None
)
_RECIPES = {"tiny": _TINY, "wiki103": _PAPER, "base": _PAPER, "large": _PAPER}


def full_name(arch: str) -> str:
    """``tiny`` stands for ``transformer_rpe_lm_tiny``; a full name stays as it is."""
    return ARCH_PREFIX + arch if arch in _RECIPES else arch


def recipe_for(arch: str) -> Recipe:
    """The defaults of an architecture; one of your own gets the published setting."""
    return _RECIPES.get(full_name(arch).removeprefix(ARCH_PREFIX), _PAPER)

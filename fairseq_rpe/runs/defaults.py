"""What a training takes where nothing is said: by architecture, for text and for generated tasks."""

from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_rpe.checkpoints.model_sizes import ARCH_PREFIX, SIZES, full_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest


@dataclass(frozen=True)
class Defaults:
    """Training defaults of an architecture.

    ``batch_sentences`` is per process and per accumulation step; ``threads`` is per process,
    ``None`` for an equal share of the cores, and gives way to OMP_NUM_THREADS. ``schedule`` is ``inverse_sqrt``,
    ``linear`` down to zero at the last update, or ``cosine``.
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
# Generated tasks know their training length themselves. A thousand updates learn to copy 20 items, two thousand more
# sharpen it; the published setting is that of the index-warping paper.
_TINY_TASK = replace(
    _TINY, tokens=0, batch_sentences=64, schedule="linear", updates=3000, lr=1e-3, warmup=200, save_every=500
)
_PAPER_TASK = replace(_PAPER, tokens=0, batch_sentences=64, schedule="linear", updates=40000, lr=3e-5, warmup=2400)
# A default warm-up takes at most one update in this many: the share of tiny's own defaults, 80 of 400.
WARMUP_SHARE = 5


def default_warmup(longest: int, updates: int) -> int:
    """Compute the updates of warm-up of a training that does not state them.

    Args:
        longest: the warm-up of a training that is long enough for it.
        updates: updates of this training.

    Returns:
        ``longest``, or a fifth of the updates if that is less; at least 1.
    """
    return max(1, min(longest, updates // WARMUP_SHARE))


def check_warmup(warmup: int, updates: int) -> None:
    """Check that a training reaches its peak learning rate, which it first uses in update ``warmup + 1``.

    Args:
        warmup: updates of warm-up.
        updates: updates of the training, those of the warm-up included.

    Raises:
        UserError: the warm-up is as long as the training or longer, or the training has one update.
    """
    if updates < 2:
        raise UserError(f"a training of {updates} update has no room for a warm-up: raise --updates to at least 2")
    if warmup >= updates:
        raise UserError(
            f"a warm-up of {warmup} is not below the {updates} updates of the training, so the learning rate never "
            "reaches its peak: lower --warmup or raise --updates"
        )


def check_arch(arch: str, module: Path | None) -> None:
    """Refuse an architecture that is neither ours nor of a ``module``: fairseq would take seconds to say so."""
    own = module is not None and arch.startswith(ARCH_PREFIX)
    if full_name(arch) not in (known := [ARCH_PREFIX + size for size in SIZES]) and not own:
        shorts = ", ".join(SIZES)
        raise UserError(f"--arch {arch} is not one of {shorts} (or {known[0]} and so on){nearest(arch, SIZES)}")


def defaults_for(arch: str, algorithm: bool) -> Defaults:
    """The defaults of an architecture, for text or for an algorithmic task; one of your own gets the published ones."""
    tiny = full_name(arch) == ARCH_PREFIX + "tiny"
    return (_TINY_TASK if tiny else _PAPER_TASK) if algorithm else (_TINY if tiny else _PAPER)

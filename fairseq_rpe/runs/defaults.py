"""Default settings of a training by architecture, for text and for generated tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_rpe.checkpoints.model_sizes import ARCH_PREFIX, MODEL_SIZES, full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.runs.training_config import OptimizationSettings, Schedule


@dataclass(frozen=True, kw_only=True)
class Defaults(OptimizationSettings):
    """Training defaults of an architecture; see :class:`~fairseq_rpe.runs.training_config.OptimizationSettings`.

    Attributes:
        save_every: number of updates between checkpoints.
        threads: number of threads of each process, None for an equal share of the cores; OMP_NUM_THREADS overrides it.
    """

    tokens: int
    updates: int
    batch_sentences: int
    lr: float
    warmup: int
    dropout: float
    schedule: Schedule = "inverse_sqrt"
    save_every: int
    threads: int | None


# Minutes on a laptop: enough to see which encodings break beyond the training length. One thread, because sums over
# several threads depend on their number; with one thread the same command gives the same bits on any machine.
_TINY = Defaults(tokens=64, updates=400, batch_sentences=16, lr=2e-3, warmup=80, dropout=0.0, save_every=200, threads=1)
# The common published setting: 128 sequences of 512 tokens, 50k updates, 4k of them warm-up.
_PAPER = Defaults(
    tokens=512, updates=50000, batch_sentences=128, lr=5e-4, warmup=4000, dropout=0.1, save_every=1000, threads=None
)
# Generated tasks set their training length themselves. A thousand updates learn to copy 20 items, two thousand more
# sharpen it; the published setting is that of the index-warping paper.
_TINY_TASK = replace(
    _TINY, tokens=0, batch_sentences=64, schedule="linear", updates=3000, lr=1e-3, warmup=200, save_every=500
)
_PAPER_TASK = replace(_PAPER, tokens=0, batch_sentences=64, schedule="linear", updates=40000, lr=3e-5, warmup=2400)
# A default warm-up takes at most one update in this many: the share of tiny's own defaults, 80 of 400.
WARMUP_SHARE = 5
_SHORTEST_SAVE = 50  # updates between checkpoints of a short training: fewer would cost more than they can save


def default_warmup(longest: int, updates: int) -> int:
    """Compute the updates of warm-up of a training that does not state them.

    Args:
        longest: the warm-up of a training that is long enough for it.
        updates: updates of this training.

    Returns:
        ``longest``, or a fifth of the updates if that is less; at least 1.
    """
    return max(1, min(longest, updates // WARMUP_SHARE))


def default_save_every(longest: int, updates: int) -> int:
    """Compute the number of updates between checkpoints of a training that does not state it.

    Args:
        longest: the number for a training that is long enough for it.
        updates: updates of this training.

    Returns:
        ``longest``, or for a training that would end before, half of its updates but at least ``_SHORTEST_SAVE``.
    """
    return longest if longest <= updates else min(longest, max(_SHORTEST_SAVE, updates // 2))


def check_keep_at(keep_at: Sequence[int], updates: int, option: str) -> None:
    """Check that a training reaches the updates after which its weights are to be kept or evaluated.

    Args:
        keep_at: numbers of updates.
        updates: updates of the training.
        option: option that names them, for the message.

    Raises:
        UserError: one of them is beyond the training.
    """
    if (most := max(keep_at, default=0)) > updates:
        raise UserError(
            f"{option} {most} is beyond the {updates} updates of the training: lower it, or raise --updates"
        )


def check_warmup(warmup: int, updates: int) -> None:
    """Check that a training reaches its peak learning rate, which it first uses in update ``warmup + 1``.

    Args:
        warmup: updates of warm-up.
        updates: updates of the training, those of the warm-up included.

    Raises:
        UserError: the warm-up is as long as the training or longer, or the training has one update.
    """
    if updates < 2:
        raise UserError(
            f"a training of {updates} update has no update left for a warm-up: raise --updates to at least 2"
        )
    if warmup >= updates:
        raise UserError(
            f"a warm-up of {warmup} is not below the {updates} updates of the training, so the learning rate never "
            "reaches its peak: lower --warmup or raise --updates"
        )


def check_arch(arch: str, module: Path | None) -> None:
    """Check an architecture early; fairseq would take seconds to refuse it.

    Args:
        arch: name of the architecture.
        module: file that may register further architectures.

    Raises:
        UserError: the architecture is unknown.
    """
    may_be_registered = module is not None and arch.startswith(ARCH_PREFIX)
    archs = [ARCH_PREFIX + size for size in MODEL_SIZES]
    if full_arch_name(arch) not in archs and not may_be_registered:
        shorts = ", ".join(MODEL_SIZES)
        raise UserError(
            f"--arch {arch} is not one of {shorts} (or {archs[0]} and so on){did_you_mean(arch, MODEL_SIZES)}"
        )


def defaults_for(arch: str, algorithm: bool) -> Defaults:
    """Return the training defaults of an architecture.

    Args:
        arch: name of the architecture; one that a user's module registers has the published settings.
        algorithm: whether a generated task is trained, rather than text.

    Returns:
        The defaults.
    """
    tiny = full_arch_name(arch) == ARCH_PREFIX + "tiny"
    return (_TINY_TASK if tiny else _PAPER_TASK) if algorithm else (_TINY if tiny else _PAPER)

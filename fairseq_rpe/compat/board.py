"""TensorBoard shows validation and training loss first, fairseq's housekeeping last."""

from collections.abc import Mapping
from typing import Any

from fairseq.logging import progress_bar

from fairseq_rpe.compat.monkeypatch import replaces

# what fairseq logs of its own work: rates, batch sizes, gradients, clocks and memory
_HOUSEKEEPING = frozenset(
    "bsz clip clock cuda_gb_allocated cuda_gb_free cuda_gb_reserved epoch gb_free gnorm loss_scale lr train_wall ups "
    "wall wpb wps".split()
)


def tag_of(kind: str, key: str) -> str:
    """The tag of a statistic, in a group that TensorBoard, which sorts groups by name, shows in order of interest.

    Args:
        kind: ``train``, ``train_inner`` or the name of a validation split.
        key: fairseq's name of the statistic, e.g. ``loss``.

    Returns:
        ``2_validation/…``, ``3_training/…``, ``4_encoding/…`` for what an encoding has learned, or ``fairseq/…``.
    """
    if key in _HOUSEKEEPING:
        return f"fairseq/{key}"
    if key.startswith("rpe_"):
        return f"4_encoding/{key}"
    return f"3_training/{key}" if kind.startswith("train") else f"2_validation/{key}"


@replaces(progress_bar.TensorboardProgressBarWrapper, "_log_to_tensorboard")
def ordered_tags(original: Any, bar: Any, stats: Mapping[str, Any], tag: str | None = None, step: Any = None) -> None:
    """fairseq writes each statistic as a group of its own, so that TensorBoard begins with ``bsz`` and ``clip``."""
    named = {key if key == "num_updates" else tag_of(tag or "", key): value for key, value in stats.items()}
    original(bar, named, tag, step)

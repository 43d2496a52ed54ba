"""Groups TensorBoard tags: validation and training loss first, fairseq's statistics of its own work last."""

from collections.abc import Mapping
from typing import Any

from fairseq.logging import progress_bar

from fairseq_rpe.compat.monkeypatch import patch

# fairseq's statistics of its own work: rates, batch sizes, gradients, clocks and memory
_STATISTICS = frozenset(
    "bsz clip clock cuda_gb_allocated cuda_gb_free cuda_gb_reserved epoch gb_free gnorm loss_scale lr train_wall ups "
    "wall wpb wps".split()
)


def tensorboard_tag(kind: str, key: str) -> str:
    """Return the tag of a statistic in a numbered group; TensorBoard sorts groups by name.

    Args:
        kind: ``train``, ``train_inner`` or the name of a validation split.
        key: fairseq's name of the statistic, e.g. ``loss``.

    Returns:
        ``2_validation/…``, ``3_training/…``, ``4_encoding/…`` for what an encoding has learned, or ``fairseq/…``.
    """
    if key in _STATISTICS:
        return f"fairseq/{key}"
    if key.startswith("rpe_"):
        return f"4_encoding/{key}"
    return f"3_training/{key}" if kind.startswith("train") else f"2_validation/{key}"


@patch(progress_bar.TensorboardProgressBarWrapper, "_log_to_tensorboard")
def group_tensorboard_tags(
    original: Any, bar: Any, stats: Mapping[str, Any], tag: str | None = None, step: Any = None
) -> None:
    """Group the tags: fairseq logs each statistic as a group, so TensorBoard begins with ``bsz`` and ``clip``."""
    named = {key if key == "num_updates" else tensorboard_tag(tag or "", key): value for key, value in stats.items()}
    original(bar, named, tag, step)

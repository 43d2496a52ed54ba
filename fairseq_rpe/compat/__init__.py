"""Patches of fairseq 0.12.3, each with its reason, applied when this package is imported.

They change fairseq's modules in the whole process, and ``sys.excepthook`` for one-line errors.
"""

from fairseq_rpe.compat import quick_start  # noqa: F401  (first)

# isort: split
from fairseq_rpe.compat import board, epoch_batches, excepthook, intermediate_checkpoints, safe_loading, safe_saving  # noqa: F401
from fairseq_rpe.compat.flags import is_replaced, overrides
from fairseq_rpe.compat.guards import check_scored_tokens, count_scored_tokens
from fairseq_rpe.compat.safe_literals import evaluate_literal, replace_eval

__all__ = ["apply", "count_scored_tokens", "evaluate_literal", "is_replaced", "overrides"]


def apply() -> None:
    """Apply the patches that each loaded module of fairseq needs."""
    replace_eval()
    check_scored_tokens()

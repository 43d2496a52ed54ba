"""Every repair of fairseq 0.12.3 that this plugin makes, each with its reason, made when this room is imported.

They are process-global patches of fairseq's own modules (and ``sys.excepthook`` for our one-line errors).
"""

from fairseq_rpe.compat import quick_start  # noqa: F401  (first)

# isort: split
from fairseq_rpe.compat import board, epoch_batches, excepthook, safe_loading, safe_saving  # noqa: F401
from fairseq_rpe.compat.flags import overrides
from fairseq_rpe.compat.guards import guard_eval_lm, guard_module
from fairseq_rpe.compat.safe_literals import evaluate_literal, literal_eval_only

__all__ = ["apply", "evaluate_literal", "guard_module", "overrides"]


def apply() -> None:
    """Repair what is there once in each of fairseq's modules, in all that are loaded by now."""
    literal_eval_only()
    guard_eval_lm()

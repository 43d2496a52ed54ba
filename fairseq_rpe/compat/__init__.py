"""Every repair of fairseq 0.12.3 that this plugin makes, each with its reason. Applied on import of the plugin only.

They are process-global patches of fairseq's own modules (and ``sys.excepthook`` for our one-line errors). ``apply``
may be called again: it does nothing the second time.
"""

import functools

from ..guards import guard_data, guard_eval_lm, guard_workers
from .batches import same_batches_when_resumed, whole_batches
from .excepthook import one_line_errors
from .flags import bf16_is_not_tpu, flags_for_every_command, forget_overrides, no_fully_sharded
from .literals import evaluate_literal, literal_eval_only
from .numpy_long import numpy_compat
from .safe_loading import broadcast_checkpoints, check_checkpoint, namespace_checkpoints, safe_checkpoints
from .safe_saving import atomic_copies, full_disks

__all__ = ["apply", "check_checkpoint", "evaluate_literal", "forget_overrides"]


@functools.cache
def apply() -> None:
    """Make all repairs once."""
    one_line_errors()
    numpy_compat()
    namespace_checkpoints()
    broadcast_checkpoints()
    literal_eval_only()
    safe_checkpoints()
    whole_batches()
    same_batches_when_resumed()
    atomic_copies()
    full_disks()
    bf16_is_not_tpu()
    no_fully_sharded()
    flags_for_every_command()
    guard_workers()
    guard_data()
    guard_eval_lm()

"""One decision for all processes of a distributed training, without a collective.

A collective would wait for every rank, and ranks need not see the same kinds of calls: the last batch of one has
padding where another's has none, and one alone evaluates. So the rank that comes first decides, and leaves its decision
in the key-value store that the processes met in; whoever comes later reads it, or waits for as long as deciding may
take. Who never comes is never waited for.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

logger = logging.getLogger(__name__)
PREFIX = "fairseq_rpe/attention/"
NONE = "-"


def store_of_ranks() -> Any | None:
    """The store of this training's processes; None: there is one process, or no store."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if torch.distributed.get_world_size() < 2:
        return None
    try:
        return torch.distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError):
        return None


def agreed(key: str, decide: Callable[[], str | None], seconds: float, store: Any | None) -> str | None:
    """What the first rank that asks for ``key`` decides; None is a decision too.

    Args:
        key: of ranks that ought to agree.
        decide: called by the first rank only.
        seconds: how long another one waits for it; then it has None, with a warning.
        store: of :func:`store_of_ranks`; None: this process decides for itself.
    """
    if store is None:
        return decide()
    key = PREFIX + key
    if store.add(f"{key}/asked", 1) == 1:
        found: str | None = None
        try:
            found = decide()
        finally:
            store.set(key, found or NONE)
        return found
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        logger.warning("no rank has chosen an attention backend within %.0f s: this one measures nothing", seconds)
        return None
    said = store.get(key).decode()
    return None if said == NONE else said

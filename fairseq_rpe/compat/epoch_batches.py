"""Patches of the batches of an epoch: none is dropped, and resumed runs keep theirs."""

import types
from typing import Any

import numpy as np
from fairseq.data import data_utils
from fairseq.tasks.fairseq_task import FairseqTask

from fairseq_rpe.compat.monkeypatch import patch

if not hasattr(np, "compat"):  # removed in NumPy 2.0; used by sample-break-mode eos, fairseq-interactive and generation
    np.compat = types.SimpleNamespace(long=int)


@patch(data_utils, "batch_by_size")
def keep_last_batches(original: Any, indices: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
    """Add the last blocks, which ``batch_by_size`` silently drops if a batch size multiple (default 8) is required.

    41 blocks in batches of 4 would become 40, so that training never sees the last one and validation misses it.
    """
    batches = list(original(indices, *args, **kwargs))
    sizes = [len(batch) for batch in batches]
    remaining, size = np.asarray(indices, dtype=np.int64)[sum(sizes) :], max(sizes, default=1)
    return batches + [remaining[start : start + size] for start in range(0, len(remaining), size)]


@patch(FairseqTask, "get_batch_iterator")
def resume_same_batches(original: Any, self: Any, dataset: Any, *args: Any, epoch: int = 1, **kwargs: Any) -> Any:
    """Make the batches of epoch 1 also when a run is resumed in a later epoch.

    fairseq keeps the batches of epoch 1 for the whole run, but a resumed run made others from another seed: it saw some
    blocks of that epoch twice and others never, so that its result differed from an uninterrupted run.
    """
    if not _keeps_batches(self, dataset, kwargs) or dataset in self.dataset_to_epoch_iter:
        return original(self, dataset, *args, epoch=epoch, **kwargs)
    iterator = original(self, dataset, *args, epoch=1, **kwargs)
    iterator.epoch = max(epoch, 1)
    dataset.set_epoch(epoch)
    return iterator


def _keeps_batches(task: Any, dataset: Any, options: dict[str, Any]) -> bool:
    """Return whether fairseq keeps the batches of the first epoch; ``options`` are those of get_batch_iterator."""
    if any(options.get(flag) for flag in ("disable_iterator_cache", "update_epoch_batch_itr")):
        return False
    if getattr(task.cfg, "rebuild_batches", False):
        return False
    # has_sharded_data fails for tasks without a data folder
    if getattr(task.cfg, "data", None) and task.has_sharded_data("train"):
        return False
    return bool(task.can_reuse_epoch_itr(dataset))

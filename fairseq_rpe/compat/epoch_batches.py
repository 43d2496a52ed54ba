"""The blocks that an epoch is made of."""

import types
from typing import Any

import numpy as np
from fairseq.data import data_utils
from fairseq.tasks.fairseq_task import FairseqTask

from fairseq_rpe.compat.monkeypatch import replaces

if not hasattr(np, "compat"):  # sample-break-mode eos, fairseq-interactive and generation want what left with numpy 2.0
    np.compat = types.SimpleNamespace(long=int)


@replaces(data_utils, "batch_by_size")
def whole_batches(original: Any, indices: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
    """With a required batch size multiple (8 by default) ``batch_by_size`` drops the last few blocks, without a word.

    41 blocks in batches of 4 become 40: training never sees them and the validation perplexity is not that of the set.
    """
    batches = list(original(indices, *args, **kwargs))
    sizes = [len(batch) for batch in batches]
    rest, size = np.asarray(indices, dtype=np.int64)[sum(sizes) :], max(sizes, default=1)
    return batches + [rest[start : start + size] for start in range(0, len(rest), size)]


@replaces(FairseqTask, "get_batch_iterator")
def same_batches_when_resumed(original: Any, self: Any, dataset: Any, *args: Any, epoch: int = 1, **kwargs: Any) -> Any:
    """A run keeps the batches that it made in epoch 1. One resumed in a later epoch made others, of another seed.

    So it met some blocks of that epoch twice and others never, and its end was not that of an uninterrupted run.
    """
    kept = not any(kwargs.get(flag) for flag in ("disable_iterator_cache", "update_epoch_batch_itr"))
    kept = kept and not getattr(self.cfg, "rebuild_batches", False)
    # has_sharded_data fails where a task has no data folder, as in fairseq's own tests
    kept = kept and not (getattr(self.cfg, "data", None) and self.has_sharded_data("train"))
    if not kept or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
        return original(self, dataset, *args, epoch=epoch, **kwargs)
    iterator = original(self, dataset, *args, epoch=1, **kwargs)
    iterator.epoch = max(epoch, 1)
    dataset.set_epoch(epoch)
    return iterator

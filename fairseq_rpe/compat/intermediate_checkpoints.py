"""Keeps the weights after chosen updates; fairseq saves at multiples of one interval, and deletes older checkpoints."""

import functools
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer

from fairseq_rpe.checkpoints.checkpoint_file import intermediate_path
from fairseq_rpe.compat.monkeypatch import patch
from fairseq_rpe.core.errors import UserError


@functools.cache
def parse_updates(text: str) -> frozenset[int]:
    """Parse the value of ``--rpe-keep-at``.

    Args:
        text: numbers of updates, separated by commas.

    Returns:
        The numbers.

    Raises:
        UserError: one of them is not a whole number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not (word.isascii() and word.isdigit() and int(word) > 0)]
    if wrong:
        raise UserError(f"--rpe-keep-at: '{wrong[0]}' is not a whole number above 0: write e.g. 100,200")
    return frozenset(map(int, words))


@patch(Trainer, "train_step")
def keep_weights(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the weights directly after an update of ``--rpe-keep-at``.

    The state of the optimizer, two thirds of a checkpoint, is left out: no training resumes from these files.
    """
    before = trainer.get_num_updates()
    output = original(trainer, *args, **kwargs)
    updates, text = trainer.get_num_updates(), getattr(trainer.cfg.model, "rpe_keep_at", None)
    if not text or updates == before or updates not in parse_updates(text) or trainer.cfg.checkpoint.no_save:
        return output
    trainer.consolidate_optimizer()  # in all processes, as fairseq does before it saves
    if trainer.should_save_checkpoint_on_current_rank:
        path = intermediate_path(Path(trainer.cfg.checkpoint.save_dir), updates)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {key: value for key, value in trainer.state_dict().items() if key != "last_optimizer_state"}
        checkpoint_utils.torch_persistent_save(utils.move_to_cpu(state), str(path))
    return output


@patch(metrics, "load_state_dict")
def count_on(original: Any, state_dict: Any) -> None:
    """Continue the statistics of a resumed training; fairseq loads them, but goes on with those before the loading.

    Without this patch the sum of the trained tokens, which checkpoints have, would end at the first resume.
    """
    original(state_dict)
    if "default" in metrics._aggregators:
        metrics._active_aggregators["default"] = metrics._aggregators["default"]

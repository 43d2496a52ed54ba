"""A training on questions in this process, of a model so small that five updates take a moment."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path

import fairseq_rpe.models  # noqa: F401  (before fairseq: registers, and lets it start quicker)

# isort: split
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train as fairseq_train
from omegaconf import DictConfig

from fairseq_rpe import compat

TINY = {
    "arch": "transformer_rpe_lm_tiny",
    "decoder_layers": 1,
    "decoder_embed_dim": 32,
    "decoder_ffn_embed_dim": 64,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "rpe": "alibi",
    "tokens_per_sample": 128,
    "max_tokens": 512,
    "optimizer": "adam",
    "lr": 0.003,
    "required_batch_size_multiple": 1,
    "num_workers": 0,
    "no_epoch_checkpoints": True,
    "log_format": "simple",
    "log_interval": 1,
    "cpu": True,
    "distributed_world_size": 1,
}


def train(
    folder: Path,
    save_dir: Path,
    updates: int = 5,
    init_from: Path | None = None,
    said: list[str] | None = None,
    **flags: object,
) -> Path:
    """Train a tiny model on a prepared folder of questions, or go on where ``save_dir`` has a checkpoint; its last one.

    ``flags``: of fairseq-train, over those of :data:`TINY`: True for one that takes no value, None for one to leave
    out. ``init_from``: the checkpoint to begin with, as --init-from. ``said``: takes fairseq's messages.
    """
    compat.apply()
    for function, left in ((checkpoint_utils.save_checkpoint, "best"), (fairseq_train.should_stop_early, "best")):
        vars(function).pop(left, None)  # of the training before in this process
    handler, root = logging.Handler(), logging.getLogger()
    handler.emit = lambda record: None if said is None else said.append(record.getMessage())
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING if said is None else logging.INFO)
    try:
        cfg = copy.deepcopy(settings(**{**TINY, **flags}))
        first = None if init_from is None else str(init_from)
        cfg.task.data, cfg.task.finetune_from_model = str(folder), first
        cfg.checkpoint.save_dir, cfg.checkpoint.finetune_from_model = str(save_dir), first
        cfg.optimization.max_update = updates
        fairseq_train.main(cfg)
    finally:
        compat.overrides.clear()
        root.removeHandler(handler)
        root.setLevel(level)
    return save_dir / "checkpoint_last.pt"


@functools.cache
def settings(**flags: object) -> DictConfig:
    """What fairseq-train makes of its flags, which takes longer than a few updates."""
    words = ["DATA", "--task", "rpe_answers", "--criterion", "answer_cross_entropy"]
    for name, value in flags.items():
        if value is not None and value is not False:
            words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=words)
    return convert_namespace_to_omegaconf(args)

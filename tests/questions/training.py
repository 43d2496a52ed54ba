"""A training on questions in this process, of a model so small that five updates take a moment."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import fairseq_rpe.models  # noqa: F401  (before fairseq: registers, and lets it start quicker)

# isort: split
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train as fairseq_train
from omegaconf import DictConfig, OmegaConf

from fairseq_rpe import compat

TINY = """--task rpe_answers --criterion answer_cross_entropy --arch transformer_rpe_lm_tiny --decoder-layers 1
--decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 4 --dropout 0 --rpe alibi
--tokens-per-sample 128 --max-tokens 512 --lr 0.003 --required-batch-size-multiple 1 --num-workers 0
--no-epoch-checkpoints --log-format simple --log-interval 1 --cpu --distributed-world-size 1"""


def train(
    folder: Path,
    save_dir: Path,
    updates: int = 5,
    init_from: Path | None = None,
    said: list[str] | None = None,
    optimizer: str = "adam",
    **flags: Any,
) -> Path:
    """Train a tiny model on a prepared folder of questions, or go on where ``save_dir`` has a checkpoint; its last one.

    ``flags``: of fairseq-train, over those of :data:`TINY`. ``init_from``: the checkpoint to begin with, as
    --init-from. ``said``: takes fairseq's messages.
    """
    compat.apply()
    for function in (checkpoint_utils.save_checkpoint, fairseq_train.should_stop_early):
        vars(function).pop("best", None)  # of the training before in this process
    handler, root = logging.Handler(), logging.getLogger()
    handler.emit = lambda record: None if said is None else said.append(record.getMessage())
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING if said is None else logging.INFO)
    try:
        cfg = copy.deepcopy(settings(optimizer))
        first = None if init_from is None else str(init_from)
        given = {"data": str(folder), "save_dir": str(save_dir), "finetune_from_model": first, "max_update": updates}
        flags = {"max_tokens_valid": flags.get("max_tokens", 512), **given, **flags}
        for name, value in flags.items():
            places = [group for group in cfg.values() if OmegaConf.is_dict(group) and name in group]
            assert places, name
            for group in places:
                group[name] = [value] if name in ("lr", "update_freq") else value
        fairseq_train.main(cfg)
    finally:
        compat.overrides.clear()
        root.removeHandler(handler)
        root.setLevel(level)
    return save_dir / "checkpoint_last.pt"


@functools.cache
def settings(optimizer: str) -> DictConfig:
    """What fairseq-train makes of :data:`TINY`, which takes longer than a few updates."""
    words = ["DATA", *TINY.split(), "--optimizer", optimizer]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), input_args=words))

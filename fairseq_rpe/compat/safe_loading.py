"""Checkpoints are weights and settings; loading one never runs code, and what cannot be loaded is one line."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils
from fairseq.models import BaseFairseqModel

from fairseq_rpe.checkpoints import checkpoint, checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import State, same_kind
from fairseq_rpe.compat.flags import overrides
from fairseq_rpe.compat.monkeypatch import replaces
from fairseq_rpe.compat.safe_literals import evaluate_literal, literal_eval_only
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings.from_checkpoint import restore
from fairseq_rpe.encodings.model_rotation import complete_for_checkpoint
from fairseq_rpe.encodings.rope_extrapolation import check_trained, reads_longer


@replaces(utils, "_broadcast_object_slow")
def broadcast_checkpoints(_original: Any, obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Rank 0 sends the checkpoint that it has loaded to the others, whose ``torch.load`` refuses its configuration.

    So no run of several processes could be resumed. What comes from a process of the same run needs no suspicion.
    """
    box = [obj]
    torch.distributed.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
    return box[0]


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def safe_checkpoints(original: Any, path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """``load_checkpoint_to_cpu`` names no ``weights_only``: an environment variable can switch the protection off.

    Loading is always weights-only here, what cannot be loaded is one line before anything is built, and a checkpoint
    never names a Python file to import. An encoding that replaces the checkpoint's has its rotation.
    """
    saved = checkpoint.load(Path(path))
    if arg_overrides and "rpe" in arg_overrides and "rpe" in saved.model:
        completed = complete_for_checkpoint(str(arg_overrides["rpe"]), str(saved.model["rpe"]))
        arg_overrides = {**arg_overrides, "rpe": completed}
    _check(saved, arg_overrides or {})
    try:
        state = original(path, arg_overrides, *args, **kwargs)
    except KeyError as error:
        raise UserError(f"{path} is not a fairseq checkpoint: it lacks {error}") from None
    literal_eval_only()  # again: loading a task may have imported further fairseq modules
    model = (state.get("cfg") or {}).get("model") or {}
    settings = vars(model) if isinstance(model, Namespace) else model
    if settings.get("character_embeddings"):
        evaluate_literal(settings.get("character_filters", ""))
    if settings.get("rpe_module"):
        settings["rpe_module"] = None
    return state


def _check(state: State, changed: Mapping[str, object]) -> None:
    """What fairseq needs beyond what we do, what it would build, and that another encoding can read this model."""
    if not state.weights:
        raise UserError(f"{state.path} is not a fairseq checkpoint: it holds no model")
    if state.history == ():
        raise UserError(f"{state.path} is not a fairseq checkpoint: its optimizer_history is empty")
    checkpoint.check_size(state)
    if "rpe" in state.model and "rpe" not in changed:
        restore(state)
    elif "rpe" in state.model and reads_longer(wanted := str(changed["rpe"])):
        check_trained(wanted, str(state.model["rpe"]))


@replaces(BaseFairseqModel, "load_state_dict")
def numbers_of_one_kind(original: Any, self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """torch turns numbers of any kind into those of the model: whole numbers into weights, without a word."""
    if wrong := same_kind(self.state_dict(), state_dict):
        raise UserError(f"the checkpoint does not fit this model: {wrong}")
    return original(self, state_dict, *args, **kwargs)


@replaces(checkpoint_utils, "load_model_ensemble_and_task")
def flags_over_settings(
    original: Any, filenames: list[str], arg_overrides: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """What the command's own flags say of the model goes before what the checkpoint says."""
    if not kwargs.get("suffix") and kwargs.get("num_shards", 1) == 1:
        for path in filenames:  # fairseq's own message comes with a traceback
            checkpoint_file.check(Path(path))
    models, cfg, task = original(filenames, {**(arg_overrides or {}), **overrides}, *args, **kwargs)
    for key, value in overrides.items():
        # an encoding has been completed with the checkpoint's rotation
        if getattr(cfg.model, key, None) != value and (key != "rpe" or getattr(cfg.model, key, None) is None):
            raise UserError(f"{filenames[0]} has no setting '{key}' to replace: it is not a transformer_rpe_lm")
    return models, cfg, task

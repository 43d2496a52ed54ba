"""Loads checkpoints without running code; a checkpoint that cannot be loaded is a UserError."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils
from fairseq.models import BaseFairseqModel

from fairseq_rpe.checkpoints import checkpoint, checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import Checkpoint, dtype_mismatch
from fairseq_rpe.compat.flags import is_replaced, overrides
from fairseq_rpe.compat.monkeypatch import patch
from fairseq_rpe.compat.safe_literals import evaluate_literal, replace_eval
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings.from_checkpoint import rename_encoding_weights, restore_encodings
from fairseq_rpe.encodings.model_rotation import complete_spec_for_checkpoint
from fairseq_rpe.encodings.rope_extrapolation import check_trained_rotation

_continued: list[tuple[str, str]] = []  # spec and sharing of the model whose training loads a checkpoint


@patch(utils, "_broadcast_object_slow")
def broadcast_checkpoints(_original: Any, obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Broadcast the checkpoint of rank 0 without ``torch.load``, which refuses its configuration on other ranks.

    Otherwise no run of several processes could be resumed. Data from a process of the same run can be trusted.
    """
    objects = [obj]
    torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]


@patch(checkpoint_utils, "load_checkpoint_to_cpu")
def load_weights_only(original: Any, path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Load a checkpoint weights-only, check it before anything is built and drop its ``rpe_module``.

    fairseq passes no ``weights_only``, so that an environment variable could switch the protection off. An encoding
    that replaces the checkpoint's takes over its rotation.
    """
    saved = checkpoint.load_checkpoint(Path(path))
    replaces_encoding = bool(arg_overrides) and "rpe" in arg_overrides and "rpe" in saved.model
    if replaces_encoding:
        completed = complete_spec_for_checkpoint(str(arg_overrides["rpe"]), str(saved.model["rpe"]))
        arg_overrides = {**arg_overrides, "rpe": completed}
    _check(saved, arg_overrides or {})
    try:
        state = original(path, arg_overrides, *args, **kwargs)
    except KeyError as error:
        raise UserError(f"{path} is not a fairseq checkpoint: it lacks {error}") from None
    if replaces_encoding:
        state["model"] = rename_encoding_weights(saved, str(arg_overrides["rpe"]), state["model"])
    elif _continued and "rpe" in saved.model:
        spec, share = _continued[-1]
        if (spec, share) != (saved.model["rpe"], saved.model.get("rpe_share", "auto")):
            state["model"] = rename_encoding_weights(saved, spec, state["model"], share)
    replace_eval()  # again, because loading a task may have imported further modules of fairseq
    model = (state.get("cfg") or {}).get("model") or {}
    settings = vars(model) if isinstance(model, Namespace) else model
    if settings.get("character_embeddings"):
        evaluate_literal(settings.get("character_filters", ""))
    if settings.get("rpe_module"):
        settings["rpe_module"] = None
    return state


@patch(checkpoint_utils, "load_checkpoint")
def load_training_checkpoint(original: Any, cfg: Any, trainer: Any, **passthrough_args: Any) -> Any:
    """Load the checkpoint that a training starts from; the weights of encodings follow their layers."""
    with _continue_as(trainer.cfg.model):
        return original(cfg, trainer, **passthrough_args)


@contextmanager
def _continue_as(model: Any) -> Iterator[None]:
    """Rename weights of encodings in loaded checkpoints to those of a model with the settings ``model``."""
    spec = getattr(model, "rpe", None)
    _continued.extend([] if spec is None else [(str(spec), str(getattr(model, "rpe_share", "auto")))])
    try:
        yield
    finally:
        _continued.clear()


def _check(state: Checkpoint, changed: Mapping[str, object]) -> None:
    """Raise UserError if fairseq cannot load the checkpoint, or if its model cannot use a replacing encoding."""
    if not state.weights:
        raise UserError(f"{state.path} is not a fairseq checkpoint: it holds no model")
    if state.optimizer_history == ():
        raise UserError(f"{state.path} is not a fairseq checkpoint: its optimizer_history is empty")
    checkpoint.check_model_size(state)
    if "rpe" in state.model and "rpe" not in changed:
        restore_encodings(state)
    elif "rpe" in state.model:
        check_trained_rotation(str(changed["rpe"]), str(state.model["rpe"]))


@patch(BaseFairseqModel, "load_state_dict")
def check_dtypes(original: Any, self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise UserError for parameters of another kind of dtype; torch silently converts integers to weights."""
    if mismatch := dtype_mismatch(self.state_dict(), state_dict):
        raise UserError(f"the checkpoint does not fit this model: {mismatch}")
    return original(self, state_dict, *args, **kwargs)


@patch(checkpoint_utils, "load_model_ensemble_and_task")
def apply_flag_overrides(
    original: Any, filenames: list[str], arg_overrides: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Let the flags of the command override the settings of the checkpoint."""
    if not kwargs.get("suffix") and kwargs.get("num_shards", 1) == 1:
        for path in filenames:  # fairseq would print a traceback
            checkpoint_file.check_file(Path(path))
    models, cfg, task = original(filenames, {**(arg_overrides or {}), **overrides}, *args, **kwargs)
    for key, value in overrides.items():
        if not is_replaced(cfg.model, key, value):
            raise UserError(f"{filenames[0]} has no setting '{key}' to replace: it is not a transformer_rpe_lm")
    return models, cfg, task

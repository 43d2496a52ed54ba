"""Checkpoints are weights and settings; loading one never runs code, and what cannot be loaded is one line."""

import os
import pickle
import zipfile
from argparse import Namespace
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils

from ..core import UserError
from .flags import overrides
from .literals import evaluate_literal, literal_eval_only
from .replacement import replaces

# Models without a dataclass save one, a mere record, which torch's safe loading refuses.
torch.serialization.add_safe_globals([Namespace])


@replaces(utils, "_broadcast_object_slow")
def broadcast_checkpoints(_original: Any, obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Rank 0 sends the checkpoint that it has loaded to the others, whose ``torch.load`` refuses its configuration.

    So no run of several processes could be resumed. What comes from a process of the same run needs no suspicion.
    """
    box = [obj]
    torch.distributed.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
    return box[0]


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def safe_checkpoints(original: Any, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """``load_checkpoint_to_cpu`` names no ``weights_only``: an environment variable can switch the protection off.

    Loading is always weights-only here, failures are one line, and a checkpoint never names a Python file to import.
    """
    _check(path)
    try:
        state = original(path, *args, **kwargs)
    except KeyError as error:
        raise UserError(f"checkpoint {path} is not one of fairseq's: it lacks {error}") from None
    literal_eval_only()  # again: loading a task may have imported further fairseq modules
    model = (state.get("cfg") or {}).get("model") or {}
    settings = vars(model) if isinstance(model, Namespace) else model
    if settings.get("character_embeddings"):
        evaluate_literal(settings.get("character_filters", ""))
    if settings.get("rpe_module"):
        settings["rpe_module"] = None
    return state


@replaces(checkpoint_utils, "load_model_ensemble_and_task")
def flags_over_settings(
    original: Any, filenames: list[str], arg_overrides: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """What the command's own flags say of the model goes before what the checkpoint says."""
    if not kwargs.get("suffix") and kwargs.get("num_shards", 1) == 1:
        for path in filenames:
            _check_exists(path)
    models, cfg, task = original(filenames, {**(arg_overrides or {}), **overrides}, *args, **kwargs)
    for key, value in overrides.items():
        if getattr(cfg.model, key, None) != value:
            raise UserError(f"{filenames[0]} has no setting '{key}' to replace: it is not a transformer_rpe_lm")
    return models, cfg, task


def _check_exists(path: str) -> None:
    if not os.path.isfile(path):  # fairseq's own message comes with a traceback
        raise UserError(f"checkpoint {path}: no such file")


def _check(path: str) -> None:
    """Refuse, in one line, a checkpoint that is missing, truncated, or would run code when it is loaded."""
    _check_exists(path)
    damaged = f"checkpoint {path} is damaged"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "Weights only load failed" not in str(error):
            raise UserError(f"{damaged}: copy or train it again") from None
        what = str(error).partition("Unsupported ")[2] or str(error).partition("GLOBAL ")[2] or "foreign objects"
        what = what.split(" was ")[0].split("\n")[0]
        raise UserError(f"checkpoint {path} is refused: it holds more than weights and settings ({what})") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        first = str(error).split("\n")[0]
        raise UserError(f"{damaged} ({type(error).__name__}: {first}): copy or train it again") from None
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"checkpoint {path} is not one of fairseq's: it holds no model")

"""A training that begins with a checkpoint: what it takes over from it, and a training on questions in particular.

The new checkpoint keeps the length of the original training as its own (``--rpe-train-length``). So ``factor=auto``, an
``original_length`` that is not given, and interpolated positions compare with that and not with the questions' length.
"""

from dataclasses import replace
from typing import Any

from fairseq_rpe import encodings
from fairseq_rpe.checkpoints.checkpoint import check_size, check_vocabulary
from fairseq_rpe.checkpoints.model_sizes import full_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.encodings.model import build_for_model, load_weights
from fairseq_rpe.runs import checkpoints, from_checkpoint
from fairseq_rpe.runs.settings import Request

_LENGTH = "--rpe-train-length"


def with_checkpoint_rotation(request: Request) -> Request:
    """Return the request with the rotation of the checkpoint that it begins with where its ``rpe`` leaves it open.

    Args:
        request: a training with ``finetune_from``.

    Returns:
        The request, unchanged where nothing is missing.

    Raises:
        UserError: the checkpoint cannot be read, or ``rpe`` is not valid or contradicts the checkpoint's rotation.
    """
    assert request.finetune_from is not None
    if request.rpe_module is not None:
        encodings.load_module(request.rpe_module)
    return replace(request, rpe=checkpoints.load(request.finetune_from).complete(request.rpe.strip()))


def filled(asked: Request) -> Request:
    """The request with architecture, dropout and positions of the checkpoint that it begins with, if nothing is said.

    Of the flags that its architecture needs beside its name all are added, or none where ``extra`` says one of them.
    Raises UserError: the checkpoint cannot be used, or its vocabulary is not that of ``data``.
    """
    path, data = asked.finetune_from, asked.data
    assert path is not None and data is not None
    checkpoint = checkpoints.load(path)
    checkpoint.require_ours()
    check_size(checkpoint)
    check_vocabulary(checkpoint, read_dictionary(data / "dict.txt"), data)
    original = checkpoint.train_length()
    if not original:
        raise UserError(f"{path} does not say how long its training texts were: train it again")
    own: dict[str, Any] = from_checkpoint.said(checkpoint)
    extra, said = asked.extra, {word.partition("=")[0] for word in asked.extra}
    needed = own.pop("extra")
    if not said & set(needed) and (asked.arch is None or full_name(asked.arch) == own["arch"]):
        extra = (*needed, *extra)
    if asked.positions_train is None:
        own["positions_train"] = checkpoint.model.get("positions_train")
        own["positions_eval"] = checkpoint.model.get("positions_eval")
    if asked.rpe_module is not None:
        encodings.load_module(asked.rpe_module)
    heads, width, layers = (checkpoint.size(f"decoder_{key}") for key in ("attention_heads", "embed_dim", "layers"))
    if own.get("rpe_share") not in ("auto", *encodings.build(asked.rpe, heads, width, original).sharing_modes):
        own.pop("rpe_share", None)
    share = asked.rpe_share or str(own.get("rpe_share") or "auto")
    made = build_for_model(asked.rpe, heads, width, layers, original, share=share)
    if wrong := load_weights(made, checkpoint.encodings):
        raise UserError(
            f"--rpe {asked.rpe} has other parameters than {path} has learned with '{checkpoint.encoding}' ({wrong}): "
            "name that encoding, or one with the same parameters"
        )
    if _LENGTH not in said:
        extra = (*extra, _LENGTH, str(original))
    return replace(asked, **{key: value for key, value in own.items() if getattr(asked, key) is None}, extra=extra)

"""Settings that a training takes over from a checkpoint: architecture, dropout, positions and rotation."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import fairseq_rpe.models  # noqa: F401  (before fairseq: registers, and makes its import faster)

# isort: split
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_rpe import encodings
from fairseq_rpe.checkpoints.checkpoint import check_model_size, check_vocabulary
from fairseq_rpe.checkpoints.model_sizes import full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.encodings.model import build_for_model, load_weights
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELMConfig
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.settings import TrainingRequest

_LENGTH = "--rpe-train-length"
# setting of a model -> field of a TrainingRequest
_REQUEST_FIELDS = {
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "activation_fn": "activation_fn",
    "share_decoder_input_output_embed": "share_embeddings",
    "compute_dtype": "compute_dtype",
    "rpe_share": "rpe_share",
}
# settings that depend on the text or the machine, or that the new training sets; pruned layers are gone already
_NOT_INHERITED = {"max_target_positions", "tokens_per_sample", "add_bos_token", "tpu", "checkpoint_activations"}
_NOT_INHERITED |= {"offload_activations", "min_params_to_wrap", "relu_dropout", "attention_backend"}
_NOT_INHERITED |= {"decoder_layers_to_keep", "positions_train", "positions_eval", "decoder_xformers_att_config"}


def architecture_settings(checkpoint: RpeCheckpoint) -> dict[str, object]:
    """Return the fields of a request that build the model of a checkpoint.

    Args:
        checkpoint: checkpoint of this package's model.

    Returns:
        Values by field of :class:`~fairseq_rpe.runs.settings.TrainingRequest`; ``extra`` has flags of fairseq-train for
        settings that differ from those of the named architecture.

    Raises:
        UserError: the architecture is unknown, or no flag expresses one of its settings.
    """
    name, model = checkpoint.arch, checkpoint.model
    if name not in ARCH_CONFIG_REGISTRY:
        raise UserError(f"{checkpoint.path} has the architecture '{name}', unknown here: give --rpe-module FILE")
    defaults = SimpleNamespace()
    ARCH_CONFIG_REGISTRY[name](defaults)
    extra: list[str] = []
    for field in fields(TransformerRPELMConfig):
        key = field.name
        if key.startswith(("_", "rpe", "char")) or key in _NOT_INHERITED or key in _REQUEST_FIELDS:
            continue
        if key in model and model[key] != getattr(defaults, key, field.default):
            extra += _flag(key, model[key], checkpoint)
    settings = {request: model[key] for key, request in _REQUEST_FIELDS.items() if model.get(key) is not None}
    return {"arch": name, **settings, "extra": tuple(extra)}


def _flag(key: str, value: Any, checkpoint: RpeCheckpoint) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is True:
        return [flag]
    if value is False or value is None:
        raise UserError(f"{checkpoint.path} was trained with {key}={value}, which no flag can set: train it again")
    return [flag, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]


def with_checkpoint_rotation(request: TrainingRequest) -> TrainingRequest:
    """Complete the encoding of a request with the rotation of the checkpoint that it starts from.

    Args:
        request: a training with ``finetune_from``.

    Returns:
        The request, unchanged if its ``rpe`` states the rotation.

    Raises:
        UserError: the checkpoint cannot be read, or ``rpe`` is not valid or contradicts the checkpoint's rotation.
    """
    assert request.finetune_from is not None
    if request.rpe_module is not None:
        encodings.load_module(request.rpe_module)
    return replace(request, rpe=checkpoints.load(request.finetune_from).complete_spec(request.rpe.strip()))


def with_checkpoint_settings(request: TrainingRequest) -> TrainingRequest:
    """Complete a training on questions with the architecture, dropout and positions of the checkpoint it starts from.

    The new checkpoint keeps the original training length as its own (``--rpe-train-length``), so that ``factor=auto``,
    a default ``original_length`` and interpolated positions refer to it, not to the length of the questions. Flags that
    the architecture needs beside its name are added unless ``extra`` has one of them.

    Args:
        request: a training with ``finetune_from`` and ``data``.

    Returns:
        The request; its own settings stay.

    Raises:
        UserError: the checkpoint cannot be used, its parameters are not those of ``rpe``, or its vocabulary is not that
            of ``data``.
    """
    path, data = request.finetune_from, request.data
    assert path is not None and data is not None
    checkpoint = checkpoints.load(path)
    checkpoint.require_rpe_model()
    check_model_size(checkpoint)
    check_vocabulary(checkpoint, read_dictionary(data / "dict.txt"), data)
    original = checkpoint.train_length()
    if not original:
        raise UserError(f"{path} does not record its training length: train it again")
    settings: dict[str, Any] = architecture_settings(checkpoint)
    extra, flags = request.extra, {word.partition("=")[0] for word in request.extra}
    needed = settings.pop("extra")
    if not flags & set(needed) and (request.arch is None or full_arch_name(request.arch) == settings["arch"]):
        extra = (*needed, *extra)
    if request.positions_train is None:
        settings["positions_train"] = checkpoint.model.get("positions_train")
        settings["positions_eval"] = checkpoint.model.get("positions_eval")
    if request.rpe_module is not None:
        encodings.load_module(request.rpe_module)
    heads, width, layers = (
        checkpoint.integer_setting(f"decoder_{key}") for key in ("attention_heads", "embed_dim", "layers")
    )
    sharing_modes = encodings.build(request.rpe, heads, width, original).sharing_modes
    if settings.get("rpe_share") not in ("auto", *sharing_modes):
        settings.pop("rpe_share", None)
    sharing = request.rpe_share or str(settings.get("rpe_share") or "auto")
    model_encodings = build_for_model(request.rpe, heads, width, layers, original, share=sharing)
    if mismatch := load_weights(model_encodings, checkpoint.encoding_weights):
        raise UserError(
            f"--rpe {request.rpe} has other parameters than {path} has learned with '{checkpoint.encoding}' "
            f"({mismatch}): name that encoding, or one with the same parameters"
        )
    if _LENGTH not in flags:
        extra = (*extra, _LENGTH, str(original))
    missing = {key: value for key, value in settings.items() if getattr(request, key) is None}
    return replace(request, **missing, extra=extra)

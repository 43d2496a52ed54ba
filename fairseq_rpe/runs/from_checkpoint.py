"""Settings that a training takes over from a checkpoint: architecture, dropout, positions and rotation."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before fairseq: registers the architectures, and makes the import of fairseq faster.
import fairseq_rpe.models  # noqa: F401

# isort: split
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_rpe import encodings
from fairseq_rpe.checkpoints.checkpoint import check_model_size, check_vocabulary
from fairseq_rpe.checkpoints.model_sizes import full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.encodings.from_checkpoint import match_checkpoint_weights
from fairseq_rpe.encodings.model import build_for_model, load_weights, sharing_modes
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELMConfig
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.training_config import TrainingConfig

_LENGTH = "--rpe-train-length"
# setting of a model -> field of a TrainingConfig
_CONFIG_FIELDS = {
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "activation_fn": "activation_fn",
    "share_decoder_input_output_embed": "share_embeddings",
    "compute_dtype": "compute_dtype",
    "rpe_share": "rpe_share",
    "block": "block",
    "norm": "norm",
    "norm_position": "norm_position",
    "bias": "bias",
    "block_init": "block_init",
    "kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "qk_norm": "qk_norm",
    "logit_softcap": "logit_softcap",
}
# Settings that depend on the text or the machine, or that the new training sets. `decoder_layers_to_keep` is among them
# because the checkpoint has only the layers that were kept.
_NOT_INHERITED = {"max_target_positions", "tokens_per_sample", "add_bos_token", "tpu", "checkpoint_activations"}
_NOT_INHERITED |= {"offload_activations", "min_params_to_wrap", "relu_dropout", "attention_backend"}
_NOT_INHERITED |= {"decoder_layers_to_keep", "positions_train", "positions_eval", "decoder_xformers_att_config"}


def architecture_settings(checkpoint: RpeCheckpoint) -> dict[str, object]:
    """Return the fields of a configuration that build the model of a checkpoint.

    Args:
        checkpoint: checkpoint of this package's model.

    Returns:
        Values by field of :class:`~fairseq_rpe.runs.settings.TrainingConfig`; ``extra`` has flags of fairseq-train for
        settings that differ from those of the named architecture.

    Raises:
        UserError: the architecture is unknown, or no flag expresses one of its settings.
    """
    arch, model = checkpoint.arch, checkpoint.model
    if arch not in ARCH_CONFIG_REGISTRY:
        raise UserError(f"{checkpoint.path} has the architecture '{arch}', unknown here: give --rpe-module FILE")
    defaults = SimpleNamespace()
    ARCH_CONFIG_REGISTRY[arch](defaults)
    extra: list[str] = []
    for field in fields(TransformerRPELMConfig):
        key = field.name
        if key.startswith(("_", "rpe", "char")) or key in _NOT_INHERITED or key in _CONFIG_FIELDS:
            continue  # private, of the encoding (from --rpe), of a character embedding, or not by a flag in `extra`
        if key in model and model[key] != getattr(defaults, key, field.default):
            extra += _flag(key, model[key], checkpoint)
    settings = {name: model[key] for key, name in _CONFIG_FIELDS.items() if model.get(key) is not None}
    return {"arch": arch, **settings, "extra": tuple(extra)}


def _flag(key: str, value: Any, checkpoint: RpeCheckpoint) -> list[str]:
    """Return the words of the flag of fairseq-train that sets ``key`` to ``value``."""
    flag = "--" + key.replace("_", "-")
    if value is True:
        return [flag]
    if value is False or value is None:
        raise UserError(f"{checkpoint.path} was trained with {key}={value}, which no flag can set: train it again")
    return [flag, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]


def with_checkpoint_rotation(config: TrainingConfig) -> TrainingConfig:
    """Complete the encoding of a configuration with the rotation of the checkpoint that it starts from.

    Args:
        config: a training with ``finetune_from``.

    Returns:
        The configuration, unchanged if its ``rpe`` states the rotation.

    Raises:
        UserError: the checkpoint cannot be read, or ``rpe`` is not valid or contradicts the checkpoint's rotation.
    """
    assert config.finetune_from is not None
    if config.rpe_module is not None:
        encodings.load_module(config.rpe_module)
    return replace(config, rpe=checkpoints.load(config.finetune_from).complete_spec(config.rpe.strip()))


def with_checkpoint_settings(config: TrainingConfig) -> TrainingConfig:
    """Complete a training on questions with the architecture, dropout and positions of the checkpoint it starts from.

    The new checkpoint keeps the original training length as its own (``--rpe-train-length``), so that ``factor=auto``,
    a default ``original_length`` and interpolated positions refer to it, not to the length of the questions.

    Args:
        config: a training with ``finetune_from`` and ``data``.

    Returns:
        The configuration; settings that it states stay. Flags of fairseq-train are added to ``extra`` as
        :func:`_add_architecture_flags` describes.

    Raises:
        UserError: the checkpoint cannot be used, its parameters are not those of ``rpe``, or its vocabulary is not that
            of ``data``.
    """
    assert config.finetune_from is not None and config.data is not None
    checkpoint = checkpoints.load(config.finetune_from)
    train_length = _check_checkpoint(checkpoint, config.data)
    settings: dict[str, Any] = architecture_settings(checkpoint)
    extra = _add_architecture_flags(config, settings["arch"], settings.pop("extra"))
    if _LENGTH not in _flag_names(config.extra):
        extra = (*extra, _LENGTH, str(train_length))
    if config.positions_train is None:
        # The two belong together: a new training transform has a default transform of evaluation of its own.
        settings |= {key: checkpoint.model.get(key) for key in ("positions_train", "positions_eval")}
    if config.rpe_module is not None:
        encodings.load_module(config.rpe_module)
    if settings.get("rpe_share") not in ("auto", *sharing_modes(config.rpe)):
        settings.pop("rpe_share", None)
    sharing = config.rpe_share or str(settings.get("rpe_share") or "auto")
    _check_encoding_weights(config.rpe, checkpoint, train_length, sharing)
    missing = {key: value for key, value in settings.items() if getattr(config, key) is None}
    return replace(config, **missing, extra=extra)


def _check_checkpoint(checkpoint: RpeCheckpoint, data: Path) -> int:
    """Check model and vocabulary of a checkpoint that is to be trained on ``data``; return its training length."""
    checkpoint.require_rpe_model()
    check_model_size(checkpoint)
    check_vocabulary(checkpoint, read_dictionary(data / "dict.txt"), data)
    train_length = checkpoint.train_length()
    if not train_length:
        raise UserError(f"{checkpoint.path} does not record its training length: train it again")
    return train_length


def _flag_names(words: Sequence[str]) -> set[str]:
    """Return the flags among words of a command line, without their values."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def _add_architecture_flags(config: TrainingConfig, arch: str, flags: Sequence[str]) -> tuple[str, ...]:
    """Return ``extra`` with the flags by which the checkpoint's model differs from its named architecture.

    They are added all or none: none if ``extra`` already sets one of them, or if the configuration names another
    architecture, because the others alone would describe neither model.
    """
    has_same_arch = config.arch is None or full_arch_name(config.arch) == arch
    if not has_same_arch or _flag_names(config.extra) & set(flags):
        return config.extra
    return (*flags, *config.extra)


def _decoder_size(checkpoint: RpeCheckpoint) -> tuple[int, int, int]:
    """Return attention heads, model width and layers of a checkpoint."""
    heads, width, layers = (
        checkpoint.integer_setting(f"decoder_{key}") for key in ("attention_heads", "embed_dim", "layers")
    )
    return heads, width, layers


def _check_encoding_weights(rpe: str, checkpoint: RpeCheckpoint, train_length: int, sharing: str) -> None:
    """Check that the encoding ``rpe`` has the parameters of the checkpoint's encoding."""
    heads, width, layers = _decoder_size(checkpoint)
    model_encodings = build_for_model(
        rpe, heads, width, layers, train_length, share=sharing, head_width=checkpoint.head_width()
    )
    if mismatch := load_weights(model_encodings, match_checkpoint_weights(checkpoint, model_encodings.index)):
        raise UserError(
            f"--rpe {rpe} has other parameters than {checkpoint.path} has learned with '{checkpoint.encoding}' "
            f"({mismatch}): name that encoding, or one with the same parameters"
        )

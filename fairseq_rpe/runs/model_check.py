"""Checks that a model can be built, and a checkpoint loaded into it, before a training begins."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

from fairseq_rpe import encodings
from fairseq_rpe.attention import check_training, choose_backend
from fairseq_rpe.checkpoints.model_sizes import find_size, full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.decoder import check_encodings
from fairseq_rpe.encodings.model import LayerEncodings, build_for_model, load_weights, match_weights
from fairseq_rpe.encodings.rope_extrapolation import check_trained_rotation
from fairseq_rpe.positions.position_transforms import PositionTransforms, check_transforms
from fairseq_rpe.runs.reserved_flags import flag_values
from fairseq_rpe.runs.settings import TrainingPlan
from fairseq_rpe.runs.training_config import IDENTITY, TrainingConfig
from fairseq_rpe.utils import devices

_LENGTH = "--rpe-train-length"
# in the order of the fields of ModelSize
_SIZES = ("--decoder-layers", "--decoder-embed-dim", "--decoder-attention-heads")
_LAYERS_TO_KEEP = "--decoder-layers-to-keep"
_REPRESENTATIVE_LAYERS = 2  # layers to build: the encodings of all layers have the same parameters


class ModelSize(NamedTuple):
    """Sizes of a model that its encodings depend on: decoder layers, model width and attention heads."""

    layers: int
    width: int
    heads: int


def model_size(config: TrainingConfig) -> ModelSize:
    """Read the size of the model that a configuration trains from its architecture and its flags for fairseq-train.

    Args:
        config: configuration of the training; another package's architecture must be registered by ``rpe_module``.

    Returns:
        Layers, model width and attention heads.
    """
    arch = config.arch or "tiny"
    stated = flag_values(config.extra, (*_SIZES, _LAYERS_TO_KEEP))
    changed = {flag: int(value) for flag, value in stated.items() if value.isdecimal()}
    named = find_size(arch)
    default = ModelSize(*named[:3]) if named is not None else _registered_size(full_arch_name(arch), changed)
    size = ModelSize(*(changed.get(flag, value) for flag, value in zip(_SIZES, default, strict=True)))
    if _LAYERS_TO_KEEP in stated:  # the indices of the layers that fairseq does not remove
        size = size._replace(layers=len(stated[_LAYERS_TO_KEEP].split(",")))
        if is_pattern(config.rpe):
            raise UserError(
                f"{_LAYERS_TO_KEEP} would give the remaining layers other encodings: use one encoding for all layers"
            )
    return size


def _registered_size(arch: str, changed: Mapping[str, int]) -> ModelSize:
    """Return the size of a registered architecture, which may compute one size from another that a flag changed."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = SimpleNamespace(**{flag[2:].replace("-", "_"): value for flag, value in changed.items()})
    ARCH_CONFIG_REGISTRY[arch](args)
    return ModelSize(args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads)


def model_encodings(
    config: TrainingConfig, plan: TrainingPlan, spec: str | None = None, all_layers: bool = False
) -> LayerEncodings:
    """Build the encodings of the model that a configuration trains: of all layers if they differ, else of two layers.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.
        spec: encoding that replaces the configuration's.
        all_layers: build those of all layers in any case.

    Returns:
        The encodings of all layers of a pattern of layers, else of at most two layers.

    Raises:
        UserError: the encoding, its options or its sharing are not valid for this model.
    """
    size = model_size(config)
    length = flag_values(config.extra, [_LENGTH]).get(_LENGTH, "")
    dictionary = config.data / "dict.txt" if config.data is not None else None
    rpe = spec or config.rpe
    return build_for_model(
        rpe,
        size.heads,
        size.width,
        size.layers if all_layers or is_pattern(rpe) else min(size.layers, _REPRESENTATIVE_LAYERS),
        int(length) if length.isdecimal() else plan.settings.tokens,
        read_dictionary(dictionary) if dictionary is not None and dictionary.is_file() else None,
        config.rpe_share or "auto",
        config.head_dim,
    )


def check_model(config: TrainingConfig, plan: TrainingPlan) -> LayerEncodings:
    """Check that a model can be built: its encoding, sharing, position transforms and attention backend.

    Args:
        config: configuration of the training; its ``rpe_module`` is loaded.
        plan: settings and numbers of updates that the configuration resolves to.

    Returns:
        The encodings of the model, as :func:`model_encodings` builds them.

    Raises:
        UserError: the model cannot be built.
    """
    if config.rpe_module is not None:
        encodings.load_module(config.rpe_module)
    built = model_encodings(config, plan)
    _check_combination(config, plan, built, config.positions_eval)
    return built


def check_evaluation(config: TrainingConfig, plan: TrainingPlan, rpe: str | None, positions: str | None) -> None:
    """Check that the finished model of a configuration can be evaluated with another encoding or other positions.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.
        rpe: the encoding of the evaluation, None for that of the training.
        positions: the position transform of the evaluation, None for that of the training.

    Raises:
        UserError: the encoding has other parameters than the trained one, rotates otherwise, or cannot be combined
            with the positions or the attention backend of the model.
    """
    all_layers = is_pattern(config.rpe) or is_pattern(rpe or "")
    built = model_encodings(config, plan, rpe, all_layers)
    _check_combination(config, plan, built, positions or config.positions_eval)
    if rpe is not None:
        trained = model_encodings(config, plan, all_layers=all_layers)
        weights: Sequence[Mapping[str, Tensor]] = [encoding.state_dict() for encoding in trained]
        if all_layers:
            weights = match_weights(weights, trained.index, built.index)
        check_replacement(built, rpe, config.rpe, weights)


def check_replacement(
    built: LayerEncodings, spec: str, trained: str, weights: Iterable[Mapping[str, Tensor]], further: bool = False
) -> None:
    """Check that an encoding can replace the one that a model was trained with.

    Args:
        built: encodings of the model, built from ``spec``; their parameters are overwritten.
        spec: the new encoding.
        trained: the encoding of the training.
        weights: the trained state dict of each encoding.
        further: whether the model is trained further, rather than evaluated as it is.

    Raises:
        UserError: the two have other parameters, or the model was trained with another rotation.
    """
    if not further:
        check_trained_rotation(spec, trained)
    if mismatch := load_weights(built, list(weights)):
        raise UserError(
            f"'{spec}' has other parameters than '{trained}', which the model was trained with ({mismatch}): name an "
            "encoding with the same parameters"
        )


def _check_combination(
    config: TrainingConfig, plan: TrainingPlan, built: LayerEncodings, positions: str | None
) -> None:
    """Check that the encoding fits the position transforms and the attention backend, as the model does."""
    length = built.layer(0).length or plan.settings.tokens
    transforms = PositionTransforms(config.positions_train or IDENTITY, positions or "", length, config.seed, rank=0)
    check_transforms(transforms, built)
    choose_backend(config.attention_backend, built)
    _check_blocks(config, plan, built)
    if config.separate_documents:
        check_separate_documents(built, (config.positions_train, positions))


def _check_blocks(config: TrainingConfig, plan: TrainingPlan, built: LayerEncodings) -> None:
    """Check that the blocks of the model can be built, and that its encodings fit them."""
    size = model_size(config)
    blocks = DecoderConfig(
        vocabulary=1,
        padding_idx=0,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        ffn_width=1,
        kv_heads=config.kv_heads,
        head_width=config.head_dim,
        qk_norm=plan.settings.effective("qk_norm"),
    )
    blocks.check()
    check_encodings(blocks, built)


def check_separate_documents(encodings: LayerEncodings, transforms: Iterable[str | None]) -> None:
    """Check that --separate-documents is possible: the model must treat each document as if it were alone.

    Args:
        encodings: encodings of the model.
        transforms: specs of the position transforms, ``None`` for the identity.

    Raises:
        UserError: an encoding depends on more than positions, or a transform applies to whole rows.
    """
    for encoding, spec in zip(encodings, encodings.specs, strict=True):
        if encoding.length_dependent or encoding.needs_token_ids:
            raise UserError(
                f"--separate-documents: '{spec}' depends on more than positions, and documents share rows: use "
                "--blocks document"
            )
    if transform := next((spec for spec in transforms if spec not in (None, IDENTITY)), None):
        raise UserError(
            f"--separate-documents: '{transform}' transforms the positions of whole rows: use --blocks document"
        )


def check_backend(config: TrainingConfig) -> None:
    """Check that the attention backend of a configuration can train on this machine.

    Args:
        config: configuration of the training.

    Raises:
        UserError: the backend does not exist, or has no backward pass on the device of the training.
    """
    name = config.attention_backend
    choose_backend(name)
    if name in ("flex", "triton"):  # the other backends train on every device
        is_on_cpu = config.device == "cpu" or not devices.gpu_names()
        check_training(name, "cpu" if is_on_cpu else "cuda")

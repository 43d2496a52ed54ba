"""Checks that a model can be built, and a checkpoint loaded into it, before a training begins."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

from fairseq_rpe import encodings
from fairseq_rpe.attention import check_training, choose_backend
from fairseq_rpe.checkpoints.model_sizes import find_size, full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import build_for_model, load_weights
from fairseq_rpe.encodings.rope_extrapolation import check_trained_rotation, is_region_rope
from fairseq_rpe.positions.position_transforms import PositionTransforms, check_transforms
from fairseq_rpe.runs.reserved_flags import flag_values
from fairseq_rpe.runs.settings import TrainingPlan
from fairseq_rpe.runs.training_config import IDENTITY, TrainingConfig
from fairseq_rpe.utils import devices

_LENGTH = "--rpe-train-length"
# in the order of the fields of ModelSize
_SIZES = ("--decoder-layers", "--decoder-embed-dim", "--decoder-attention-heads")
_LAYERS_TO_KEEP = "--decoder-layers-to-keep"
REPRESENTATIVE_LAYERS = 2  # layers to build: the encodings of all layers have the same parameters


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
    return size


def _registered_size(arch: str, changed: Mapping[str, int]) -> ModelSize:
    """Return the size of a registered architecture, which may compute one size from another that a flag changed."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = SimpleNamespace(**{flag[2:].replace("-", "_"): value for flag, value in changed.items()})
    ARCH_CONFIG_REGISTRY[arch](args)
    return ModelSize(args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads)


def model_encodings(config: TrainingConfig, plan: TrainingPlan, spec: str | None = None) -> list[Encoding]:
    """Build the encodings of the first two layers of the model that a configuration trains.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.
        spec: encoding that replaces the configuration's.

    Returns:
        One encoding if the layers share it, else one for each of at most two layers.

    Raises:
        UserError: the encoding, its options or its sharing are not valid for this model.
    """
    size = model_size(config)
    length = flag_values(config.extra, [_LENGTH]).get(_LENGTH, "")
    dictionary = config.data / "dict.txt" if config.data is not None else None
    return build_for_model(
        spec or config.rpe,
        size.heads,
        size.width,
        min(size.layers, REPRESENTATIVE_LAYERS),
        int(length) if length.isdecimal() else plan.settings.tokens,
        read_dictionary(dictionary) if dictionary is not None and dictionary.is_file() else None,
        config.rpe_share or "auto",
    )


def check_model(config: TrainingConfig, plan: TrainingPlan) -> list[Encoding]:
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
    _check_combination(config, plan, config.rpe, built, config.positions_eval)
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
    built = model_encodings(config, plan, rpe)
    _check_combination(config, plan, rpe or config.rpe, built, positions or config.positions_eval)
    if rpe is not None:
        check_replacement(built, rpe, config.rpe, [layer.state_dict() for layer in model_encodings(config, plan)])


def check_replacement(
    built: list[Encoding], spec: str, trained: str, weights: Iterable[Mapping[str, Tensor]], further: bool = False
) -> None:
    """Check that an encoding can replace the one that a model was trained with.

    Args:
        built: encodings of the model, built from ``spec``; their parameters are overwritten.
        spec: the new encoding.
        trained: the encoding of the training.
        weights: the state dict of each trained encoding.
        further: whether the model is trained further, rather than evaluated as it is.

    Raises:
        UserError: the two have other parameters, or the model was trained with another rotation.
    """
    if not further and is_region_rope(spec):
        check_trained_rotation(spec, trained)
    if mismatch := load_weights(built, list(weights)):
        raise UserError(
            f"'{spec}' has other parameters than '{trained}', which the model was trained with ({mismatch}): name an "
            "encoding with the same parameters"
        )


def _check_combination(
    config: TrainingConfig, plan: TrainingPlan, spec: str, built: list[Encoding], positions: str | None
) -> None:
    """Check that the encoding fits the position transforms and the attention backend, as the model does."""
    length = built[0].length or plan.settings.tokens
    transforms = PositionTransforms(config.positions_train or IDENTITY, positions or "", length, config.seed, rank=0)
    check_transforms(transforms, built[0], spec)
    choose_backend(config.attention_backend, built)
    if config.separate_documents:
        check_separate_documents(built[0], spec, (config.positions_train, positions))


def check_separate_documents(encoding: Encoding, rpe: str, transforms: Iterable[str | None]) -> None:
    """Check that --separate-documents is possible: the model must treat each document as if it were alone.

    Args:
        encoding: encoding of the model.
        rpe: spec of the encoding.
        transforms: specs of the position transforms, ``None`` for the identity.

    Raises:
        UserError: the encoding depends on more than positions, or a transform applies to whole rows.
    """
    if encoding.length_dependent or encoding.needs_token_ids:
        raise UserError(
            f"--separate-documents: '{rpe}' depends on more than positions, and documents share rows: use --blocks "
            "document"
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

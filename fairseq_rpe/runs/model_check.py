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
from fairseq_rpe.runs.settings import IDENTITY, TrainingPlan, TrainingRequest
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


def model_size(request: TrainingRequest) -> ModelSize:
    """Read the size of the model that a request trains from its architecture and its flags for fairseq-train.

    Args:
        request: options of the training; another package's architecture must be registered by ``rpe_module``.

    Returns:
        Layers, model width and attention heads.
    """
    arch = request.arch or "tiny"
    stated = flag_values(request.extra, (*_SIZES, _LAYERS_TO_KEEP))
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


def model_encodings(request: TrainingRequest, plan: TrainingPlan, spec: str | None = None) -> list[Encoding]:
    """Build the encodings of the first two layers of the model that a request trains.

    Args:
        request: options of the training.
        plan: settings and numbers of updates that the request resolves to.
        spec: encoding that replaces the request's.

    Returns:
        One encoding if the layers share it, else one for each of at most two layers.

    Raises:
        UserError: the encoding, its options or its sharing are not valid for this model.
    """
    size = model_size(request)
    length = flag_values(request.extra, [_LENGTH]).get(_LENGTH, "")
    dictionary = request.data / "dict.txt" if request.data is not None else None
    return build_for_model(
        spec or request.rpe,
        size.heads,
        size.width,
        min(size.layers, REPRESENTATIVE_LAYERS),
        int(length) if length.isdecimal() else plan.settings.tokens,
        read_dictionary(dictionary) if dictionary is not None and dictionary.is_file() else None,
        request.rpe_share or "auto",
    )


def check_model(request: TrainingRequest, plan: TrainingPlan) -> list[Encoding]:
    """Check that the model of a request can be built: encoding, sharing, position transforms and attention backend.

    Args:
        request: options of the training; its ``rpe_module`` is loaded.
        plan: settings and numbers of updates that the request resolves to.

    Returns:
        The encodings of the model, as :func:`model_encodings` builds them.

    Raises:
        UserError: the model cannot be built.
    """
    if request.rpe_module is not None:
        encodings.load_module(request.rpe_module)
    built = model_encodings(request, plan)
    _check_combination(request, plan, request.rpe, built, request.positions_eval)
    return built


def check_evaluation(request: TrainingRequest, plan: TrainingPlan, rpe: str | None, positions: str | None) -> None:
    """Check that the finished model of a request can be evaluated with another encoding or other positions.

    Args:
        request: options of the training.
        plan: settings and numbers of updates that the request resolves to.
        rpe: the encoding of the evaluation, None for that of the training.
        positions: the position transform of the evaluation, None for that of the training.

    Raises:
        UserError: the encoding has other parameters than the trained one, rotates otherwise, or cannot be combined
            with the positions or the attention backend of the model.
    """
    built = model_encodings(request, plan, rpe)
    _check_combination(request, plan, rpe or request.rpe, built, positions or request.positions_eval)
    if rpe is not None:
        check_replacement(built, rpe, request.rpe, [layer.state_dict() for layer in model_encodings(request, plan)])


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
    request: TrainingRequest, plan: TrainingPlan, spec: str, built: list[Encoding], positions: str | None
) -> None:
    """Check that the encoding fits the position transforms and the attention backend, as the model does."""
    length = built[0].length or plan.settings.tokens
    transforms = PositionTransforms(request.positions_train or IDENTITY, positions or "", length, request.seed, rank=0)
    check_transforms(transforms, built[0], spec)
    choose_backend(request.attention_backend, built)
    if request.separate_documents:
        check_separate_documents(built[0], spec, (request.positions_train, positions))


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


def check_backend(request: TrainingRequest) -> None:
    """Check that the attention backend of a request can train on this machine.

    Args:
        request: options of the training.

    Raises:
        UserError: the backend does not exist, or has no backward pass on the device of the training.
    """
    name = request.attention_backend
    choose_backend(name)
    if name in ("flex", "triton"):  # the other backends train on every device
        is_on_cpu = request.device == "cpu" or not devices.gpu_names()
        check_training(name, "cpu" if is_on_cpu else "cuda")

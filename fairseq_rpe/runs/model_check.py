"""What fails when a model is built or a checkpoint is loaded into it, checked before a training begins."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

from fairseq_rpe import encodings
from fairseq_rpe.attention import check_training, choose
from fairseq_rpe.checkpoints.model_sizes import full_name, size_of
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import build_for_model, load_weights
from fairseq_rpe.encodings.rope_extrapolation import check_trained, reads_longer
from fairseq_rpe.positions.position_transforms import Moves, check_moves
from fairseq_rpe.runs.reserved_flags import flag_values
from fairseq_rpe.runs.settings import IDENTITY, Plan, Request
from fairseq_rpe.utils import devices

_LENGTH = "--rpe-train-length"
_SIZES = ("--decoder-layers", "--decoder-embed-dim", "--decoder-attention-heads")
_KEPT = "--decoder-layers-to-keep"
STANDING_LAYERS = 2  # layers that stand for all of them: their encodings have the same parameters


class ModelSize(NamedTuple):
    """The sizes of a model that its encodings depend on."""

    layers: int
    width: int
    heads: int


def model_size(request: Request) -> ModelSize:
    """Read the size of the model that a request trains from its architecture and its flags for fairseq-train.

    Args:
        request: of the training. An architecture that is not of this package is one that ``rpe_module`` registers.

    Returns:
        Layers, model width and attention heads.
    """
    arch = request.arch or "tiny"
    stated = flag_values(request.extra, (*_SIZES, _KEPT))
    changed = {flag: int(value) for flag, value in stated.items() if value.isdecimal()}
    named = size_of(arch)
    usual = ModelSize(*named[:3]) if named is not None else _registered_size(full_name(arch), changed)
    layers, width, heads = (changed.get(flag, size) for flag, size in zip(_SIZES, usual, strict=True))
    return ModelSize(len(stated[_KEPT].split(",")) if _KEPT in stated else layers, width, heads)


def _registered_size(arch: str, changed: Mapping[str, int]) -> ModelSize:
    """The size of an architecture of the user's own, which may compute one size from another."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = SimpleNamespace(**{flag[2:].replace("-", "_"): value for flag, value in changed.items()})
    ARCH_CONFIG_REGISTRY[arch](args)
    return ModelSize(args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads)


def model_encodings(request: Request, plan: Plan, spec: str | None = None) -> list[Encoding]:
    """Build the encodings of the model that a request trains; two layers stand for all.

    Args:
        request: of the training.
        plan: what the request resolves to.
        spec: an encoding in place of the request's.

    Returns:
        One encoding if the layers share it, else one for each of at most two layers.

    Raises:
        UserError: the encoding, its options or its sharing are not valid for this model.
    """
    size = model_size(request)
    length = flag_values(request.extra, [_LENGTH]).get(_LENGTH, "")
    there = request.data is not None and (request.data / "dict.txt").is_file()
    return build_for_model(
        spec or request.rpe,
        size.heads,
        size.width,
        min(size.layers, STANDING_LAYERS),
        int(length) if length.isdecimal() else plan.settings.tokens,
        read_dictionary(request.data / "dict.txt") if request.data is not None and there else None,
        request.rpe_share or "auto",
    )


def check_model(request: Request, plan: Plan) -> list[Encoding]:
    """Check that the model of a request can be built: encoding, sharing, position transforms and attention backend.

    Args:
        request: of the training; its ``rpe_module`` is loaded.
        plan: what the request resolves to.

    Returns:
        The encodings of the model, as :func:`model_encodings` builds them.

    Raises:
        UserError: the model cannot be built.
    """
    if request.rpe_module is not None:
        encodings.load_module(request.rpe_module)
    made = model_encodings(request, plan)
    _check_parts(request, plan, request.rpe, made, request.positions_eval)
    return made


def check_evaluation(request: Request, plan: Plan, rpe: str | None, positions: str | None) -> None:
    """Check that the finished model of a request can be evaluated with another encoding or other positions.

    Args:
        request: of the training.
        plan: what the request resolves to.
        rpe: the encoding of the evaluation, None for that of the training.
        positions: the position transform of the evaluation, None for that of the training.

    Raises:
        UserError: the encoding has other parameters than the trained one, rotates otherwise, or cannot be combined
            with the positions or the attention backend of the model.
    """
    made = model_encodings(request, plan, rpe)
    _check_parts(request, plan, rpe or request.rpe, made, positions or request.positions_eval)
    if rpe is not None:
        check_replacement(made, rpe, request.rpe, [one.state_dict() for one in model_encodings(request, plan)])


def check_replacement(
    made: list[Encoding], spec: str, trained: str, weights: Iterable[Mapping[str, Tensor]], further: bool = False
) -> None:
    """Check that an encoding can take the place of the one that a model was trained with.

    Args:
        made: encodings of the model, built from ``spec``; their parameters are overwritten.
        spec: the encoding that takes the place.
        trained: the encoding of the training.
        weights: the state dict of each trained encoding.
        further: whether the model is trained further, rather than evaluated as it is.

    Raises:
        UserError: the two have other parameters, or the model was trained with another rotation.
    """
    if not further and reads_longer(spec):
        check_trained(spec, trained)
    if wrong := load_weights(made, list(weights)):
        raise UserError(
            f"'{spec}' has other parameters than '{trained}', which the model was trained with ({wrong}): name an "
            "encoding with the same parameters"
        )


def _check_parts(request: Request, plan: Plan, spec: str, made: list[Encoding], positions: str | None) -> None:
    """Check what the model checks of its encodings when it is built."""
    length = made[0].length or plan.settings.tokens
    moves = Moves(request.positions_train or IDENTITY, positions or "", length, request.seed, rank=0)
    check_moves(moves, made[0], spec)
    choose(request.attention_backend, made)
    if request.separate_documents:
        check_separate_documents(made[0], spec, (request.positions_train, positions))


def check_separate_documents(encoding: Encoding, rpe: str, transforms: Iterable[str | None]) -> None:
    """Refuse --separate-documents for a model that does not treat each document as if it were alone.

    Args:
        encoding: of the model.
        rpe: its spec.
        transforms: specs of the position transforms, ``None`` where none is named.

    Raises:
        UserError: the encoding reads more of a row than positions, or a transform moves whole rows.
    """
    if encoding.length_dependent or encoding.needs_token_ids:
        raise UserError(
            f"--separate-documents: '{rpe}' reads more of a row than positions, and documents share rows: use --blocks "
            "document"
        )
    if moved := next((spec for spec in transforms if spec not in (None, IDENTITY)), None):
        raise UserError(f"--separate-documents: '{moved}' moves the positions of whole rows: use --blocks document")


def check_backend(request: Request) -> None:
    """Check that the attention backend of a request can train on this machine.

    Args:
        request: of the training.

    Raises:
        UserError: the backend does not exist, or has no backward pass on the device of the training.
    """
    name = request.attention_backend
    choose(name)
    if name in ("flex", "triton"):  # the others train anywhere
        check_training(name, "cpu" if request.device == "cpu" or not devices.gpus() else "cuda")

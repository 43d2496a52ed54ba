"""Builds the encodings of a model, one shared by all layers or one per layer, and loads trained weights into them."""

import textwrap
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fairseq_rpe.checkpoints.checkpoint import dtype_mismatch
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import Encoding

_MAX_MESSAGE = 120  # characters of torch's message, which lists every name


def build_for_model(
    spec: str,
    heads: int,
    width: int,
    layers: int,
    length: int | None = None,
    symbols: Sequence[str] | None = None,
    share: str = "auto",
) -> list[Encoding]:
    """Build the encodings of a model.

    Args:
        spec: name or name:key=value,key=value.
        heads: attention heads H.
        width: model width C.
        layers: decoder layers.
        length: training length in tokens, or None if unknown.
        symbols: the dictionary's symbols by id, or None if unknown.
        share: "model" for one encoding that all layers share, "layer" for one per layer, "auto" for the default of
            the encoding.

    Returns:
        One encoding, or ``layers`` of them, whose shared parameters are tied.

    Raises:
        UserError: the spec or the size of the model is not valid, or the encoding cannot be shared in this way.
    """
    first = build(spec, heads, width, length, symbols)
    share = first.sharing_modes[0] if share == "auto" else share
    if share not in first.sharing_modes:
        raise UserError(f"--rpe-share {share}: '{spec}' can only be shared by: {', '.join(first.sharing_modes)}")
    others = [build(spec, heads, width, length, symbols) for _ in range(layers - 1)] if share == "layer" else []
    for other in others:
        other.tie(first)
    return [first, *others]


def load_weights(encodings: Sequence[Encoding], weights: Sequence[Mapping[str, Tensor]]) -> str | None:
    """Load trained weights into the encodings of a model, as loading a checkpoint does.

    Args:
        encodings: encodings of the model; their parameters are overwritten.
        weights: the state dict of each trained encoding, as ``Checkpoint.encoding_weights`` holds them.

    Returns:
        None if all weights fit. Otherwise the first difference as torch reports it: names that are missing or
        unexpected, or other shapes.
    """
    model = nn.ModuleList(encodings)
    state = {f"{index}.{name}": value for index, values in enumerate(weights) for name, value in values.items()}
    if mismatch := dtype_mismatch(model.state_dict(), state):
        return mismatch
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = (str(error).split("\n\t")[1:2] or [str(error)])[0]
        return textwrap.shorten(first, _MAX_MESSAGE, placeholder=" …").rstrip(". ")
    return None

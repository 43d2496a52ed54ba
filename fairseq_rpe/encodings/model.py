"""Builds the encodings of a model's layers, and loads trained weights into them."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

from torch import Tensor, nn

from fairseq_rpe.checkpoints.checkpoint import dtype_mismatch
from fairseq_rpe.core.attention_options import attention_options
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import LayerGroup, format_layers, is_pattern, parse_pattern
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import Encoding, registry

_MAX_MESSAGE = 120  # characters of torch's message, which lists every name


class LayerEncodings(nn.ModuleList):
    """The encodings of a model: the distinct instances, in the order of the first layer that uses each.

    Args:
        encodings: The instances.
        index: Instance of each layer; None: instance i for layer i.
        specs: Spec of each instance; None: the texts are unknown and empty.

    Attributes:
        index: Instance of each layer.
        specs: Spec of each instance.
    """

    def __init__(
        self, encodings: Iterable[Encoding], index: Sequence[int] | None = None, specs: Sequence[str] | None = None
    ) -> None:
        super().__init__(encodings)
        self.index = tuple(range(len(self)) if index is None else index)
        self.specs = tuple([""] * len(self) if specs is None else specs)

    @classmethod
    def from_groups(cls, encodings: Iterable[Encoding], instances: Sequence[LayerGroup]) -> Self:
        """Return the encodings of a model from its instances and their specs and layers (``instance_groups``)."""
        return cls(encodings, index_of_layers(instances), [group.spec for group in instances])

    def __iter__(self) -> Iterator[Encoding]:
        encodings: Iterator[Any] = super().__iter__()
        return encodings

    def layer(self, layer: int) -> Encoding:
        """Return the encoding of a layer, counted from 0."""
        return cast(Encoding, self[self.index[layer]])

    def layers(self, instance: int) -> tuple[int, ...]:
        """Return the layers that use an instance."""
        return tuple(layer for layer, other in enumerate(self.index) if other == instance)

    @property
    def layer_specs(self) -> tuple[str, ...]:
        """The spec of each layer."""
        return tuple(self.specs[instance] for instance in self.index)

    @property
    def is_mixed(self) -> bool:
        """Whether the layers have encodings of different specs."""
        return len(set(self.specs)) > 1


def layer_groups(spec: str, layers: int) -> tuple[LayerGroup, ...]:
    """Return the distinct encodings of a model with their layers.

    Args:
        spec: Spec of one encoding, or a pattern of layers; the specs of a pattern are made canonical.
        layers: Number of layers.

    Raises:
        UserError: The spec is not valid, or a part of the pattern is never used.
    """
    pattern = parse_pattern(spec)
    return (pattern.map(registry.normalise) if is_pattern(spec) else pattern).groups(layers)


def sharing_modes(spec: str) -> tuple[str, ...]:
    """Return the ways to share parameters that an encoding, or any encoding of a pattern of layers, allows.

    Raises:
        UserError: The spec is not valid.
    """
    return tuple(dict.fromkeys(mode for name in parse_pattern(spec).specs for mode in _sharing_of_encoding(name)))


def _sharing_of_encoding(spec: str) -> tuple[str, ...]:
    """Return the ways to share an encoding; learned attention options belong to one layer unless stated otherwise."""
    cls, _, config = registry.resolve(spec)
    return ("layer", "model") if attention_options(config).is_learned else cls.allowed_sharing(config)


def _shares_parameters(spec: str, share: str) -> bool:
    """Return whether the instances of an encoding differ in its learned attention options alone."""
    cls, _, config = registry.resolve(spec)
    modes = cls.allowed_sharing(config)
    return attention_options(config).is_learned and (modes[0] if share not in modes else share) == "model"


def build_distinct(
    spec: str, heads: int, width: int, length: int | None = None, symbols: Sequence[str] | None = None
) -> dict[str, Encoding]:
    """Build each distinct encoding of a pattern of layers once, by its spec; arguments as of ``build``.

    Raises:
        UserError: The spec or one of the sizes is not valid.
    """
    return {name: build(name, heads, width, length, symbols) for name in parse_pattern(spec).specs}


def build_stack(spec: str, layers: int, heads: int, width: int, length: int | None = None) -> LayerEncodings:
    """Build the encodings of an untrained model; layers with the same spec share an instance, whatever its default is.

    Args:
        spec: Spec of one encoding, or a pattern of layers.
        layers: Number of layers.
        heads: Attention heads H.
        width: Model width C.
        length: Training length in tokens, or None if unknown.

    Raises:
        UserError: The spec or one of the sizes is not valid, or a part of the pattern is never used.
    """
    groups = layer_groups(spec, layers)
    return LayerEncodings.from_groups([build(group.spec, heads, width, length) for group in groups], groups)


def instance_groups(spec: str, layers: int, share: str = "auto") -> tuple[LayerGroup, ...]:
    """Return the specs and layers of the instances of a model, in the order of their first layers.

    Layers with the same spec share an instance if ``share`` or the default of their encoding is "model".

    Args:
        spec: Spec of one encoding, or a pattern of layers.
        layers: Number of layers.
        share: "model", "layer" or "auto" as in :func:`build_for_model`.

    Raises:
        UserError: The spec is not valid, a part of the pattern is never used, or no encoding can be shared in this way.
    """
    groups = layer_groups(spec, layers)
    possible = sharing_modes(spec)
    if share != "auto" and share not in possible:
        raise UserError(f"--rpe-share {share}: '{spec}' can only be shared by: {', '.join(possible)}")
    instances = []
    for group in groups:
        allowed = sharing_modes(group.spec)
        if (share if share in allowed else allowed[0]) == "model":
            instances.append(group)
        else:
            instances += [LayerGroup(group.spec, (layer,)) for layer in group.layers]
    return tuple(sorted(instances, key=lambda instance: instance.layers))


def index_of_layers(instances: Sequence[LayerGroup]) -> tuple[int, ...]:
    """Return the instance of each layer."""
    index = {layer: number for number, instance in enumerate(instances) for layer in instance.layers}
    return tuple(index[layer] for layer in range(len(index)))


def build_for_model(
    spec: str,
    heads: int,
    width: int,
    layers: int,
    length: int | None = None,
    symbols: Sequence[str] | None = None,
    share: str = "auto",
    head_width: int | None = None,
) -> LayerEncodings:
    """Build the encodings of a model.

    Args:
        spec: name or name:key=value,key=value, or a pattern of layers such as ``3*rope|nope``.
        heads: attention heads H.
        width: model width C.
        layers: decoder layers.
        length: training length in tokens, or None if unknown.
        symbols: the dictionary's symbols by id, or None if unknown.
        share: "model" for one encoding that all layers of the same spec share, "layer" for one per layer, "auto" for
            the default of each encoding. In a pattern, an encoding that cannot be shared in this way has its default.
            Learned attention options, such as ``query_scale=ssmax``, belong to one layer unless ``share`` is "model".
        head_width: width D of an attention head, or None for C/H.

    Returns:
        The encodings; those of the same spec share their tied parameters.

    Raises:
        UserError: the spec or the size of the model is not valid, an encoding cannot be shared in this way, or a
            pattern has an encoding that acts at the input of the model.
    """
    instances = instance_groups(spec, layers, share)
    first: dict[str, Encoding] = {}  # by spec
    encodings = []
    for instance in instances:
        encoding = build(instance.spec, heads, width, length, symbols, head_width)
        if instance.spec in first:
            encoding.tie(first[instance.spec])
            if _shares_parameters(instance.spec, share):
                encoding.share_parameters(first[instance.spec])
        first.setdefault(instance.spec, encoding)
        encodings.append(encoding)
    if len(first) > 1:
        _refuse_embedding(spec, first)
    return LayerEncodings.from_groups(encodings, instances)


def _refuse_embedding(spec: str, encodings: Mapping[str, Encoding]) -> None:
    """Refuse an encoding of a pattern that acts at the input of the model, which all layers share."""
    for layer_spec, encoding in encodings.items():
        if encoding.embeds:
            raise UserError(
                f"'{spec}': '{layer_spec}' acts at the input of the model, which all layers share, so it cannot be the "
                "encoding of some layers: use it for all layers, or leave it out"
            )


def match_weights(
    weights: Sequence[Mapping[str, Tensor]], trained: Sequence[int], index: Sequence[int]
) -> list[Mapping[str, Tensor]]:
    """Return the weights of each instance of a model that has other encodings than the one it was trained as.

    Args:
        weights: state dict of each trained instance; the last ones may be missing if they are empty.
        trained: trained instance of each layer.
        index: new instance of each layer.

    Returns:
        State dicts of the new instances: those of the trained instances in the same layers.

    Raises:
        UserError: a new instance is shared by layers that have weights of their own.
    """
    matched = []
    for instance in range(max(index) + 1):
        layers = [layer for layer, other in enumerate(index) if other == instance]
        sources = list(dict.fromkeys(trained[layer] for layer in layers))
        values = [weights[source] if source < len(weights) else {} for source in sources]
        if len(values) > 1 and any(values):
            raise UserError(
                f"layers {format_layers(layers)} would share an encoding, and they were trained with encodings that "
                "have different parameters: name encodings with the same parameters for the same layers"
            )
        matched.append(values[0])
    return matched


def load_weights(encodings: Iterable[Encoding], weights: Sequence[Mapping[str, Tensor]]) -> str | None:
    """Load trained weights into the encodings of a model, as loading a checkpoint does.

    Args:
        encodings: encodings of the model; their parameters are overwritten.
        weights: the state dict of each trained encoding, as ``Checkpoint.encoding_weights`` holds them.

    Returns:
        None if all weights fit. Otherwise the first difference as torch reports it: names that are missing or
        unexpected, or other shapes.
    """
    model = encodings if isinstance(encodings, nn.ModuleList) else nn.ModuleList(encodings)
    state = {f"{index}.{name}": value for index, values in enumerate(weights) for name, value in values.items()}
    if mismatch := dtype_mismatch(model.state_dict(), state):
        return mismatch
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = (str(error).split("\n\t")[1:2] or [str(error)])[0]
        return textwrap.shorten(first, _MAX_MESSAGE, placeholder=" …").rstrip(". ")
    return None

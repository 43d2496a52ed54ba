"""Use any encoding of this package in models of Hugging Face transformers."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq_rpe.adapters.attention_interface import (
    MODEL_TYPES,
    NAME,
    EncodingAdapter,
    IdentityRotation,
    check_model_type,
    first_layer_pre_hook,
    model_pre_hook,
)

# isort: split

import torch
from torch import nn
from transformers import PreTrainedModel

from fairseq_rpe.adapters.scoring import evaluate
from fairseq_rpe.attention import choose_backend
from fairseq_rpe.core.arguments import describe_value
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import canonical, parse
from fairseq_rpe.encodings import Encoding, build, names, normalise
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.model_rotation import ModelRotation, complete_spec
from fairseq_rpe.encodings.rope import Rope, effective_options
from fairseq_rpe.positions.position_transforms import PositionTransforms

__all__ = ["MODEL_TYPES", "evaluate", "restore", "use_encoding"]

SHARING_OPTIONS = ("auto", "model", "layer")


def use_encoding(
    model: PreTrainedModel,
    encoding: Encoding | str,
    *,
    length: int | None = None,
    share: str = "auto",
    positions: str = "",
    positions_train: str = "identity",
    seed: int = 1,
    backend: str = "auto",
) -> PreTrainedModel:
    """Replace the rotation of a model by ``encoding``, in place.

    Attention is softmax(s·q·kᵀ + bias) v as in :func:`fairseq_rpe.attend`, with rotated q and k if the encoding rotates
    them; s is the model's factor, mostly 1/sqrt(D) for heads of width D. A rotary encoding takes the options that its
    spec leaves open from the model: ``base`` is the model's rope_theta, ``rotary_fraction`` the fraction of a head that
    the model rotates, pairs are (s, s + d/2), and YaRN scales the rotated elements, as in transformers. Scaling is
    never taken from the config.

    Args:
        model: of a type in ``MODEL_TYPES``, with or without a head, on one device.
        encoding: a spec such as ``"rope:scaling=yarn,factor=4"``, or an encoding, which all layers share.
        length: training length in tokens, for encodings that use it; None: original_max_position_embeddings of the
            config's rope_parameters, or its max_position_embeddings.
        share: one encoding per ``model`` or per ``layer``, or ``auto``: as in the encoding's paper.
        positions: position transform in evaluation, as ``--positions-eval``.
        positions_train: position transform in training, as ``--positions-train``.
        seed: seed of random positions: a new sample for every forward pass in training; in evaluation one per row that
            depends on its ids.
        backend: as in ``attend``.

    Returns:
        The same model. The encoding is its submodule ``model.base_model.fairseq_rpe``.

    Raises:
        UserError: the model, config or encoding is not supported; in a forward pass, an unsupported feature (sliding
            windows, packed texts, attention weights, caches of fixed size).
    """
    if not isinstance(encoding, Encoding | str):
        raise UserError(f"encoding is a spec such as 'rope' or what build(...) returns, not {describe_value(encoding)}")
    base, layers = _base_and_layers(model)
    _check_config(base.config)
    shape = _ModelShape.from_config(base.config, len(layers))
    if length is None:
        rotation = base.config.rope_parameters or {}
        length = rotation.get("original_max_position_embeddings", base.config.max_position_embeddings)
    if isinstance(encoding, str):
        spec = _complete_spec(encoding, _model_rotation(base, shape.head_width))
        encodings = _build_encodings(spec, share, shape, length)
    else:
        if share not in ("auto", "model"):
            raise UserError(f"share='{share}' with an encoding that is made already: give its spec, or leave share out")
        spec, encodings = _spec_from_encoding(encoding), [encoding]
    _check_shape(encodings[0], shape)
    _check_inputs(encodings[0], spec)
    attention_backend = choose_backend(backend, encodings)
    transforms = PositionTransforms(positions_train, positions, length, seed, _data_parallel_rank())
    _check_transforms(transforms, encodings[0], spec)
    evaluation = None if transforms.active(False) is None else positions or transforms.train.evaluation
    adapter = EncodingAdapter(encodings, spec, transforms, evaluation, attention_backend).to(_device(model))
    if isinstance(getattr(base, NAME, None), EncodingAdapter):
        restore(model)
    _install(model, base, layers, adapter)
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`use_encoding`: remove the encoding and restore the model's rotation and attention.

    Raises:
        UserError: the model has no encoding of this package.
    """
    base, layers = _base_and_layers(model)
    adapter = getattr(base, NAME, None)
    if not isinstance(adapter, EncodingAdapter):
        raise UserError("this model has no encoding of ours: there is nothing to restore")
    rotation, attention, hooks = adapter.undo
    for hook in hooks:
        hook.remove()
    for module in (layers[0], *_attention_modules(layers)):
        delattr(module, NAME)
    delattr(base, NAME)
    base.rotary_emb = rotation
    model.set_attn_implementation(attention)
    return model


@dataclass(frozen=True)
class _ModelShape:
    """Sizes of a model.

    Attributes:
        heads: number of attention heads H.
        head_width: width D of a head.
        width: model width C, which need not be H·D.
        layers: number of layers.
    """

    heads: int
    head_width: int
    width: int
    layers: int

    @classmethod
    def from_config(cls, config: Any, layers: int) -> "_ModelShape":
        heads = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(heads, head_width, config.hidden_size, layers)


def _data_parallel_rank() -> int:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_distributed else 0


def _base_and_layers(model: PreTrainedModel) -> tuple[Any, nn.ModuleList]:
    """Return the model without its head, and its layers; raise UserError if its structure is unknown."""
    kind, base = check_model_type(model), model.base_model
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(list(_attention_modules(layers))) != len(layers):
        raise UserError(f"this version of transformers builds '{kind}' in another way than was checked: use 5.23")
    if not isinstance(getattr(base, "rotary_emb", None), nn.Module):
        raise UserError(f"'{kind}' has no rotation where this version of transformers is known to have it: use 5.23")
    return base, layers


def _attention_modules(layers: nn.ModuleList) -> Iterator[nn.Module]:
    for layer in layers:
        yield from (m for m in layer.modules() if hasattr(m, "scaling") and hasattr(m, "layer_idx"))


def _check_config(config: Any) -> None:
    """Refuse a model with attention windows, attention to the future, or attention weights as outputs."""
    if {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
        raise UserError("layers of this model see a window of the text: set layer_types to 'full_attention' each")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"this model sees a window of {config.sliding_window} tokens: set sliding_window=None in its config"
        )
    if not getattr(config, "is_causal", True):
        raise UserError("this model sees the future, and encodings here are causal: set is_causal=True in its config")
    if config.output_attentions:
        raise UserError("attention weights are never built: set output_attentions=False in the model's config")


def _device(model: PreTrainedModel) -> torch.device:
    """Return the only device of the model's parameters."""
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type == "meta":
        shown = ", ".join(sorted(map(str, devices)))
        raise UserError(f"the model lies on {shown}: put all of it on one device first")
    return devices.pop()


def _model_rotation(base: Any, head: int) -> ModelRotation:
    """Return the model's own rotation, for heads of ``head`` elements.

    The rotated width is read from the model's frequencies, because some models ignore ``partial_rotary_factor``.
    """
    adapter = getattr(base, NAME, None)
    rotation = adapter.undo[0] if isinstance(adapter, EncodingAdapter) else base.rotary_emb
    frequencies = getattr(rotation, "inv_freq", None)
    if frequencies is None:
        raise UserError(f"{type(rotation).__name__} has no inv_freq, which transformers 5.23 has: use that version")
    rotated, config = 2 * len(frequencies), base.config.rope_parameters or {}
    # int(head · fraction) must be the rotated width; the quotient itself may round down to less
    candidates = (config.get("partial_rotary_factor"), rotated / head, math.nextafter(rotated / head, 1.0))
    fraction = next(x for x in candidates if x and int(head * x) == rotated)
    values = {"base": config.get("rope_theta"), "rotary_fraction": fraction, "interleaved": False}
    kind = config.get("rope_type", "default")
    return ModelRotation(values, "" if kind == "default" else kind)


def _complete_spec(spec: str, rotation: ModelRotation) -> str:
    """Complete the options that a spec leaves open from the model's rotation."""
    full = complete_spec(spec, rotation, strict=False)
    stated, config = parse(full)[1], registry.resolve(full)[2]
    has_temperature = isinstance(config, Rope.Config) and "temperature_on" in effective_options(config)
    is_open = has_temperature and "temperature_on" not in stated
    if is_open and rotation.values["rotary_fraction"] != 1:
        full += ",temperature_on=rotated"  # as transformers scales partial rotations
    return normalise(full)


def _build_encodings(spec: str, share: str, shape: _ModelShape, length: int | None) -> list[Encoding]:
    """Build one encoding for the model, or one per layer."""
    if share not in SHARING_OPTIONS:
        raise UserError(f"share is one of {', '.join(SHARING_OPTIONS)}, not '{share}'")
    attention_width = shape.heads * shape.head_width
    make = partial(build, spec, shape.heads, attention_width, length)
    first = make()
    if first.embeds and shape.width != attention_width:  # it acts on embeddings, which have the model's width
        make = partial(build, spec, shape.heads, shape.width, length)
        first = make()
    share = first.sharing_modes[0] if share == "auto" else share
    if share not in first.sharing_modes:
        raise UserError(f"share='{share}': '{spec}' can only be shared by: {', '.join(first.sharing_modes)}")
    if share == "model":
        return [first]
    others = [make() for _ in range(shape.layers - 1)]
    for other in others:
        other.tie(first)
    return [first, *others]


def _spec_from_encoding(encoding: Encoding) -> str:
    """Return the spec of an encoding, whose name is that of its class if it is not registered."""
    cls = type(encoding)
    return canonical(next((n for n in names() if registry.resolve(n)[0] is cls), cls.__name__), encoding.config)


def _check_shape(encoding: Encoding, shape: _ModelShape) -> None:
    """Refuse an encoding that was built for another number of heads or another width."""
    expected = shape.width if encoding.embeds else shape.heads * shape.head_width
    depends_on_width = encoding.embeds or encoding.rotates or encoding.is_content_dependent
    if encoding.heads != shape.heads or (depends_on_width and encoding.width != expected):
        raise UserError(
            f"the encoding is for {encoding.heads} heads and width {encoding.width}, the model has {shape.heads} and "
            f"{expected}: build it with heads={shape.heads}, width={expected}"
        )


def _check_inputs(encoding: Encoding, spec: str) -> None:
    """Refuse an encoding that needs more than transformers passes to attention."""
    if encoding.needs_token_ids:
        raise UserError(f"'{spec}' reads the tokens, which attention of transformers is not told: use another encoding")
    if encoding.has_token_features:
        raise UserError(f"'{spec}' reads a layer's input, which transformers' attention is not given: use another one")


def _check_transforms(transforms: PositionTransforms, encoding: Encoding, spec: str) -> None:
    """Refuse position transforms that the encoding cannot follow."""
    for name, transform in (("positions_train", transforms.active(True)), ("positions", transforms.active(False))):
        if transform is not None and encoding.position_type == "none":
            raise UserError(f"{name}: '{spec}' reads no positions, so moving them does nothing: leave it out")
        if transform is not None and transform.fractional and encoding.position_type == "whole":
            raise UserError(f"{name}: '{spec}' knows whole positions only and this transform makes fractions")


def _install(model: PreTrainedModel, base: Any, layers: nn.ModuleList, adapter: EncodingAdapter) -> None:
    """Put the adapter into the model, and store in ``adapter.undo`` what :func:`restore` needs."""
    # the config names the attention function, and models built from the same config share it
    shared, private = base.config, copy.deepcopy(base.config)
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            module.config = private
    before = shared._attn_implementation
    hooks = (
        base.register_forward_pre_hook(model_pre_hook, with_kwargs=True),
        layers[0].register_forward_pre_hook(first_layer_pre_hook, with_kwargs=True),
    )
    adapter.undo = (base.rotary_emb, before, hooks)
    for layer, module in enumerate(_attention_modules(layers)):
        setattr(module, NAME, (adapter, layer))  # in a tuple, so that it is not a submodule here too
    setattr(layers[0], NAME, (adapter, 0))
    setattr(base, NAME, adapter)
    base.rotary_emb = IdentityRotation()
    model.set_attn_implementation(NAME)

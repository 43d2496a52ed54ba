"""Use any encoding of this package in models of Hugging Face transformers."""

import copy
import math
from collections.abc import Iterator
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
    config = base.config
    _check_config(config)
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    if length is None:
        length = (config.rope_parameters or {}).get("original_max_position_embeddings", config.max_position_embeddings)
    if isinstance(encoding, str):
        spec = _complete_spec(encoding, _model_rotation(base, head))
        encodings = _build_encodings(spec, share, heads, head, config.hidden_size, length, len(layers))
    else:
        if share not in ("auto", "model"):
            raise UserError(f"share='{share}' with an encoding that is made already: give its spec, or leave share out")
        spec, encodings = _spec_from_encoding(encoding), [encoding]
    _check_fit(encodings[0], heads, head, config.hidden_size)
    if encodings[0].needs_token_ids:
        raise UserError(f"'{spec}' reads the tokens, which attention of transformers is not told: use another encoding")
    if encodings[0].has_token_features:
        raise UserError(f"'{spec}' reads a layer's input, which transformers' attention is not given: use another one")
    attention_backend = choose_backend(backend, encodings)
    rank = (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )
    transforms = PositionTransforms(positions_train, positions, length, seed, rank)
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
    candidates = (config.get("partial_rotary_factor"), rotated / head, math.nextafter(rotated / head, 1.0))
    fraction = next(x for x in candidates if x and int(head * x) == rotated)
    values = {"base": config.get("rope_theta"), "rotary_fraction": fraction, "interleaved": False}
    kind = config.get("rope_type", "default")
    return ModelRotation(values, "" if kind == "default" else kind)


def _complete_spec(spec: str, rotation: ModelRotation) -> str:
    """Complete the options that a spec leaves open from the model's rotation."""
    full = complete_spec(spec, rotation, strict=False)
    stated, options = parse(full)[1], vars(registry.resolve(full)[2])
    if (
        "temperature_on" in options
        and stated.get("scaling") == "yarn"
        and "temperature_on" not in stated
        and rotation.values["rotary_fraction"] != 1
    ):
        full += ",temperature_on=rotated"
    return normalise(full)


def _build_encodings(
    spec: str, share: str, heads: int, head: int, width: int, length: int | None, layers: int
) -> list[Encoding]:
    """Build one encoding for the model, or one per layer."""
    if share not in SHARING_OPTIONS:
        raise UserError(f"share is one of {', '.join(SHARING_OPTIONS)}, not '{share}'")
    make = partial(build, spec, heads, heads * head, length)
    first = make()
    if first.embeds and width != heads * head:
        make = partial(build, spec, heads, width, length)
        first = make()
    share = first.sharing_modes[0] if share == "auto" else share
    if share not in first.sharing_modes:
        raise UserError(f"share='{share}': '{spec}' can only be shared by: {', '.join(first.sharing_modes)}")
    if share == "model":
        return [first]
    others = [make() for _ in range(layers - 1)]
    for other in others:
        other.tie(first)
    return [first, *others]


def _spec_from_encoding(encoding: Encoding) -> str:
    cls = type(encoding)
    return canonical(next((n for n in names() if registry.resolve(n)[0] is cls), cls.__name__), encoding.config)


def _check_fit(encoding: Encoding, heads: int, head: int, width: int) -> None:
    expected = width if encoding.embeds else heads * head
    if encoding.heads != heads or (
        (encoding.embeds or encoding.rotates or encoding.is_content_dependent) and encoding.width != expected
    ):
        raise UserError(
            f"the encoding is for {encoding.heads} heads and width {encoding.width}, the model has {heads} and "
            f"{expected}: build it with heads={heads}, width={expected}"
        )


def _check_transforms(transforms: PositionTransforms, encoding: Encoding, spec: str) -> None:
    for name, transform in (("positions_train", transforms.active(True)), ("positions", transforms.active(False))):
        if transform is not None and encoding.position_type == "none":
            raise UserError(f"{name}: '{spec}' reads no positions, so moving them does nothing: leave it out")
        if transform is not None and transform.fractional and encoding.position_type == "whole":
            raise UserError(f"{name}: '{spec}' knows whole positions only and this transform makes fractions")


def _install(model: PreTrainedModel, base: Any, layers: nn.ModuleList, adapter: EncodingAdapter) -> None:
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

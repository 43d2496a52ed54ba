"""Use any encoding of this package in models of Hugging Face transformers."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fairseq_rpe.adapters.attention_interface import (
    MODEL_TYPES,
    NAME,
    EncodingAdapter,
    IdentityRotation,
    base_model,
    check_model_type,
    first_layer_pre_hook,
    model_hook,
    model_pre_hook,
)

# isort: split

import torch
from torch import nn
from transformers import PreTrainedModel

from fairseq_rpe.adapters.config_pattern import (
    HAS_SINKS,
    OWN_PATTERN,
    pattern_from_config,
    read_layers,
    resolve_pattern,
    training_length,
)
from fairseq_rpe.adapters.scoring import evaluate
from fairseq_rpe.attention import choose_backend
from fairseq_rpe.core.arguments import describe_value
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern
from fairseq_rpe.core.spec import canonical
from fairseq_rpe.encodings import Encoding, names
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.model import LayerEncodings, build_for_model, sharing_modes
from fairseq_rpe.encodings.model_rotation import ATTENTION_OPTIONS
from fairseq_rpe.positions.position_transforms import PositionTransforms

__all__ = ["MODEL_TYPES", "evaluate", "pattern_from_config", "restore", "use_encoding"]

SHARING_OPTIONS = ("auto", "model", "layer")
_ROTATION = re.compile(r"rotary_emb|rotary_embs\.\d+")  # names of rotation modules; Granite has one for each base


def use_encoding(
    model: PreTrainedModel,
    encoding: Encoding | str = OWN_PATTERN,
    *,
    length: int | None = None,
    share: str = "auto",
    positions: str = "",
    positions_train: str = "identity",
    seed: int = 1,
    backend: str = "auto",
) -> PreTrainedModel:
    """Replace the rotation of a model, and its windows, softcap and sinks, by ``encoding``, in place.

    Attention is softmax(s·q·kᵀ + bias) v as in :func:`fairseq_rpe.attend`, with rotated q and k if the encoding rotates
    them; s is the model's factor, mostly 1/sqrt(D) for heads of width D. A rotary encoding takes the options that its
    spec leaves open from the model: ``base`` is the model's rope_theta, ``rotary_fraction`` the fraction of a head that
    the model rotates, pairs are (s, s + d/2), and YaRN scales the rotated elements, as in transformers. A spec of
    ``rope`` without ``scaling`` also takes the model's scaling if its ``rope_type`` is linear, llama3, proportional or
    yarn; ``scaling=none`` drops the scaling.

    In a model whose layers differ, a spec that rotates replaces the rotations only: layers without one stay, and so do
    windows and other attention options that the spec does not state. A pattern of layers, or a spec that does not
    rotate, replaces everything.

    Args:
        model: of a type in ``MODEL_TYPES``, with or without a head, on one device.
        encoding: a spec such as ``"rope:scaling=yarn,factor=4"``; a pattern of layers such as ``"3*rope|nope"``; an
            encoding, which all layers share; or ``"config"``, the pattern of the model's config.
        length: training length in tokens, for encodings that use it; None: original_max_position_embeddings of the
            config's rope_parameters, or its max_position_embeddings.
        share: one encoding per ``model`` or per ``layer``, or ``auto``: as in the encoding's paper. Layers with
            different specs never share.
        positions: position transform in evaluation, as ``--positions-eval``.
        positions_train: position transform in training, as ``--positions-train``.
        seed: seed of random positions: a new sample for every forward pass in training; in evaluation one per row that
            depends on its ids.
        backend: as in ``attend``.

    Returns:
        The same model. The encoding is its submodule ``model.base_model.fairseq_rpe`` (``model.model.fairseq_rpe`` for
        Llama 4).

    Raises:
        UserError: the model, config or encoding is not supported; in a forward pass, an unsupported feature (packed
            texts, attention weights, caches of fixed size).
    """
    if not isinstance(encoding, Encoding | str):
        raise UserError(f"encoding is a spec such as 'rope' or what build(...) returns, not {describe_value(encoding)}")
    return replace_encoding(
        model,
        encoding,
        length=length,
        share=share,
        positions=positions,
        positions_train=positions_train,
        seed=seed,
        backend=backend,
    )


def replace_encoding(
    model: PreTrainedModel,
    encoding: Encoding | str,
    *,
    length: int | None,
    share: str,
    positions: str,
    positions_train: str,
    seed: int,
    backend: str,
    is_complete: bool = False,
) -> PreTrainedModel:
    """Replace the encoding of a model as :func:`use_encoding` does.

    Args:
        model: as in :func:`use_encoding`, like the following arguments.
        encoding: spec, pattern or encoding.
        length: training length in tokens, or None for that of the config.
        share: model, layer or auto.
        positions: position transform in evaluation.
        positions_train: position transform in training.
        seed: seed of random positions.
        backend: attention backend.
        is_complete: whether the spec is that of a saved model, which takes no option from the model's config.

    Returns:
        The same model.

    Raises:
        UserError: as :func:`use_encoding`.
    """
    base, layers = _base_and_layers(model)
    _check_config(base.config)
    shape = _ModelShape.from_config(base.config, len(layers))
    layer_configs = read_layers(base.config, len(layers), _own_rotation(base), shape.head_width)
    if length is None:
        length = training_length(base.config, layer_configs)
    if isinstance(encoding, str):
        spec = encoding if is_complete else resolve_pattern(encoding, layer_configs)
        try:
            encodings = _build_encodings(spec, share, shape, length)
        except UserError as error:
            raise _name_inherited_options(error, encoding, spec, len(layers)) from error
        if base.config.model_type in HAS_SINKS:
            _use_model_sinks(encodings)
    else:
        if share not in ("auto", "model"):
            raise UserError(f"share='{share}' with an encoding that is made already: give its spec, or leave share out")
        spec = _spec_from_encoding(encoding)
        encodings = LayerEncodings([encoding], [0] * len(layers), [spec])
    for layer_encoding, layer_spec in zip(encodings, encodings.specs, strict=True):
        _check_shape(layer_encoding, shape)
        _check_inputs(layer_encoding, layer_spec)
    attention_backend = choose_backend(backend, encodings)
    transforms = PositionTransforms(positions_train, positions, length, seed, _data_parallel_rank())
    _check_transforms(transforms, encodings, spec)
    evaluation = None if transforms.active(False) is None else positions or transforms.train.evaluation
    adapter = EncodingAdapter(encodings, spec, transforms, evaluation, attention_backend).to(_device(model))
    if isinstance(getattr(base, NAME, None), EncodingAdapter):
        restore(model)
    _install(model, base, layers, adapter)
    base.config.fairseq_rpe = {  # for load_with_encoding
        "encoding": spec,
        "length": length if isinstance(encoding, str) else encoding.length,
        "share": share if isinstance(encoding, str) else "model",
        "positions": positions,
        "positions_train": positions_train,
        "seed": seed,
    }
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
    rotations, attention, hooks = adapter.undo
    for hook in hooks:
        hook.remove()
    for module in (layers[0], *_attention_modules(layers)):
        delattr(module, NAME)
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = base.config.attn_temperature_tuning
    delattr(base, NAME)
    del base.config.fairseq_rpe
    for name, rotation in rotations.items():
        base.set_submodule(name, rotation)
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
    kind, base = check_model_type(model), base_model(model)
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
    """Refuse a model with attention to the future, or attention weights as outputs."""
    if getattr(config, "use_bidirectional_attention", False):
        raise UserError("this model sees the future: set use_bidirectional_attention=False in its config")
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


def _own_rotation(base: Any) -> nn.Module:
    """Return the model's own rotation module, also if an encoding has replaced it."""
    adapter = getattr(base, NAME, None)
    return adapter.undo[0]["rotary_emb"] if isinstance(adapter, EncodingAdapter) else base.rotary_emb


def _build_encodings(spec: str, share: str, shape: _ModelShape, length: int | None) -> LayerEncodings:
    """Build the encodings of a pattern of layers."""
    if share not in SHARING_OPTIONS:
        raise UserError(f"share is one of {', '.join(SHARING_OPTIONS)}, not '{share}'")
    if share != "auto" and share not in (possible := sharing_modes(spec)):
        raise UserError(f"share='{share}': '{spec}' can only be shared by: {', '.join(possible)}")
    return build_for_model(
        spec, shape.heads, shape.width, shape.layers, length, share=share, head_width=shape.head_width
    )


def _name_inherited_options(error: UserError, encoding: str, spec: str, layers: int) -> UserError:
    """Return an error that also says which attention options of ``spec`` are of the model and not of ``encoding``."""
    is_single = encoding != OWN_PATTERN and not is_pattern(encoding)
    inherited = [name for name in ATTENTION_OPTIONS if f"{name}=" in spec and f"{name}=" not in encoding]
    if not is_single or not inherited:
        return error
    return UserError(
        f"{error} (the model's layers have {', '.join(inherited)}: write {layers}*{encoding} to replace that too)"
    )


def _use_model_sinks(encodings: LayerEncodings) -> None:
    """Drop learned null logits, for which the model has parameters: the sinks of its layers."""
    for encoding in encodings:
        encoding.null_logit = None


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
    if encoding.has_key_state:
        raise UserError(f"'{spec}' keeps a state of the keys, which caches of transformers do not store: use another")
    if encoding.has_token_features:
        raise UserError(f"'{spec}' reads a layer's input, which transformers' attention is not given: use another one")


def _check_transforms(transforms: PositionTransforms, encodings: Iterable[Encoding], spec: str) -> None:
    """Refuse position transforms that the encodings cannot follow."""
    types = {encoding.position_type for encoding in encodings}
    for name, transform in (("positions_train", transforms.active(True)), ("positions", transforms.active(False))):
        if transform is not None and types == {"none"}:
            raise UserError(f"{name}: '{spec}' reads no positions, so moving them does nothing: leave it out")
        if transform is not None and transform.fractional and "whole" in types:
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
        base.register_forward_hook(model_hook, always_call=True),
    )
    rotations = {name: module for name, module in base.named_modules() if _ROTATION.fullmatch(name)}
    adapter.undo = (rotations, before, hooks)
    for layer, module in enumerate(_attention_modules(layers)):
        setattr(module, NAME, (adapter, layer))  # in a tuple, so that it is not a submodule here too
        if hasattr(module, "attn_temperature_tuning"):  # Llama 4 scales queries itself
            module.attn_temperature_tuning = False
    setattr(layers[0], NAME, (adapter, 0))
    setattr(base, NAME, adapter)
    for name, module in rotations.items():
        base.set_submodule(name, IdentityRotation(getattr(module, "config", base.config)))
    model.set_attn_implementation(NAME)

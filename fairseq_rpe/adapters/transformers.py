"""Models of Hugging Face transformers with any encoding of this package."""

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from fairseq_rpe.adapters.attention_interface import (
    NAME,
    TYPES,
    Adapter,
    NoRotation,
    before_first_layer,
    before_model,
    check_type,
)

# isort: split

import torch
from torch import nn
from transformers import PreTrainedModel

from fairseq_rpe.adapters.scoring import evaluate
from fairseq_rpe.attention import choose
from fairseq_rpe.core.arguments import described
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import canonical, parse
from fairseq_rpe.encodings import Encoding, build, names, normalise
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.model_rotation import ModelRotation, complete
from fairseq_rpe.positions.position_transforms import Moves

__all__ = ["TYPES", "evaluate", "restore", "use_encoding"]

SHARES = ("auto", "model", "layer")


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
    """Change a model in place: its own rotation goes, and ``encoding`` acts in its attention, or at its input.

    What an encoding does is as in :func:`fairseq_rpe.attend`: softmax(s·q·kᵀ + bias) v, with q and k turned first where
    it turns them; s is the model's own factor, mostly 1/sqrt(D) for heads of width D. An encoding that rotates queries
    and keys as ``rope`` does takes from the model what its spec leaves open: ``base`` is the model's rope_theta,
    ``rotary_fraction`` the part of a head that the model rotates, pairs are (s, s + d/2), and YaRN scales the rotated
    part, as transformers does. Scaling is never taken from the config.

    Args:
        model: of a type in ``TYPES``, with a head or without, on one device.
        encoding: a spec, such as ``"rope:scaling=yarn,factor=4"``, or an encoding, which all layers then share.
        length: training length in tokens, for a spec that reads it; None: original_max_position_embeddings of the
            config's rope_parameters, or its max_position_embeddings.
        share: one encoding for the ``model``, one per ``layer``, or ``auto``: what the encoding's paper does.
        positions, positions_train: position transforms in evaluation and in training, as ``--positions-eval`` and
            ``--positions-train``; ``seed``: of random ones, in training a new draw for every forward pass, in
            evaluation one for each row of ids, which follows from them.
        backend: as in ``attend``.

    Returns:
        The same model. What it learns of positions is in ``model.base_model.fairseq_rpe``, a part of the model.

    Raises:
        UserError: a model, config or encoding that cannot be served; in a forward pass, what attention here does not
            do (sliding windows, packed texts, attention weights, caches of fixed size). Nothing is left out in silence.
    """
    if not isinstance(encoding, Encoding | str):
        raise UserError(f"encoding is a spec such as 'rope' or what build(...) returns, not {described(encoding)}")
    base, layers = _parts(model)
    config = base.config
    _check_config(config)
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    if length is None:
        length = (config.rope_parameters or {}).get("original_max_position_embeddings", config.max_position_embeddings)
    if isinstance(encoding, str):
        spec = _completed(encoding, _rotation_of(base, head))
        made = _built(spec, share, heads, head, config.hidden_size, length, len(layers))
    else:
        if share not in ("auto", "model"):
            raise UserError(f"share='{share}' with an encoding that is made already: give its spec, or leave share out")
        spec, made = _spec_of(encoding), [encoding]
    _check_fit(made[0], heads, head, config.hidden_size)
    if made[0].needs_token_ids:
        raise UserError(f"'{spec}' reads the tokens, which attention of transformers is not told: use another encoding")
    if made[0].has_token_features:
        raise UserError(f"'{spec}' reads a layer's input, which transformers' attention is not given: use another one")
    chosen = choose(backend, made)
    rank = (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )
    moves = Moves(positions_train, positions, length, seed, rank)
    _check_moves(moves, made[0], spec)
    moved = None if moves.active(False) is None else positions or moves.train.evaluation
    adapter = Adapter(made, spec, moves, moved, chosen).to(_device(model))
    if isinstance(getattr(base, NAME, None), Adapter):
        restore(model)
    _install(model, base, layers, adapter)
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`use_encoding`: the model's own rotation and attention are back, the encoding is gone from it.

    Raises UserError: the model has no encoding of ours.
    """
    base, layers = _parts(model)
    adapter = getattr(base, NAME, None)
    if not isinstance(adapter, Adapter):
        raise UserError("this model has no encoding of ours: there is nothing to restore")
    rotation, attention, hooks = adapter.undo
    for hook in hooks:
        hook.remove()
    for module in (layers[0], *_attentions(layers)):
        delattr(module, NAME)
    delattr(base, NAME)
    base.rotary_emb = rotation
    model.set_attn_implementation(attention)
    return model


def _parts(model: PreTrainedModel) -> tuple[Any, nn.ModuleList]:
    """The model without its head, and its layers; refused where they are not known."""
    kind, base = check_type(model), model.base_model
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(list(_attentions(layers))) != len(layers):
        raise UserError(f"this version of transformers builds '{kind}' in another way than was checked: use 5.23")
    if not isinstance(getattr(base, "rotary_emb", None), nn.Module):
        raise UserError(f"'{kind}' has no rotation where this version of transformers is known to have it: use 5.23")
    return base, layers


def _attentions(layers: nn.ModuleList) -> Iterator[nn.Module]:
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


def _rotation_of(base: Any, head: int) -> ModelRotation:
    """The model's own rotation, for heads of ``head`` elements.

    Its width is that of the frequencies that the model has: ``partial_rotary_factor`` of a config says nothing where
    the model's class ignores it.
    """
    adapter = getattr(base, NAME, None)
    rotation = adapter.undo[0] if isinstance(adapter, Adapter) else base.rotary_emb
    frequencies = getattr(rotation, "inv_freq", None)
    if frequencies is None:
        raise UserError(f"{type(rotation).__name__} has no inv_freq, which transformers 5.23 has: use that version")
    rotated, config = 2 * len(frequencies), base.config.rope_parameters or {}
    candidates = (config.get("partial_rotary_factor"), rotated / head, math.nextafter(rotated / head, 1.0))
    fraction = next(x for x in candidates if x and int(head * x) == rotated)
    values = {"base": config.get("rope_theta"), "rotary_fraction": fraction, "interleaved": False}
    kind = config.get("rope_type", "default")
    return ModelRotation(values, "" if kind == "default" else kind)


def _completed(spec: str, rotation: ModelRotation) -> str:
    """The spec with what the model's rotation gives where it is left open; what it states is kept."""
    full = complete(spec, rotation, strict=False)
    stated, options = parse(full)[1], vars(registry.resolve(full)[2])
    if (
        "scaled" in options
        and stated.get("scaling") == "yarn"
        and "scaled" not in stated
        and rotation.values["rotary_fraction"] != 1
    ):
        full += ",scaled=turned"
    return normalise(full)


def _built(spec: str, share: str, heads: int, head: int, width: int, length: int | None, layers: int) -> list[Encoding]:
    """One encoding for the model, or one per layer."""
    if share not in SHARES:
        raise UserError(f"share is one of {', '.join(SHARES)}, not '{share}'")
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


def _spec_of(encoding: Encoding) -> str:
    own = type(encoding)
    return canonical(next((n for n in names() if registry.resolve(n)[0] is own), own.__name__), encoding.config)


def _check_fit(encoding: Encoding, heads: int, head: int, width: int) -> None:
    wanted = width if encoding.embeds else heads * head
    if encoding.heads != heads or (
        (encoding.embeds or encoding.rotates or encoding.is_content_dependent) and encoding.width != wanted
    ):
        raise UserError(
            f"the encoding is for {encoding.heads} heads and width {encoding.width}, the model has {heads} and "
            f"{wanted}: build it with heads={heads}, width={wanted}"
        )


def _check_moves(moves: Moves, encoding: Encoding, spec: str) -> None:
    for name, transform in (("positions_train", moves.active(True)), ("positions", moves.active(False))):
        if transform is not None and encoding.position_type == "none":
            raise UserError(f"{name}: '{spec}' reads no positions, so moving them does nothing: leave it out")
        if transform is not None and transform.fractional and encoding.position_type == "whole":
            raise UserError(f"{name}: '{spec}' knows whole positions only and this transform makes fractions")


def _install(model: PreTrainedModel, base: Any, layers: nn.ModuleList, adapter: Adapter) -> None:
    # the config says which attention is called, and models that are built from one config share it
    shared, own = base.config, copy.deepcopy(base.config)
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            module.config = own
    before = shared._attn_implementation
    hooks = (
        base.register_forward_pre_hook(before_model, with_kwargs=True),
        layers[0].register_forward_pre_hook(before_first_layer, with_kwargs=True),
    )
    adapter.undo = (base.rotary_emb, before, hooks)
    for layer, module in enumerate(_attentions(layers)):
        setattr(module, NAME, (adapter, layer))  # in a tuple, so that it is no part of this module as well
    setattr(layers[0], NAME, (adapter, 0))
    setattr(base, NAME, adapter)
    base.rotary_emb = NoRotation()
    model.set_attn_implementation(NAME)

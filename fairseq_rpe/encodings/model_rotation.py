"""The rotation with which a model was trained, and completion of specs by it.

Trained weights are valid only for the rotation they were trained with: its base, the rotated fraction of a head and the
pairing of its elements. If a spec does not set one of them, it takes the model's value; a spec that contradicts the
model is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fairseq_rpe.core.attention_options import AttentionOptions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern, parse_pattern
from fairseq_rpe.core.spec import format_value, parse
from fairseq_rpe.encodings.base import Encoding, registry

# quantity -> its value for encodings without such an option, unless their class has an attribute of that name
_IMPLIED: dict[str, Any] = {"rotary_fraction": 1.0, "interleaved": False, "resonance": False, "logn": "none"}
_IMPLIED |= {"keep": None, "frequencies": "fixed"}
# quantity -> an encoding that has it, if that is not any rope
_EXAMPLES = {"keep": "rope:scaling=proportional"}
# a spec may differ from the model in these: they are methods of context extension
_METHODS = frozenset({"resonance", "logn", "original_length", "keep", "frequencies"})

ATTENTION_OPTIONS = tuple(f.name for f in fields(AttentionOptions))


@dataclass(frozen=True)
class ModelRotation:
    """The rotation with which the weights of a model were trained.

    Attributes:
        values: value of each known quantity: ``base``, ``rotary_fraction``, ``interleaved``, and of ``rope``
            ``resonance``, ``logn``, ``frequencies``, ``keep`` and ``original_length``.
        scaling: name of the scaling of the frequencies, or "" if they are not scaled.
        spec: spec of the encoding that the model was trained with, or "" if that is no encoding of this package.
    """

    values: Mapping[str, Any]
    scaling: str = ""
    spec: str = ""


def rotation_from_spec(spec: str) -> ModelRotation | None:
    """Return the rotation of a model that was trained with the encoding ``spec``.

    Args:
        spec: spec of the encoding, as the checkpoint names it.

    Returns:
        The rotation, or None if the encoding does not rotate queries and keys as ``rope`` does.

    Raises:
        UserError: the encoding or one of its options is unknown.
    """
    cls, _, config = registry.resolve(spec)
    options = cls.rotation_options(config)
    if not options:
        return None
    values = {quantity: getattr(cls, quantity, default) for quantity, default in _IMPLIED.items()}
    values |= {quantity: getattr(config, option) for option, quantity in options.items() if quantity != "scaling"}
    if not values.get("original_length"):
        values.pop("original_length", None)
    return ModelRotation(values, cls.rotation_scaling(config), spec)


def complete_spec_for_checkpoint(spec: str, trained: str) -> str:
    """Complete a spec by the rotation of a checkpoint.

    The specs of a pattern of layers are completed by those of the same layers. If the checkpoint has a pattern and
    ``spec`` is one encoding that rotates, it replaces the encodings that rotate, and the other layers stay.

    Args:
        spec: spec or pattern that replaces the checkpoint's.
        trained: spec or pattern that the checkpoint was trained with.

    Returns:
        The spec, unchanged if nothing is missing. An option that the spec sets is kept even if it equals the default,
        so completion is idempotent.

    Raises:
        UserError: one of the specs is not valid, or ``spec`` contradicts the checkpoint's rotation.
    """
    if is_pattern(spec):
        return _complete_pattern(spec, trained)
    if is_pattern(trained) and is_rotary(spec):
        return _replace_rotations(spec, trained)
    if not is_rotary(spec):
        return spec  # ``trained`` may be an encoding that is not registered here
    return complete_spec(spec, rotation_from_spec(trained))


def is_rotary(spec: str) -> bool:
    """Return whether the encoding ``spec`` rotates queries and keys as ``rope`` does."""
    cls, _, config = registry.resolve(spec)
    return bool(cls.rotation_options(config))


def _complete_pattern(spec: str, trained: str) -> str:
    """Return the pattern ``spec``, each encoding completed by the rotation of the same layers of a checkpoint.

    Raises:
        UserError: a spec is not valid, contradicts the checkpoint, or replaces rotations that differ in what it omits.
    """
    pattern = parse_pattern(spec)
    pairs = pattern.pairs(parse_pattern(trained))

    def complete(layer_spec: str) -> str:
        if not is_rotary(layer_spec):
            return layer_spec
        rotated = [other for new, other in pairs if new == layer_spec and is_rotary(other)]
        completed = list(dict.fromkeys(complete_spec(layer_spec, rotation_from_spec(other)) for other in rotated))
        if len(completed) > 1:
            raise UserError(
                f"'{spec}': '{layer_spec}' replaces different rotations of '{trained}': state its options, as in "
                f"'{completed[0]}' or '{completed[1]}'"
            )
        return completed[0] if completed else layer_spec

    completed = pattern.map(complete)
    return spec if completed == pattern else str(completed)


def _replace_rotations(spec: str, trained: str) -> str:
    """Return the pattern ``trained`` with ``spec`` in place of the encodings that rotate.

    A window or another attention option of a replaced encoding stays, unless ``spec`` states that option.

    Raises:
        UserError: a spec is not valid, contradicts the checkpoint, or no layer rotates.
    """
    pattern = parse_pattern(trained)
    if not any(map(is_rotary, pattern.specs)):
        raise UserError(
            f"'{spec}' rotates, and no layer of the model, '{trained}', does: name a pattern with an encoding of each "
            "layer"
        )

    def replace(layer_spec: str) -> str:
        if not is_rotary(layer_spec):
            return layer_spec
        return inherit_attention_options(complete_spec(spec, rotation_from_spec(layer_spec)), layer_spec)

    return str(pattern.map(replace))


def inherit_attention_options(spec: str, replaced: str) -> str:
    """Add the attention options of a replaced spec, such as a window, that ``spec`` does not state.

    Args:
        spec: spec that replaces ``replaced``.
        replaced: spec of the replaced encoding.

    Returns:
        The spec; unchanged if there is nothing to add.

    Raises:
        UserError: a spec is malformed.
    """
    stated = parse(spec)[1]
    replaced_options = set(stated)
    if {"local", "block"} & set(stated):  # one of them replaces the other
        replaced_options |= {"local", "block"}
    if "query_scale" in stated:  # the numbers belong to the other method
        replaced_options |= {"query_scale_value", "query_scale_interval"}
    options = [name for name in ATTENTION_OPTIONS if name not in replaced_options]
    inherited = [f"{name}={value}" for name, value in parse(replaced)[1].items() if name in options]
    return spec + ("," if stated else ":") + ",".join(inherited) if inherited else spec


def complete_spec(spec: str, model: ModelRotation | None, *, strict: bool = True) -> str:
    """Complete a spec by the rotation of a model.

    Args:
        spec: spec of the encoding that the model is used with.
        model: the model's rotation, or None if it has none.
        strict: whether options that contradict the model are refused; otherwise they are kept.

    Returns:
        The spec, unchanged if nothing is missing.

    Raises:
        UserError: the spec is not valid, drops a scaling of the model's rotation without naming another one, needs an
            option that its encoding does not have, or, if ``strict``, contradicts the model.
    """
    cls, name, config = registry.resolve(spec)
    stated, options = parse(spec)[1], cls.rotation_options(config)
    if model is None or not options:
        return spec
    _check_scaling(spec, stated, options, name, model)
    if strict:
        _check_stated_options(spec, stated, options, model)
    _check_implied_values(spec, cls, options, model)
    defaults = {f.name: f.default for f in fields(config)}
    missing = []  # options to add, as key=value
    for option, quantity in options.items():
        value = model.values.get(quantity)
        if value is not None and option not in stated and value != defaults[option]:
            missing.append(f"{option}={format_value(value)}")
    if not missing:
        return spec
    filled = ",".join([*(f"{key}={value}" for key, value in stated.items()), *missing])
    # once more, since the new options may give effect to others, which may then be missing
    return complete_spec(f"{name}:{filled}", model, strict=strict)


def _check_stated_options(
    spec: str, stated: Mapping[str, str], options: Mapping[str, str], model: ModelRotation
) -> None:
    """Refuse an option that contradicts the model and is no method of context extension.

    Args:
        spec: the spec.
        stated: its options as text.
        options: options of its encoding that describe the rotation, with the quantities that they set.
        model: the model's rotation.

    Raises:
        UserError: an option contradicts the model.
    """
    cls, _, config = registry.resolve(spec)
    for option, quantity in options.items():
        value = model.values.get(quantity)
        may_differ = quantity in _METHODS or (quantity == "base" and cls.changes_base)
        if value is None or option not in stated or may_differ or getattr(config, option) == value:
            continue
        raise UserError(
            f"'{spec}' has {option}={format_value(getattr(config, option))}, but the model was trained with "
            f"'{model.spec}': give {option}={format_value(value)}, or leave it out"
        )


def _check_implied_values(spec: str, cls: type[Encoding], options: Mapping[str, str], model: ModelRotation) -> None:
    """Refuse an encoding that has no option for a quantity of the model, and implies another value of it."""
    for quantity, default in _IMPLIED.items():
        value = model.values.get(quantity)
        if value is not None and quantity not in options.values() and value != getattr(cls, quantity, default):
            raise UserError(
                f"'{spec}' has no option {quantity}, but the model's rotation has {quantity}={format_value(value)}: "
                f"use an encoding with that option, such as {_EXAMPLES.get(quantity, 'rope')}"
            )


def _check_scaling(
    spec: str, stated: Mapping[str, str], options: Mapping[str, str], name: str, model: ModelRotation
) -> None:
    """Refuse a spec that drops the model's scaling without naming another one.

    Args:
        spec: the spec.
        stated: its options as text.
        options: options of its encoding that describe the rotation, with the quantities that they set.
        name: name of its encoding.
        model: the model's rotation.

    Raises:
        UserError: the spec drops the scaling.
    """
    scaling_option = next((option for option, quantity in options.items() if quantity == "scaling"), None)
    if scaling_option is not None:
        keeps_or_replaces = scaling_option in stated
    else:  # the encoding itself is the scaling, and the model has it
        keeps_or_replaces = bool(model.spec) and name == parse(model.spec)[0]
    replaces_factors = model.scaling == "longrope" and name == "longrope" and "factors" in stated
    if not model.scaling or keeps_or_replaces or replaces_factors:
        return
    remedy = f"name a scaling, if need be {scaling_option}=none" if scaling_option else "use rope, which has scalings"
    if model.scaling == "longrope":
        factors = "longrope:factors=…,factor=…, with the long_factor of the model's config or factors of your own"
        remedy = f"{remedy}, or use {factors}" if scaling_option else f"use {factors}"
    raise UserError(f"the model's own rotation is scaled ({model.scaling}), and '{spec}' would drop that: {remedy}")

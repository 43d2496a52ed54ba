"""The rotation with which a model was trained, and completion of specs by it.

Trained weights are valid only for the rotation they were trained with: its base, the rotated fraction of a head and the
pairing of its elements. If a spec does not set one of them, it takes the model's value; a spec that contradicts the
model is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import format_value, parse
from fairseq_rpe.encodings.base import Encoding, registry

# quantity -> its value for encodings without such an option, unless their class has an attribute of that name
_IMPLIED: dict[str, Any] = {"rotary_fraction": 1.0, "interleaved": False, "resonance": False, "logn": "none"}
# a spec may differ from the model in these: they are methods of context extension
_METHODS = frozenset({"resonance", "logn", "original_length"})


@dataclass(frozen=True)
class ModelRotation:
    """The rotation with which the weights of a model were trained.

    Attributes:
        values: value of each known quantity: ``base``, ``rotary_fraction``, ``interleaved``, and of ``rope``
            ``resonance``, ``logn`` and ``original_length``.
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

    Args:
        spec: spec of the encoding that replaces the checkpoint's.
        trained: spec of the encoding that the checkpoint was trained with.

    Returns:
        The spec, unchanged if nothing is missing. An option that the spec sets is kept even if it equals the default,
        so completion is idempotent.

    Raises:
        UserError: one of the specs is not valid, or ``spec`` contradicts the checkpoint's rotation.
    """
    cls, _, config = registry.resolve(spec)
    if not cls.rotation_options(config):
        return spec  # ``trained`` may be an encoding that is not registered here
    return complete_spec(spec, rotation_from_spec(trained))


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
                "use an encoding with that option, such as rope"
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

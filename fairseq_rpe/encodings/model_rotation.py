"""The rotation that a model was trained with, and specs that leave a part of it open.

Weights fit the rotation of queries and keys that they were trained with: its base, the rotated part of a head and the
pairing of its elements. An encoding that rotates reads such weights correctly only with the same values. So a spec that
leaves one of them open takes the model's, and one that contradicts the model is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import parse, show
from fairseq_rpe.encodings.base import registry

# what encodings without such an option do, unless their class has an attribute of that name
_IMPLIED: dict[str, Any] = {"rotary_fraction": 1.0, "interleaved": False, "resonance": False, "logn": "none"}
# a spec may choose these anew: they are ways to read longer texts
_METHODS = frozenset({"resonance", "logn", "original_length"})


@dataclass(frozen=True)
class ModelRotation:
    """The rotation that the weights of a model were trained with.

    Attributes:
        values: value of each quantity that is known: ``base``, ``rotary_fraction``, ``interleaved``, and of ``rope``
            ``resonance``, ``logn`` and ``original_length``.
        scaling: name of what scales the frequencies, empty where nothing does.
        spec: the encoding that the model was trained with, empty where it is none of this package's.
    """

    values: Mapping[str, Any]
    scaling: str = ""
    spec: str = ""


def rotation_of(spec: str) -> ModelRotation | None:
    """Return the rotation of a model that was trained with an encoding.

    Args:
        spec: the encoding, as the checkpoint names it.

    Returns:
        Its rotation, or None where the encoding does not rotate queries and keys as ``rope`` does.

    Raises:
        UserError: the spec names no encoding, or an option that the encoding does not have.
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


def complete_for_checkpoint(spec: str, trained: str) -> str:
    """Return ``spec`` with the rotation of a checkpoint where it leaves it open.

    Args:
        spec: an encoding that is to replace the checkpoint's.
        trained: the encoding that the checkpoint was trained with.

    Returns:
        The spec, unchanged where nothing is missing. An option that the spec states is kept, even one that equals its
        default, so that completing twice is completing once.

    Raises:
        UserError: one of the two is no valid spec, or ``spec`` contradicts the checkpoint's rotation.
    """
    cls, _, config = registry.resolve(spec)
    if not cls.rotation_options(config):
        return spec  # ``trained`` may be an encoding that is not registered here
    return complete(spec, rotation_of(trained))


def complete(spec: str, model: ModelRotation | None, *, strict: bool = True) -> str:
    """Return ``spec`` with the rotation of a model where it leaves it open.

    Args:
        spec: an encoding.
        model: the model's rotation; None: it has none that could be taken.
        strict: refuse an option that contradicts the model's; otherwise it is kept.

    Returns:
        The spec, unchanged where nothing is missing.

    Raises:
        UserError: the spec is not valid, drops a scaling of the model's rotation without saying so, needs an option
            that its encoding does not have, or, if ``strict``, contradicts the model.
    """
    cls, name, config = registry.resolve(spec)
    stated, options = parse(spec)[1], cls.rotation_options(config)
    if model is None or not options:
        return spec
    _check_scaling(spec, stated, options, name, model)
    defaults = {f.name: f.default for f in fields(config)}
    missing = []
    for option, quantity in options.items():
        value = model.values.get(quantity)
        if value is None:
            continue
        if option not in stated:
            missing += [f"{option}={show(value)}"] if value != defaults[option] else []
            continue
        may_differ = quantity in _METHODS or (quantity == "base" and cls.changes_base)
        if strict and not may_differ and getattr(config, option) != value:
            raise UserError(
                f"'{spec}' has {option}={show(getattr(config, option))}, but the model was trained with "
                f"'{model.spec}': give {option}={show(value)}, or leave it out"
            )
    for quantity, default in _IMPLIED.items():
        value = model.values.get(quantity)
        if value is not None and quantity not in options.values() and value != getattr(cls, quantity, default):
            raise UserError(
                f"'{spec}' has no option {quantity}, and the model's rotation has {quantity}={show(value)}: use an "
                "encoding with that option, such as rope"
            )
    if not missing:
        return spec
    filled = ",".join([*(f"{key}={value}" for key, value in stated.items()), *missing])
    return complete(f"{name}:{filled}", model, strict=strict)  # what was added may make another option count


def _check_scaling(
    spec: str, stated: Mapping[str, str], options: Mapping[str, str], name: str, model: ModelRotation
) -> None:
    """Refuse a spec under which the model's scaling would be lost without a word."""
    own = next((option for option, quantity in options.items() if quantity == "scaling"), None)
    if not model.scaling or (own in stated if own else model.spec and name == parse(model.spec)[0]):
        return
    if model.scaling == "longrope" and name == "longrope" and "factors" in stated:
        return
    remedy = f"name a scaling, if need be {own}=none" if own else "use rope, which has scalings"
    if model.scaling == "longrope":
        factors = "longrope:factors=…,factor=…, with the long_factor of the model's config or factors of your own"
        remedy = f"{remedy}, or use {factors}" if own else f"use {factors}"
    raise UserError(f"the model's own rotation is scaled ({model.scaling}), and '{spec}' would drop that: {remedy}")

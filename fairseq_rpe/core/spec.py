"""Spec strings, ``name`` or ``name:key=value,key=value``, which name an encoding, position transform or task.

The same string is the value of a command-line option, a run of a sweep, the key of a result and the legend of a figure.
Options are the fields of a dataclass made with :func:`option`.
"""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from fairseq_rpe.core.arguments import check_text
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.renamed import SPEC_OPTIONS

MAX_INTEGER = 10**9  # of integer options without a maximum


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: Default value.
        help: One line for lists and docs.
        choices: Allowed values, or a function that returns them when a value is checked or listed.
        minimum: Smallest allowed value.
        above: Exclusive lower bound.
        maximum: Largest allowed value.

    Returns:
        What :func:`dataclasses.field` returns; the limits are its metadata.
    """
    limits = {"help": help, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum}
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option as shown to a user.

    Attributes:
        key: Name of the option.
        default: Default value.
        help: One line about it.
        choices: Allowed values, if they are listed.
    """

    key: str
    default: Any
    help: str
    choices: Sequence[Any] | None = None


def list_options(config: type) -> list[Option]:
    """Return the options that a config dataclass declares, in order.

    Raises:
        UserError: ``config`` is not a dataclass.
    """
    _check_dataclass(config, config.__qualname__)
    return [
        Option(f.name, f.default, f.metadata.get("help", ""), _choices(f.metadata)) for f in dataclasses.fields(config)
    ]


def _choices(metadata: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the allowed values of the option whose field has this metadata, if they are listed."""
    choices = metadata.get("choices")
    return choices() if callable(choices) else choices


def _check_dataclass(config: type, what: str) -> None:
    if not dataclasses.is_dataclass(config):
        raise UserError(f"{what} is no dataclass: decorate it with @dataclass(frozen=True)")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the end of a message, " (did you mean 'x'?)", for the closest of ``words``, or "" if none is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into the name and its options as text.

    >>> parse("type1:variant=paper")
    ('type1', {'variant': 'paper'})

    Raises:
        UserError: The spec is malformed or gives an option twice.
    """
    check_text("a spec", spec, "name:key=value")
    name, colon, rest = spec.strip().partition(":")
    name = name.strip()
    if not name or (colon and not rest.strip()):
        raise UserError(f"spec '{spec}' is incomplete: write name or name:key=value,key=value")
    options: dict[str, str] = {}
    for item in rest.split(",") if colon else []:
        key, equals, value = (text.strip() for text in item.partition("="))
        if not (key and equals and value):
            raise UserError(f"spec '{spec}': '{item}' is not key=value")
        if key in options:
            raise UserError(f"spec '{spec}': option '{key}' is given twice")
        options[key] = value
    return name, options


def configure(config: type, name: str, options: dict[str, str], other_options: Sequence[str] = ()) -> Any:
    """Build a config dataclass from options as :func:`parse` returns them.

    Args:
        config: The dataclass.
        name: Name in the spec, for messages.
        options: Values by key, as text.
        other_options: Options that ``config`` does not declare but that a spec may have, for messages.

    Returns:
        An instance of ``config``.

    Raises:
        UserError: A key is unknown or has been renamed, a value has the wrong type or is out of range, or ``config`` is
            not a dataclass.
    """
    _check_dataclass(config, f"Config of '{name}'")
    hints = typing.get_type_hints(config)
    fields = {f.name: f for f in dataclasses.fields(config)}
    values = {}
    for key, text in options.items():
        if key not in fields:
            if SPEC_OPTIONS.get((name, key)) in fields:
                raise UserError(f"'{name}' has no option '{key}': it is called '{SPEC_OPTIONS[name, key]}' now")
            defaults = ", ".join(f"{o.key}={format_value(o.default)}" for o in list_options(config)) or "none"
            others = f"; options of every encoding: {', '.join(other_options)}" if other_options else ""
            suggestion = did_you_mean(key, [*fields, *other_options])
            raise UserError(f"'{name}' has no option '{key}'{suggestion}; its options and defaults: {defaults}{others}")
        value = _convert(name, key, text, hints[key])
        _check_range(name, key, value, fields[key].metadata)
        values[key] = value
    return config(**values)


def parse_number(text: str) -> float:
    """Convert text such as ``0.25`` or ``1/4`` to a float.

    Raises:
        ValueError: It is not a finite number.
        ZeroDivisionError: The denominator is 0.
    """
    top, slash, bottom = text.partition("/")
    value = float(top) / float(bottom) if slash else float(top)
    if not math.isfinite(value):
        raise ValueError
    return value


def format_value(value: Any) -> str:
    """Return a value as it is written in a spec string: a float as a short decimal if that is exact, else a fraction.

    >>> format_value(0.25), format_value(1 / 6), format_value(True), format_value(None)
    ('0.25', '1/6', 'true', 'none')
    """
    if not isinstance(value, float):
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)
    if float(short := f"{value:g}") == value:
        return short
    fraction = Fraction(value).limit_denominator(10_000)
    return str(fraction) if float(fraction) == value else repr(value)


def canonical(name: str, config: Any) -> str:
    """Return the spec string with only the options that differ from their defaults, in declared order."""
    changed = [
        f"{f.name}={format_value(getattr(config, f.name))}"
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != f.default
    ]
    return name + (":" + ",".join(changed) if changed else "")


def _convert(name: str, key: str, text: str, hint: Any) -> Any:
    """Convert the text of an option to its type.

    Args:
        name: Name in the spec, for the message.
        key: Name of the option.
        text: The text.
        hint: Annotation of the option: a scalar type, or a union of it with None or a Literal of words.

    Returns:
        The value.

    Raises:
        UserError: The text is not of this type.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    words: list[str] = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            words += typing.get_args(kind)
    if text.lower() in words:
        return text.lower()
    kind = kinds[0]  # a union begins with its scalar type
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return parse_number(text) if kind is float else kind(text)
    except (ValueError, KeyError, ZeroDivisionError):
        expected = " or ".join([_KINDS.get(kind, kind.__name__), *words])
        raise UserError(f"option '{key}' of '{name}' wants {expected}, not '{text}'") from None


_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_LIMITS = (
    ("minimum", "at least", operator.ge),
    ("above", "more than", operator.gt),
    ("maximum", "at most", operator.le),
)


def _check_range(name: str, key: str, value: Any, limits: Any) -> None:
    """Check a value against the metadata that :func:`option` has given its field."""
    if value is None:
        return
    choices = _choices(limits)
    if choices is not None and value not in choices:
        listed, text = [format_value(c) for c in choices], format_value(value)
        raise UserError(
            f"option '{key}' of '{name}' is one of {', '.join(listed)}, not '{text}'{did_you_mean(text, listed)}"
        )
    for limit, words, holds in _LIMITS:
        bound = limits.get(limit)
        if bound is None and limit == "maximum" and isinstance(value, int):
            bound = MAX_INTEGER
        if bound is not None and not isinstance(value, str) and not holds(value, bound):
            raise UserError(
                f"option '{key}' of '{name}' must be {words} {format_value(bound)}, not {format_value(value)}"
            )

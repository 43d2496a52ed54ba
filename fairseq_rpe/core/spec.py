"""Spec strings: ``name`` or ``name:key=value,key=value`` name a thing everywhere.

The same string is the command-line flag, the sweep's cell, the result file's key and the
figure's legend. Options are the fields of a dataclass made with :func:`option`; an unknown
key, a value of the wrong type or one out of range raises :class:`UserError` in one line.
"""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from fairseq_rpe.core.arguments import check_text
from fairseq_rpe.core.errors import UserError

MOST = 10**9  # of whole numbers that have no maximum of their own


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with help and a range: ``minimum <= value <= maximum``, ``value > above``."""
    limits = {"help": help, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum}
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option as shown to a user."""

    key: str
    default: Any
    help: str
    choices: Sequence[Any] | None = None


def options_of(config: type) -> list[Option]:
    """The options that a config dataclass declares, in order. Raises UserError: it is no dataclass."""
    _check_dataclass(config, config.__qualname__)
    return [
        Option(f.name, f.default, f.metadata.get("help", ""), f.metadata.get("choices"))
        for f in dataclasses.fields(config)
    ]


def _check_dataclass(config: type, what: str) -> None:
    if not dataclasses.is_dataclass(config):
        raise UserError(f"{what} is no dataclass: decorate it with @dataclass(frozen=True)")


def nearest(word: str, words: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest of ``words``, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into the name and its raw options.

    >>> parse("type1:form=paper")
    ('type1', {'form': 'paper'})
    """
    check_text("a spec", spec, "name:key=value")
    name, colon, rest = spec.strip().partition(":")
    name = name.strip()
    if not name or (colon and not rest.strip()):
        raise UserError(f"spec '{spec}' is incomplete: write name or name:key=value,key=value")
    given: dict[str, str] = {}
    for item in rest.split(",") if colon else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise UserError(f"spec '{spec}': '{item}' is not key=value")
        if key in given:
            raise UserError(f"spec '{spec}': option '{key}' is given twice")
        given[key] = value
    return name, given


def configure(config: type, name: str, given: dict[str, str]) -> Any:
    """Build ``config`` from raw options; ``name`` is only for messages.

    Raises UserError: unknown key, value of the wrong type, value out of range, or ``config`` is no dataclass.
    """
    _check_dataclass(config, f"Config of '{name}'")
    hints = typing.get_type_hints(config)
    fields = {f.name: f for f in dataclasses.fields(config)}
    values = {}
    for key, text in given.items():
        if key not in fields:
            known = ", ".join(f"{o.key}={show(o.default)}" for o in options_of(config)) or "none"
            raise UserError(f"'{name}' has no option '{key}'{nearest(key, fields)}; its options and defaults: {known}")
        value = _convert(name, key, text, hints[key])
        _check_range(name, key, value, fields[key].metadata)
        values[key] = value
    return config(**values)


def number(text: str) -> float:
    """``0.25`` or ``1/4``; raises ValueError or ZeroDivisionError where it is no finite number."""
    top, slash, bottom = text.partition("/")
    value = float(top) / float(bottom) if slash else float(top)
    if not math.isfinite(value):
        raise ValueError
    return value


def show(value: Any) -> str:
    """A value as it is written in a spec string, numbers exactly: as a fraction where no short decimal is it.

    >>> show(0.25), show(1 / 6), show(True), show(None)
    ('0.25', '1/6', 'true', 'none')
    """
    if not isinstance(value, float):
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)
    if float(short := f"{value:g}") == value:
        return short
    fraction = Fraction(value).limit_denominator(10_000)
    return str(fraction) if float(fraction) == value else repr(value)


def canonical(name: str, config: Any) -> str:
    """The spec string with only the options that differ from their defaults, in declared order."""
    changed = [
        f"{f.name}={show(getattr(config, f.name))}"
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != f.default
    ]
    return name + (":" + ",".join(changed) if changed else "")


def _convert(name: str, key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    words = [word for k in kinds if typing.get_origin(k) is typing.Literal for word in typing.get_args(k)]
    if text.lower() in words:
        return text.lower()
    kind = kinds[0]
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return number(text) if kind is float else kind(text)
    except (ValueError, KeyError, ZeroDivisionError):
        wanted = " or ".join([_KINDS.get(kind, kind.__name__), *words])
        raise UserError(f"option '{key}' of '{name}' wants {wanted}, not '{text}'") from None


_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_LIMITS = (
    ("minimum", "at least", operator.ge),
    ("above", "more than", operator.gt),
    ("maximum", "at most", operator.le),
)


def _check_range(name: str, key: str, value: Any, limits: Any) -> None:
    if value is None:
        return
    choices = limits.get("choices")
    if choices is not None and value not in choices:
        listed, shown = [show(c) for c in choices], show(value)
        raise UserError(
            f"option '{key}' of '{name}' is one of {', '.join(listed)}, not '{shown}'{nearest(shown, listed)}"
        )
    for limit, words, holds in _LIMITS:
        bound = limits.get(limit)
        if bound is None and limit == "maximum" and isinstance(value, int):
            bound = MOST
        if bound is not None and not isinstance(value, str) and not holds(value, bound):
            raise UserError(f"option '{key}' of '{name}' must be {words} {show(bound)}, not {show(value)}")

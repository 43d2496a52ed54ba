"""JSON and TOML as typed records: read once, at one edge, every value checked against its annotation."""

import contextlib
import dataclasses
import functools
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fairseq_rpe.core.errors import UserError, shown
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.utils.files import DELETE_LINE, RESTORE, read_json_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must be beside its type; ``words`` say it."""

    holds: Callable[[Any], bool]
    words: str


_LARGEST = 1 << 63
Name = Annotated[str, Rule(lambda v: bool(v.strip()), "text that is not empty")]
Count = Annotated[int, Rule(lambda v: 1 <= v < _LARGEST, "a whole number above 0")]
Natural = Annotated[int, Rule(lambda v: 0 <= v < _LARGEST, "a whole number from 0 on")]
Counts = Annotated[
    tuple[Count, ...], Rule(lambda v: len(v) == len(set(v)) > 0, "a list of different whole numbers above 0")
]
Rate = Annotated[float, Rule(lambda v: 0 < v < float("inf"), "a number above 0 with a decimal point")]
Fraction = Annotated[float, Rule(lambda v: 0 <= v < 1, "a number with a decimal point from 0 to below 1")]
FromZero = Annotated[float, Rule(lambda v: 0 <= v < math.inf, "a number from 0 on with a decimal point")]
Betas = Annotated[
    tuple[Fraction, ...], Rule(lambda v: len(v) == 2, "two numbers with a decimal point from 0 to below 1")
]
# of what was measured: a mean loss is 0 or more, so a perplexity is 1 or more, but for rounding; one of words may be
# too large for a float
Positive = Annotated[float, Rule(lambda v: 0 < v < math.inf, "a number above 0")]
Loss = Annotated[float, Rule(lambda v: -1e-6 <= v < math.inf, "a number of at least 0")]
Perplexity = Annotated[float, Rule(lambda v: 1 - 1e-6 <= v < math.inf, "a number of at least 1")]
Unbounded = Annotated[float, Rule(lambda v: v >= 1 - 1e-6, "a number of at least 1")]
Share = Annotated[float, Rule(lambda v: 0 <= v <= 1, "a number from 0 to 1")]
Words = tuple[str, ...]
_WORDS = {str: "text", int: "a whole number", float: "a number with a decimal point", bool: "true or false"}
_HALF = re.compile("[\ud800-\udfff]")
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80


def read(
    kind: type[Record], given: object, source: str, what: str, strict: bool = True, remedy: str = RESTORE
) -> Record:
    """``given``, as JSON or TOML have it, as a record of ``kind``.

    Args:
        kind: a dataclass; fields without a default must be there. If it has a method ``fault``, that returns what is
            wrong with its values together, as the end of a sentence about it, or None.
        given: a table; of what is nested in it, tables become records and lists tuples.
        source, what: the file and the part of it, for messages.
        strict: a user wrote it: refuse unknown keys, and take a whole number for no other. Otherwise a program did,
            perhaps a later version: unknown keys are left out.
        remedy: what is said of damage where a program wrote it.

    Raises:
        UserError: no table, an unknown or missing key, a value that is not what its annotation says.
    """
    try:
        return _record(kind, given, source, what, strict)
    except UserError as error:
        raise UserError(f"{error}" if strict else f"{error}: {remedy}") from None


def read_lines(kind: type[Record], path: Path, what: str) -> list[Record]:
    """The records in a JSON-lines file that a program wrote, none if there is no such file."""
    rows = enumerate(read_json_lines(path), start=1)
    return [read(kind, row, f"{path} line {n}", what, strict=False, remedy=DELETE_LINE) for n, row in rows]


def _record(kind: type[Record], given: object, source: str, what: str, strict: bool) -> Record:
    if not isinstance(given, Mapping):
        raise UserError(f"{source}: {what} is not a table")
    fields, hints, plain, listed = _fields(kind)
    values = {}
    for key, value in given.items():
        if key in fields:
            if key in plain and plain[key].admits(value):
                values[key] = value
            elif key in listed and type(value) is list and all(map(listed[key].admits, value)):
                values[key] = tuple(value)
            else:
                values[key] = _value(hints[key], value, source, key, what, strict)
        elif strict:
            raise UserError(f"{source}: {what} has an unknown key '{key}'{nearest(key, fields)}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{source}: {what} lacks {name}")
    record = kind(**values)
    fault = getattr(record, "fault", None)
    if fault is not None and (why := fault()):
        raise UserError(f"{source}: {what} {why}")
    return record


@dataclasses.dataclass(frozen=True)
class _Plain:
    """An annotation that is one of JSON's types, with a rule or without, and whether None is allowed too."""

    kind: type[Any]
    holds: Callable[[Any], bool] | None
    optional: bool

    def admits(self, value: object) -> bool:
        """Whether a value is certainly as annotated; of others :func:`_value` decides."""
        if value is None:
            return self.optional
        if type(value) is not self.kind:
            return False
        if isinstance(value, str) and not value.isascii():
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return self.holds is None or self.holds(value)

    @classmethod
    def of(cls, hint: Any) -> "_Plain | None":
        optional = False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
            if len(kinds) > 1:
                return None
            hint, optional = kinds[0], True
        holds = None
        if typing.get_origin(hint) is Annotated:
            hint, rule = typing.get_args(hint)
            holds = rule.holds
        return cls(hint, holds, optional) if hint in (str, int, float, bool) else None


class _Fields(typing.NamedTuple):
    """The fields of a dataclass and their annotations by name; what is plain, alone and as the items of a tuple."""

    fields: dict[str, dataclasses.Field[Any]]
    hints: dict[str, Any]
    plain: dict[str, _Plain]
    listed: dict[str, _Plain]


@functools.cache
def _fields(kind: type[Any]) -> _Fields:
    hints = typing.get_type_hints(kind, include_extras=True)
    items = {name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) is tuple}
    plain, listed = (
        {name: one for name, hint in of.items() if (one := _Plain.of(hint)) is not None} for of in (hints, items)
    )
    return _Fields({f.name: f for f in dataclasses.fields(kind)}, hints, plain, listed)


def write(record: Any) -> dict[str, Any]:
    """A record as JSON keeps it: every field, nested records as tables."""
    return dataclasses.asdict(record)


def filled(kind: type[Record], source: object, **own: object) -> Record:
    """A record of what ``source`` has by the names of its fields, and of what is its ``own``."""
    given = {name: getattr(source, name) for name in _fields(kind).fields if hasattr(source, name)}
    return kind(**{**given, **own})


def _value(hint: Any, value: object, source: str, key: str, what: str, strict: bool) -> Any:
    def refuse(words: str) -> typing.NoReturn:
        raise UserError(f"{source}: {key} of {what} must be {words}, not {shown(_shown.repr(value))}")

    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        rule = inner[1]
        try:  # of a float the rule says whether it may be infinite
            found = _float(value, strict) if inner[0] is float else _value(inner[0], value, source, key, what, strict)
        except UserError:
            refuse(rule.words)
        return found if found is not None and rule.holds(found) else refuse(rule.words)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        *kinds, last = [kind for kind in inner if kind is not types.NoneType]
        for kind in kinds:
            with contextlib.suppress(UserError):
                return _value(kind, value, source, key, what, strict)
        return _value(last, value, source, key, what, strict)
    if origin is typing.Literal:
        return value if value in inner else refuse(" or ".join(map(str, inner)))
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            refuse("a list")
        return tuple(_value(inner[0], item, source, key, what, strict) for item in value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            refuse("a table")
        for name in value:
            _value(str, str(name), source, "a name", f"{key} of {what}", strict)
        return {str(k): _value(inner[1], item, source, k, f"{key} of {what}", strict) for k, item in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint, value, source, f"{key} of {what}", strict)
    if hint is float:
        found = _float(value, strict)
        return found if found is not None and math.isfinite(found) else refuse(_WORDS[float] if strict else "a number")
    if hint is str and isinstance(value, str) and _HALF.search(value):
        refuse("text without half a surrogate pair")
    return value if hint in (object, type(value)) else refuse(_WORDS[hint])


def _float(value: object, strict: bool) -> float | None:
    """A number, a whole one too if it is not ``strict``; ``None`` if it is none, or too large."""
    if type(value) is int and not strict:
        with contextlib.suppress(OverflowError):
            return float(value)
    return value if isinstance(value, float) else None

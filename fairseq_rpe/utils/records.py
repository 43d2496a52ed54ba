"""Typed records from JSON and TOML: dataclasses whose values are checked against their annotations."""

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

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.utils.files import DELETE_LINE, RESTORE, read_json_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on a value besides its type.

    Attributes:
        is_valid: Tests the value.
        words: What the value must be, for messages.
    """

    is_valid: Callable[[Any], bool]
    words: str


_LIMIT = 1 << 63
NonEmptyText = Annotated[str, Rule(lambda v: bool(v.strip()), "text that is not empty")]
Count = Annotated[int, Rule(lambda v: 1 <= v < _LIMIT, "a whole number above 0")]
Natural = Annotated[int, Rule(lambda v: 0 <= v < _LIMIT, "a whole number from 0 on")]
Counts = Annotated[
    tuple[Count, ...], Rule(lambda v: len(v) == len(set(v)) > 0, "a list of different whole numbers above 0")
]
Rate = Annotated[float, Rule(lambda v: 0 < v < float("inf"), "a number above 0 with a decimal point")]
Fraction = Annotated[float, Rule(lambda v: 0 <= v < 1, "a number with a decimal point from 0 to below 1")]
NonNegative = Annotated[float, Rule(lambda v: 0 <= v < math.inf, "a number from 0 on with a decimal point")]
Betas = Annotated[
    tuple[Fraction, ...], Rule(lambda v: len(v) == 2, "two numbers with a decimal point from 0 to below 1")
]
# Measured values: a mean loss is at least 0 and a perplexity at least 1, up to rounding; a perplexity per word may
# overflow to infinity.
Positive = Annotated[float, Rule(lambda v: 0 < v < math.inf, "a number above 0")]
Loss = Annotated[float, Rule(lambda v: -1e-6 <= v < math.inf, "a number of at least 0")]
Perplexity = Annotated[float, Rule(lambda v: 1 - 1e-6 <= v < math.inf, "a number of at least 1")]
Unbounded = Annotated[float, Rule(lambda v: v >= 1 - 1e-6, "a number of at least 1")]
Share = Annotated[float, Rule(lambda v: 0 <= v <= 1, "a number from 0 to 1")]
TextTuple = tuple[str, ...]
_WORDS = {str: "text", int: "a whole number", float: "a number with a decimal point", bool: "true or false"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def read_record(
    kind: type[Record], table: object, source: str, what: str, strict: bool = True, remedy: str = RESTORE
) -> Record:
    """Convert a table of JSON or TOML to a record.

    Args:
        kind: A dataclass. If it has a method ``fault``, that returns what is wrong with its values as a whole, as the
            end of a sentence about the record, or None.
        table: The table; nested tables become records, and lists become tuples.
        source: Name of the file, for messages.
        what: Name of the table within the file, for messages.
        strict: For files that users write: refuse unknown keys, and integers where floats are annotated. Otherwise the
            file was written by a program, perhaps by a later version, and unknown keys are ignored.
        remedy: End of the message, unless strict.

    Returns:
        The record.

    Raises:
        UserError: It is not a table, a key is unknown or missing, or a value does not match its annotation.
    """
    try:
        return _read_table(kind, table, source, what, strict)
    except UserError as error:
        raise UserError(f"{error}" if strict else f"{error}: {remedy}") from None


def read_records(kind: type[Record], path: Path, what: str) -> list[Record]:
    """Read the records of a JSON-lines file that a program wrote; none if there is no such file."""
    rows = enumerate(read_json_lines(path), start=1)
    return [read_record(kind, row, f"{path} line {n}", what, strict=False, remedy=DELETE_LINE) for n, row in rows]


def _read_table(kind: type[Record], table: object, source: str, what: str, strict: bool) -> Record:
    if not isinstance(table, Mapping):
        raise UserError(f"{source}: {what} is not a table")
    fields, hints, plain, plain_items = _fields(kind)
    values = {}
    for key, value in table.items():
        if key in fields:
            if key in plain and plain[key].admits(value):
                values[key] = value
            elif key in plain_items and type(value) is list and all(map(plain_items[key].admits, value)):
                values[key] = tuple(value)
            else:
                values[key] = _value(hints[key], value, source, key, what, strict)
        elif strict:
            raise UserError(f"{source}: {what} has an unknown key '{key}'{did_you_mean(key, fields)}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{source}: {what} lacks {name}")
    record = kind(**values)
    fault = getattr(record, "fault", None)
    if fault is not None and (reason := fault()):
        raise UserError(f"{source}: {what} {reason}")
    return record


@dataclasses.dataclass(frozen=True)
class _Plain:
    """A simple annotation: a scalar type of JSON, with or without a rule, perhaps optional."""

    kind: type[Any]
    is_valid: Callable[[Any], bool] | None
    optional: bool

    def admits(self, value: object) -> bool:
        """Whether a value certainly matches; :func:`_value` decides about others."""
        if value is None:
            return self.optional
        if type(value) is not self.kind:
            return False
        if isinstance(value, str) and not value.isascii():
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return self.is_valid is None or self.is_valid(value)

    @classmethod
    def from_annotation(cls, hint: Any) -> "_Plain | None":
        """The description of an annotation, or None if it is not a simple one."""
        optional = False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
            if len(kinds) > 1:
                return None
            hint, optional = kinds[0], True
        is_valid = None
        if typing.get_origin(hint) is Annotated:
            hint, rule = typing.get_args(hint)
            is_valid = rule.is_valid
        return cls(hint, is_valid, optional) if hint in (str, int, float, bool) else None


class _Fields(typing.NamedTuple):
    """The fields and annotations of a dataclass by name, and the simple annotations, of fields and of tuple items."""

    fields: dict[str, dataclasses.Field[Any]]
    hints: dict[str, Any]
    plain: dict[str, _Plain]
    plain_items: dict[str, _Plain]


@functools.cache
def _fields(kind: type[Any]) -> _Fields:
    hints = typing.get_type_hints(kind, include_extras=True)
    items = {name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) is tuple}
    plain, plain_items = (
        {name: simple for name, hint in group.items() if (simple := _Plain.from_annotation(hint)) is not None}
        for group in (hints, items)
    )
    return _Fields({f.name: f for f in dataclasses.fields(kind)}, hints, plain, plain_items)


def to_dict(record: Any) -> dict[str, Any]:
    """Convert a record to a table for JSON; nested records become tables."""
    return dataclasses.asdict(record)


def from_attributes(kind: type[Record], source: object, **values: object) -> Record:
    """Create a record from an object's attributes with the names of its fields.

    Args:
        kind: A dataclass.
        source: The object, which may lack some of the attributes.
        values: Values of fields that replace or complete the attributes.

    Returns:
        The record.
    """
    attributes = {name: getattr(source, name) for name in _fields(kind).fields if hasattr(source, name)}
    return kind(**{**attributes, **values})


def _value(hint: Any, value: object, source: str, key: str, what: str, strict: bool) -> Any:
    def refuse(words: str) -> typing.NoReturn:
        raise UserError(f"{source}: {key} of {what} must be {words}, not {shorten_path(_repr.repr(value))}")

    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        rule = inner[1]
        try:  # the rule of a float decides whether it may be infinite
            result = _float(value, strict) if inner[0] is float else _value(inner[0], value, source, key, what, strict)
        except UserError:
            refuse(rule.words)
        return result if result is not None and rule.is_valid(result) else refuse(rule.words)
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
        return _read_table(hint, value, source, f"{key} of {what}", strict)
    if hint is float:
        result = _float(value, strict)
        return (
            result if result is not None and math.isfinite(result) else refuse(_WORDS[float] if strict else "a number")
        )
    if hint is str and isinstance(value, str) and _SURROGATE.search(value):
        refuse("text without half a surrogate pair")
    return value if hint in (object, type(value)) else refuse(_WORDS[hint])


def _float(value: object, strict: bool) -> float | None:
    """``value`` if it is a float, or an integer unless ``strict``, as a float; None otherwise."""
    if type(value) is int and not strict:
        with contextlib.suppress(OverflowError):
            return float(value)
    return value if isinstance(value, float) else None

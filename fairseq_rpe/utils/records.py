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
from fairseq_rpe.utils.json_files import DELETE_LINE, RESTORE, read_json_lines

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


_LIMIT = 1 << 63  # torch and NumPy hold integers in 64 bits
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
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which JSON can hold and UTF-8 cannot
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
        return _TableReader(source, what, strict).read(kind, table)
    except UserError as error:
        raise UserError(f"{error}" if strict else f"{error}: {remedy}") from None


def read_records(
    kind: type[Record], path: Path, what: str, accepts: Callable[[Mapping[str, object]], bool] = lambda row: True
) -> list[Record]:
    """Read the records of a JSON-lines file that a program wrote; none if there is no such file.

    Args:
        kind: A dataclass.
        path: The file.
        what: Name of a record, for messages, such as "the result".
        accepts: Returns whether a row is read; other rows are skipped.

    Returns:
        A record per accepted line, in order.

    Raises:
        UserError: A line is damaged or no such record; the message names the line.
    """
    rows = [(n, row) for n, row in enumerate(read_json_lines(path), start=1) if accepts(row)]
    return [read_record(kind, row, f"{path} line {n}", what, strict=False, remedy=DELETE_LINE) for n, row in rows]


@dataclasses.dataclass(frozen=True)
class _SimpleType:
    """A scalar type of JSON, with or without a rule, perhaps optional; such annotations have a fast check.

    Attributes:
        kind: str, int, float or bool.
        is_valid: Test of the rule, if there is one.
        optional: Whether None is allowed.
    """

    kind: type[Any]
    is_valid: Callable[[Any], bool] | None
    optional: bool

    def admits(self, value: object) -> bool:
        """Return whether a value certainly matches; if not, :meth:`_TableReader._convert` decides."""
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
    def from_annotation(cls, hint: Any) -> "_SimpleType | None":
        """Return the type that an annotation describes, or None if it is not a simple one."""
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
    """Fields of a dataclass by name.

    Attributes:
        fields: All fields.
        hints: Annotations of all fields.
        simple: Types of the fields with a simple annotation.
        simple_items: Types of the items of the fields that are tuples of a simple type.
    """

    fields: dict[str, dataclasses.Field[Any]]
    hints: dict[str, Any]
    simple: dict[str, _SimpleType]
    simple_items: dict[str, _SimpleType]


@functools.cache
def _fields(kind: type[Any]) -> _Fields:
    hints = typing.get_type_hints(kind, include_extras=True)
    item_hints = {name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) is tuple}
    fields = {f.name: f for f in dataclasses.fields(kind)}
    return _Fields(fields, hints, _simple_types(hints), _simple_types(item_hints))


def _simple_types(hints: Mapping[str, Any]) -> dict[str, _SimpleType]:
    """Return the simple ones among annotations by name."""
    types_by_name = {name: _SimpleType.from_annotation(hint) for name, hint in hints.items()}
    return {name: simple for name, simple in types_by_name.items() if simple is not None}


class _TableReader(typing.NamedTuple):
    """Converts one table to a record.

    Attributes:
        source: Name of the file, for messages.
        what: Name of the table within the file, for messages.
        strict: As for :func:`read_record`.
    """

    source: str
    what: str
    strict: bool

    def read(self, kind: type[Record], table: object) -> Record:
        """Convert the table to a record of a dataclass."""
        if not isinstance(table, Mapping):
            raise UserError(f"{self.source}: {self.what} is not a table")
        fields, hints, simple, simple_items = _fields(kind)
        values = {}
        for key, value in table.items():
            if key in fields:
                # Most values are of simple types. Accepting them here keeps files of thousands of rows fast.
                if key in simple and simple[key].admits(value):
                    values[key] = value
                elif key in simple_items and type(value) is list and all(map(simple_items[key].admits, value)):
                    values[key] = tuple(value)
                else:
                    values[key] = self._convert(hints[key], value, key)
            elif self.strict:
                raise UserError(f"{self.source}: {self.what} has an unknown key '{key}'{did_you_mean(key, fields)}")
        for name, field in fields.items():
            if name not in values and field.default is field.default_factory is dataclasses.MISSING:
                raise UserError(f"{self.source}: {self.what} lacks {name}")
        record = kind(**values)
        find_fault = getattr(record, "fault", None)
        if find_fault is not None and (reason := find_fault()):
            raise UserError(f"{self.source}: {self.what} {reason}")
        return record

    def _convert(self, hint: Any, value: object, key: str) -> Any:
        """Convert the value of ``key`` to the type that ``hint`` annotates, or refuse it."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            return self._convert_by_rule(arguments[0], arguments[1], value, key)
        if origin in (typing.Union, types.UnionType):
            return self._convert_to_union(arguments, value, key)
        if origin is typing.Literal:
            return value if value in arguments else self._refuse(" or ".join(map(str, arguments)), value, key)
        if origin is tuple:
            if not isinstance(value, (list, tuple)):
                self._refuse("a list", value, key)
            return tuple(self._convert(arguments[0], item, key) for item in value)
        if origin in (dict, Mapping):
            return self._convert_to_mapping(arguments[1], value, key)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._enter(key).read(hint, value)
        return self._convert_to_scalar(hint, value, key)

    def _convert_by_rule(self, hint: Any, rule: Rule, value: object, key: str) -> Any:
        try:  # the rule of a float decides whether it may be infinite
            result = _to_float(value, self.strict) if hint is float else self._convert(hint, value, key)
        except UserError:
            self._refuse(rule.words, value, key)
        return result if result is not None and rule.is_valid(result) else self._refuse(rule.words, value, key)

    def _convert_to_union(self, kinds: tuple[Any, ...], value: object, key: str) -> Any:
        """Convert to the first of ``kinds`` that admits the value; the last one refuses it."""
        if value is None and types.NoneType in kinds:
            return None
        *others, last = [kind for kind in kinds if kind is not types.NoneType]
        for kind in others:
            with contextlib.suppress(UserError):
                return self._convert(kind, value, key)
        return self._convert(last, value, key)

    def _convert_to_mapping(self, item_hint: Any, value: object, key: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse("a table", value, key)
        reader = self._enter(key)
        for name in value:
            reader._convert(str, str(name), "a name")
        return {str(name): reader._convert(item_hint, item, name) for name, item in value.items()}

    def _convert_to_scalar(self, hint: Any, value: object, key: str) -> Any:
        if hint is float:
            result = _to_float(value, self.strict)
            if result is None or not math.isfinite(result):
                self._refuse(_WORDS[float] if self.strict else "a number", value, key)
            return result
        if hint is Path:
            return Path(self._convert_to_scalar(str, value, key))
        if hint is str and isinstance(value, str) and _SURROGATE.search(value):
            self._refuse("text without half a surrogate pair", value, key)
        return value if hint in (object, type(value)) else self._refuse(_WORDS[hint], value, key)

    def _enter(self, key: str) -> "_TableReader":
        """Return the reader for the table under ``key``."""
        return self._replace(what=f"{key} of {self.what}")

    def _refuse(self, words: str, value: object, key: str) -> typing.NoReturn:
        text = shorten_path(_repr.repr(value))
        raise UserError(f"{self.source}: {key} of {self.what} must be {words}, not {text}")


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


def _to_float(value: object, strict: bool) -> float | None:
    """Return a float, or an integer unless ``strict``, as a float; None for anything else."""
    if type(value) is int and not strict:
        with contextlib.suppress(OverflowError):
            return float(value)
    return value if isinstance(value, float) else None

"""Rows of the files that known sets are shipped in: tab-separated text, JSON lines and parquet."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fairseq_rpe.core.errors import UserError, shown
from fairseq_rpe.data.sourcefiles import Entry, lines_of, opened, readable
from fairseq_rpe.utils.files import json_object
from fairseq_rpe.utils.records import Words

REMEDY = "correct it or get the file again"
_PARQUET_ROWS = 64
_HALF = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"


class NoLabel(UserError):
    """A row without its right answer; the message is but its file and line."""


@dataclass(frozen=True)
class Tsv:
    """How the tab-separated files of a set are laid out. Quotation marks are plain characters in all of them."""

    header: Words = ()  # the names of the columns, where the files do not begin with them
    columns: Mapping[str, str] = field(default_factory=dict)  # field of a row: its column, where they differ
    skip_short: bool = False  # leave out lines with too few columns, and count them


@dataclass(frozen=True)
class Wanted:
    """What a reader is to find."""

    fields: Words  # that the templates name
    split: str = "train"
    choices: Words = ()  # all answers, in the order of the hub's numbers
    tsv: Tsv = field(default_factory=Tsv)
    skipped: Counter[str] = field(default_factory=Counter)  # how many lines were left out, by reason


@dataclass(frozen=True)
class Example:
    """What a reader found: the values of the templates' fields, and the right answers."""

    source: str  # file and line
    id: str
    fields: Mapping[str, str]
    answers: Words
    group: str = ""
    choices: Words | None = None  # its own, where they are not those of the set
    rows: int = 1  # that the published count has for it


@dataclass(frozen=True)
class Row:
    """A row of a file."""

    source: str  # file and line, for messages
    number: int  # from 0 on, in the file
    values: Mapping[str, object]

    @property
    def id(self) -> str:
        """Its ``idx``, or its place in the file, which is the same in files that have none."""
        return str(idx) if type(idx := self.values.get("idx")) is int else str(self.number)

    def text(self, name: str) -> str:
        """A field's text. Raises UserError: there is none, or but half a surrogate pair."""
        value = self.values.get(name)
        if not isinstance(value, str) or _HALF.search(value):
            raise UserError(f"{self.source} has no text in '{name}': {REMEDY}")
        return value


def rows(files: Sequence[Entry], wanted: Wanted, needed: Words = ()) -> Iterator[Row]:
    """The rows of all files; of tab-separated ones the ``needed`` columns alone."""
    for entry in files:
        if entry.kind == "parquet":
            yield from _parquet(entry)
        elif entry.kind == "jsonl":
            yield from _json_lines(entry)
        else:
            yield from _tab_separated(entry, wanted, needed)


def lines(entry: Entry) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not empty, each after its file and number. Raises UserError: no UTF-8."""
    with opened(entry) as file:
        for number, line in lines_of(file, entry, REMEDY):
            source = f"{entry} line {number}"
            try:
                text = line.removeprefix(_BOM if number == 1 else b"").decode().rstrip("\r\n")
            except UnicodeDecodeError:
                raise UserError(f"{source} is not UTF-8: convert the file") from None
            if text:
                yield source, text


def _json_lines(entry: Entry) -> Iterator[Row]:
    for number, (source, text) in enumerate(lines(entry)):
        yield Row(source, number, json_object(text, entry, REMEDY, int(source.rpartition(" ")[2])))


def _tab_separated(entry: Entry, wanted: Wanted, needed: Words) -> Iterator[Row]:
    """The ``label`` may have no column at all; where one is missing in a line, the line is broken."""
    columns = {name: wanted.tsv.columns.get(name, name) for name in needed}
    header, number = wanted.tsv.header, -1
    places = {name: header.index(column) for name, column in columns.items()} if header else {}
    for source, text in lines(entry):
        cells = text.split("\t")
        if not header:
            header = tuple(cells)
            places = _places(header, columns, source)
            continue
        number += 1
        if max(places.values()) >= len(cells):
            if not wanted.tsv.skip_short:
                raise UserError(f"{source} has {len(cells)} columns instead of {len(header)}: {REMEDY}")
            wanted.skipped["too few columns"] += 1
            continue
        yield Row(source, number, {name: cells[place] for name, place in places.items()})


def _places(header: Words, columns: Mapping[str, str], source: str) -> dict[str, int]:
    for name, column in columns.items():
        if column not in header:
            if name == "label":
                raise NoLabel(source)
            raise UserError(f"{source} has no column '{column}' but {shown(', '.join(header))}: {REMEDY}")
    return {name: header.index(column) for name, column in columns.items()}


def _parquet(entry: Entry) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{entry} needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with readable(entry), parquet.ParquetFile(entry.file) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for values in batch.to_pylist():
                    yield Row(f"{entry} row {number + 1}", number, values)
                    number += 1
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{entry} is cut short or damaged ({reason}): get it again") from None
    except UnicodeDecodeError:
        raise UserError(f"{entry} row {number + 1} is not UTF-8: convert the file") from None


def chosen(value: object, source: str, choices: Words) -> str:
    """The answer that a label stands for: the words themselves, a number or true and false among the ``choices``.

    Raises NoLabel: it is absent, empty or -1; UserError: it is none of the choices.
    """
    if value is None or value == "" or (value in (-1, "-1") and type(value) is not bool):
        raise NoLabel(source)
    if isinstance(value, str) and value in choices:
        return value
    text = str(int(value)) if isinstance(value, (bool, int)) else value
    if isinstance(text, str) and text in map(str, range(len(choices))):
        return choices[int(text)]
    raise UserError(f"{source} has a label that is none of {', '.join(choices)}: {REMEDY}")

"""Rows of the files of benchmark sets: tab-separated text, JSON lines and parquet."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.data.documents import SourceFile, iter_lines, open_source, read_parquet
from fairseq_rpe.utils import records
from fairseq_rpe.utils.json_files import parse_json_object
from fairseq_rpe.utils.records import Record, TextTuple

REMEDY = "correct it or get the file again"
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"


class MissingLabel(UserError):
    """A row has no right answer; the message is its file and line only."""


@dataclass(frozen=True)
class TsvFormat:
    """Layout of tab-separated files. Quotation marks are plain characters.

    Attributes:
        header: Names of the columns, if the files do not begin with them.
        columns: Column by field, where the names differ.
        skip_short: Leave out lines with too few columns, and count them.
    """

    header: TextTuple = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_short: bool = False


@dataclass(frozen=True)
class ReaderSpec:
    """The fields, split and choices that a reader of a set reads.

    Attributes:
        fields: Fields that the template of the set names; an example has a text for each of them.
        split: ``train`` or ``valid``, for files that hold both.
        choices: All answers, in the order of the hub's labels 0, 1, …; empty if the set has no labels.
        tsv: Layout of tab-separated files.
        skipped: Number of lines that were left out, by reason; the readers add to it.
    """

    fields: TextTuple
    split: str = "train"
    choices: TextTuple = ()
    tsv: TsvFormat = field(default_factory=TsvFormat)
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Example:
    """An example of a set: values for the fields of the template, and the right answers.

    Attributes:
        source: File and line, for messages.
        id: Identifier, unique within a split.
        fields: Text of each field of the template, by the name of the field.
        answers: All right answers; a prediction may equal any of them.
        group: Name of the group whose examples are scored together; empty if each is scored alone.
        choices: Possible answers, or None if they are those of the set.
        rows: Rows of the files that make up the example, for comparison with the published number of rows.
    """

    source: str
    id: str
    fields: Mapping[str, str]
    answers: TextTuple
    group: str = ""
    choices: TextTuple | None = None
    rows: int = 1


@dataclass(frozen=True)
class RawRow:
    """A row of a file.

    Attributes:
        source: File and line, for messages.
        number: Number of the row in its file, from 0.
        values: Values as the file format has them, by the name of the column or key.
    """

    source: str
    number: int
    values: Mapping[str, object]

    @property
    def id(self) -> str:
        """The column ``idx``, or else the number of the row."""
        return str(idx) if type(idx := self.values.get("idx")) is int else str(self.number)

    def read(self, kind: type[Record], values: object = None) -> Record:
        """Convert the row to a record; further columns are ignored.

        Args:
            kind: Dataclass of the record.
            values: Values to convert in place of those of the whole row.

        Raises:
            UserError: A value is missing or has another type.
        """
        values = self.values if values is None else values
        return records.read_record(kind, values, self.source, "the row", strict=False, remedy=REMEDY)

    def label(self, choices: TextTuple) -> str:
        """Return the answer that the column ``label`` stands for; see :func:`label_text`."""
        return label_text(self.values.get("label"), self.source, choices)

    def text(self, name: str) -> str:
        """Return the text of a column.

        Args:
            name: Name of the column.

        Raises:
            UserError: The row has no such column, or its value is not a text or has half a surrogate pair.
        """
        value = self.values.get(name)
        if not isinstance(value, str) or _SURROGATE.search(value):
            raise UserError(f"{self.source} has no text in '{name}': {REMEDY}")
        return value


def read_rows(files: Sequence[SourceFile], spec: ReaderSpec, needed: TextTuple = ()) -> Iterator[RawRow]:
    """Read files one after another.

    Args:
        files: Files of one split, in any of the formats.
        spec: Layout of tab-separated files, and the count of lines that are left out.
        needed: Fields to read from tab-separated files; other formats yield all fields.

    Yields:
        The rows, in the order of the files.

    Raises:
        MissingLabel: A tab-separated file has no column for ``label``.
        UserError: A file is damaged, is not UTF-8, or has no column for a field.
    """
    for file in files:
        if file.format == "parquet":
            yield from _parquet_rows(file)
        elif file.format == "jsonl":
            yield from _json_rows(file)
        else:
            yield from _tsv_rows(file, spec, needed)


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        source: File and line number, for messages.
        number: Number of the line in its file, from 1; empty lines count.
        text: Text without the line break.
    """

    source: str
    number: int
    text: str


def read_lines(source: SourceFile) -> Iterator[Line]:
    """Read the lines of a file that are not empty.

    Args:
        source: File in UTF-8, with or without a byte order mark.

    Yields:
        The lines.

    Raises:
        UserError: The file is not UTF-8.
    """
    with open_source(source) as file:
        for number, line in iter_lines(file, source, REMEDY):
            name = f"{source} line {number}"
            try:
                text = line.removeprefix(_BOM if number == 1 else b"").decode().rstrip("\r\n")
            except UnicodeDecodeError:
                raise UserError(f"{name} is not UTF-8: convert the file") from None
            if text:
                yield Line(name, number, text)


def _json_rows(file: SourceFile) -> Iterator[RawRow]:
    for row_number, line in enumerate(read_lines(file)):
        yield RawRow(line.source, row_number, parse_json_object(line.text, file, REMEDY, line.number))


def _tsv_rows(file: SourceFile, spec: ReaderSpec, needed: TextTuple) -> Iterator[RawRow]:
    """Yield rows of a tab-separated file; raise MissingLabel if it has no column for ``label``."""
    columns = {name: spec.tsv.columns.get(name, name) for name in needed}
    lines = read_lines(file)
    header = spec.tsv.header
    if not header:
        first = next(lines, None)
        if first is None:
            return
        header = tuple(first.text.split("\t"))
        _check_columns(header, columns, first.source)
    indices = {name: header.index(column) for name, column in columns.items()}
    for row_number, line in enumerate(lines):  # rows that are left out have a number, too
        cells = line.text.split("\t")
        if max(indices.values()) < len(cells):
            yield RawRow(line.source, row_number, {name: cells[index] for name, index in indices.items()})
        elif spec.tsv.skip_short:
            spec.skipped["too few columns"] += 1
        else:
            raise UserError(f"{line.source} has {len(cells)} columns instead of {len(header)}: {REMEDY}")


def _check_columns(header: TextTuple, columns: Mapping[str, str], source: str) -> None:
    """Refuse a header that lacks a column; ``columns`` are the names of the columns by field."""
    for name, column in columns.items():
        if column not in header:
            if name == "label":
                raise MissingLabel(source)
            raise UserError(f"{source} has no column '{column}' but {shorten_path(', '.join(header))}: {REMEDY}")


def _parquet_rows(file: SourceFile) -> Iterator[RawRow]:
    for number, (source, values) in enumerate(read_parquet(file)):
        yield RawRow(source, number, values)


def label_text(value: object, source: str, choices: TextTuple) -> str:
    """Return the answer that a label stands for.

    Args:
        value: Label as the file has it: one of the choices, or the index of a choice, or a boolean as such an index.
        source: File and line, for messages.
        choices: All answers, in the order of the hub's labels.

    Raises:
        MissingLabel: The label is absent, empty or -1.
        UserError: The label is not one of the choices.
    """
    if value is None or value == "" or (value in (-1, "-1") and type(value) is not bool):
        raise MissingLabel(source)
    if isinstance(value, str) and value in choices:
        return value
    text = str(int(value)) if isinstance(value, (bool, int)) else value
    if isinstance(text, str) and text in map(str, range(len(choices))):
        return choices[int(text)]
    raise UserError(f"{source} has a label that is none of {', '.join(choices)}: {REMEDY}")

"""Rows of the files of benchmark sets: tab-separated text, JSON lines and parquet."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.data.documents import SourceFile, iter_lines, open_source, source_errors
from fairseq_rpe.utils.files import parse_json_object
from fairseq_rpe.utils.records import TextTuple

REMEDY = "correct it or get the file again"
_PARQUET_ROWS = 64  # per batch
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
    """What a reader reads.

    Attributes:
        fields: Fields that the template of the set names.
        split: Name of the split.
        choices: All answers, in the order of the hub's labels.
        tsv: Layout of tab-separated files.
        skipped: Counts the lines that were left out, by reason.
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
        id: Unique within a split.
        fields: Texts by field.
        answers: All right answers.
        group: Examples of one group are scored together.
        choices: Possible answers, if they are not those of the set.
        rows: Number of rows that the published count has for it.
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
        values: Values by column.
    """

    source: str
    number: int
    values: Mapping[str, object]

    @property
    def id(self) -> str:
        """The column ``idx``, or else the number of the row."""
        return str(idx) if type(idx := self.values.get("idx")) is int else str(self.number)

    def text(self, name: str) -> str:
        """Return the text of a column.

        Raises:
            UserError: It is not a text, or has half a surrogate pair.
        """
        value = self.values.get(name)
        if not isinstance(value, str) or _SURROGATE.search(value):
            raise UserError(f"{self.source} has no text in '{name}': {REMEDY}")
        return value


def read_rows(files: Sequence[SourceFile], spec: ReaderSpec, needed: TextTuple = ()) -> Iterator[RawRow]:
    """Yield the rows of files.

    Args:
        files: The files.
        spec: What the reader reads.
        needed: Fields to read from tab-separated files; other formats yield all fields.
    """
    for file in files:
        if file.format == "parquet":
            yield from _parquet_rows(file)
        elif file.format == "jsonl":
            yield from _json_rows(file)
        else:
            yield from _tsv_rows(file, spec, needed)


def read_lines(source: SourceFile) -> Iterator[tuple[str, str]]:
    """Yield file-and-line and text of the lines of a file that are not empty.

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
                yield name, text


def _json_rows(file: SourceFile) -> Iterator[RawRow]:
    for number, (source, text) in enumerate(read_lines(file)):
        yield RawRow(source, number, parse_json_object(text, file, REMEDY, int(source.rpartition(" ")[2])))


def _tsv_rows(file: SourceFile, spec: ReaderSpec, needed: TextTuple) -> Iterator[RawRow]:
    """Yield rows of a tab-separated file; raise MissingLabel if it has no column for ``label``."""
    columns = {name: spec.tsv.columns.get(name, name) for name in needed}
    header, number = spec.tsv.header, -1
    indices = {name: header.index(column) for name, column in columns.items()} if header else {}
    for source, text in read_lines(file):
        cells = text.split("\t")
        if not header:
            header = tuple(cells)
            indices = _column_indices(header, columns, source)
            continue
        number += 1
        if max(indices.values()) >= len(cells):
            if not spec.tsv.skip_short:
                raise UserError(f"{source} has {len(cells)} columns instead of {len(header)}: {REMEDY}")
            spec.skipped["too few columns"] += 1
            continue
        yield RawRow(source, number, {name: cells[index] for name, index in indices.items()})


def _column_indices(header: TextTuple, columns: Mapping[str, str], source: str) -> dict[str, int]:
    for name, column in columns.items():
        if column not in header:
            if name == "label":
                raise MissingLabel(source)
            raise UserError(f"{source} has no column '{column}' but {shorten_path(', '.join(header))}: {REMEDY}")
    return {name: header.index(column) for name, column in columns.items()}


def _parquet_rows(source: SourceFile) -> Iterator[RawRow]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{source} needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with source_errors(source), parquet.ParquetFile(source.local_path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for values in batch.to_pylist():
                    yield RawRow(f"{source} row {number + 1}", number, values)
                    number += 1
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{source} is cut short or damaged ({reason}): get it again") from None
    except UnicodeDecodeError:
        raise UserError(f"{source} row {number + 1} is not UTF-8: convert the file") from None


def label_text(value: object, source: str, choices: TextTuple) -> str:
    """Return the answer of a label.

    Args:
        value: One of the choices, or the index of a choice, or a boolean as such an index.
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

"""Reader of SCROLLS: a text after its question, and one row for each reference answer."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import SourceFile
from fairseq_rpe.questions.readers.tables import REMEDY, Example, MissingLabel, RawRow, ReaderSpec, read_rows
from fairseq_rpe.utils import records

_BREAK = "\n\n"
# Each option begins a line; the article begins after the first empty line after the last option.
_OPTIONS = re.compile(r"\s*\(A\)(.*?)\n\s*\(B\)(.*?)\n\s*\(C\)(.*?)\n\s*\(D\)(.*?)\n\n", re.DOTALL)


@dataclass(frozen=True)
class _Row:
    id: str
    input: str
    output: str | None = None
    pid: str | None = None  # unique for each row, while rows of one example share their id


def scrolls(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read SCROLLS: one example per id, with the outputs of all rows of that id as answers.

    The fields of the template say what an input consists of: ``document``; ``query`` and document; or query,
    ``options`` and document, separated by empty lines. The files are read twice, so that long texts need not stay in
    memory.

    Args:
        files: Files of one split.
        spec: What to read.

    Raises:
        UserError: A ``pid`` occurs twice, or rows of one id have different inputs.
    """
    outputs: dict[str, list[str]] = {}
    input_digests: dict[str, bytes] = {}
    pids: set[str] = set()
    for row in read_rows(files, spec):
        record = _read(row)
        if record.output is None:
            raise MissingLabel(row.source)
        if record.pid in pids:
            raise UserError(f"{row.source}: pid '{record.pid}' was there before: {REMEDY}")
        pids.update([record.pid] if record.pid else [])
        digest = blake2b(record.input.encode(errors="surrogatepass"), digest_size=16).digest()
        if input_digests.setdefault(record.id, digest) != digest:
            raise UserError(f"{row.source}: id '{record.id}' has another input than in a row before: {REMEDY}")
        outputs.setdefault(record.id, []).append(record.output)
    for row in read_rows(files, spec):
        record = _read(row)
        if answers := outputs.pop(record.id, None):
            fields, options = _split_input(record.input, spec.fields, row.source)
            if options:
                answers = [_normalize_whitespace(answer) for answer in answers]
            yield Example(row.source, record.id, fields, tuple(answers), choices=options or None, rows=len(answers))


def _read(row: RawRow) -> _Row:
    return records.read_record(_Row, row.values, row.source, "the row", strict=False, remedy=REMEDY)


def _split_input(text: str, fields: Sequence[str], source: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts of an input by field, and the texts of the options."""
    if "query" not in fields:
        return {"document": text}, ()
    query, separator, remainder = text.partition(_BREAK)
    if not separator:
        raise UserError(f"{source} has an input without an empty line between question and text: {REMEDY}")
    if "options" not in fields:
        return {"query": query, "document": remainder}, ()
    match = _OPTIONS.match(remainder)
    if match is None:
        raise UserError(f"{source} has an input without options (A) to (D), a line each, before the text: {REMEDY}")
    options = remainder[: match.end() - len(_BREAK)]
    return {"query": query, "options": options, "document": remainder[match.end() :]}, tuple(
        map(_normalize_whitespace, match.groups())
    )


def _normalize_whitespace(text: str) -> str:
    """Normalise white space: options in inputs are wrapped and indented, outputs are not."""
    return " ".join(text.split())

"""Examples of SCROLLS: a text with its question before it, and rows of one id that are references of one example."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.sourcefiles import Entry
from fairseq_rpe.questions.readers.tables import REMEDY, Example, NoLabel, Row, Wanted, rows
from fairseq_rpe.utils import records

_BREAK = "\n\n"
# Each option begins a line; the article comes after the first empty line behind the last.
_OPTIONS = re.compile(r"\s*\(A\)(.*?)\n\s*\(B\)(.*?)\n\s*\(C\)(.*?)\n\s*\(D\)(.*?)\n\n", re.DOTALL)


@dataclass(frozen=True)
class _Row:
    id: str
    input: str
    output: str | None = None
    pid: str | None = None  # of the row: ids are of examples


def scrolls(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """One example an id, where it is first met, with its input and the outputs of all rows of the id.

    The templates' fields say what an input consists of: ``document`` alone, ``query`` and document, or query,
    ``options`` and document, each after an empty line. The files are read twice, so that their long texts need not be
    kept.

    Raises UserError: a ``pid`` that was there before, or rows of one id with different inputs.
    """
    outputs: dict[str, list[str]] = {}
    inputs: dict[str, bytes] = {}  # digests
    pids: set[str] = set()
    for row in rows(files, wanted):
        found = _read(row)
        if found.output is None:
            raise NoLabel(row.source)
        if found.pid in pids:
            raise UserError(f"{row.source}: pid '{found.pid}' was there before: {REMEDY}")
        pids.update([found.pid] if found.pid else [])
        digest = blake2b(found.input.encode(errors="surrogatepass"), digest_size=16).digest()
        if inputs.setdefault(found.id, digest) != digest:
            raise UserError(f"{row.source}: id '{found.id}' has another input than in a row before: {REMEDY}")
        outputs.setdefault(found.id, []).append(found.output)
    for row in rows(files, wanted):
        found = _read(row)
        if answers := outputs.pop(found.id, None):
            fields, options = _parts(found.input, wanted.fields, row.source)
            if options:
                answers = [_plain(answer) for answer in answers]
            yield Example(row.source, found.id, fields, tuple(answers), choices=options or None, rows=len(answers))


def _read(row: Row) -> _Row:
    return records.read(_Row, row.values, row.source, "the row", strict=False, remedy=REMEDY)


def _parts(text: str, fields: Sequence[str], source: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The parts of an input by the names of the fields, and the options' texts."""
    if "query" not in fields:
        return {"document": text}, ()
    query, found, rest = text.partition(_BREAK)
    if not found:
        raise UserError(f"{source} has an input without an empty line between question and text: {REMEDY}")
    if "options" not in fields:
        return {"query": query, "document": rest}, ()
    match = _OPTIONS.match(rest)
    if match is None:
        raise UserError(f"{source} has an input without options (A) to (D), a line each, before the text: {REMEDY}")
    options = rest[: match.end() - len(_BREAK)]
    return {"query": query, "options": options, "document": rest[match.end() :]}, tuple(map(_plain, match.groups()))


def _plain(text: str) -> str:
    """Options are wrapped and indented in other ways than in the outputs."""
    return " ".join(text.split())

r"""Reader of SCROLLS.

A row has one input and one reference answer; an example with several reference answers has several rows of one ``id``::

    {"id": "q1", "pid": "q1_0", "input": "Who sings?\n\nIn the hall Ann sings.", "output": "Ann"}
    {"id": "q1", "pid": "q1_1", "input": "Who sings?\n\nIn the hall Ann sings.", "output": "It is Ann."}

With options (QuALITY) they are between the question and the document, each on a new line, after optional
white space::

    "Who sings?\n\n (A) Ann\n (B) Bob\n (C) Cid\n (D) Dot\n\nIn the hall Ann sings."
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import SourceFile
from fairseq_rpe.questions.readers.tables import REMEDY, Example, MissingLabel, ReaderSpec, read_rows

_EMPTY_LINE = "\n\n"  # separates the segments of an input
# The text of each option; the document begins after the first empty line after the last option.
_OPTIONS = re.compile(r"\s*\(A\)(.*?)\n\s*\(B\)(.*?)\n\s*\(C\)(.*?)\n\s*\(D\)(.*?)\n\n", re.DOTALL)


@dataclass(frozen=True)
class _Row:
    """The keys of a row that are read; ``output`` is None where the answers are not public."""

    id: str
    input: str
    output: str | None = None
    pid: str | None = None  # unique for each row, while rows of one example share their id


def read_scrolls(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read SCROLLS: one example per id, with the outputs of all rows of that id as answers.

    The fields of the template say what an input consists of: ``document``; ``query`` and document; or query,
    ``options`` and document, separated by empty lines. The files are read twice, so that long texts need not stay in
    memory: first the answers, then the inputs.

    Args:
        files: Files of one split.
        spec: Fields of the set. The other attributes are not used: rows are JSON lines or parquet, and
            their answers are texts, not numbers of classes.

    Yields:
        Examples in the order of the first row of each id.

    Raises:
        MissingLabel: A row has no output.
        UserError: A file is damaged, a ``pid`` occurs twice, rows of one id have different inputs, or an input has no
            question or options where the template names them.
    """
    answers_by_id = _collect_answers(files, spec)
    for row in read_rows(files, spec):
        record = row.read(_Row)
        # pop: the first row of an id makes the example, and the next rows find nothing
        if answers := answers_by_id.pop(record.id, None):
            fields, options = _split_input(record.input, spec.fields, row.source)
            if options:
                answers = [_normalize_whitespace(answer) for answer in answers]
            yield Example(row.source, record.id, fields, tuple(answers), choices=options or None, rows=len(answers))


def _collect_answers(files: Sequence[SourceFile], spec: ReaderSpec) -> dict[str, list[str]]:
    """Return the outputs of all rows by id; raise UserError if rows contradict each other."""
    answers_by_id: dict[str, list[str]] = {}
    input_digests: dict[str, bytes] = {}  # by id
    pids: set[str] = set()
    for row in read_rows(files, spec):
        record = row.read(_Row)
        if record.output is None:
            raise MissingLabel(row.source)
        if record.pid in pids:
            raise UserError(f"{row.source}: pid '{record.pid}' was there before: {REMEDY}")
        if record.pid:
            pids.add(record.pid)
        digest = blake2b(record.input.encode(errors="surrogatepass"), digest_size=16).digest()
        if input_digests.setdefault(record.id, digest) != digest:
            raise UserError(f"{row.source}: id '{record.id}' has another input than in a row before: {REMEDY}")
        answers_by_id.setdefault(record.id, []).append(record.output)
    return answers_by_id


def _split_input(text: str, fields: Sequence[str], source: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts of an input by field, and the texts of the options."""
    if "query" not in fields:
        return {"document": text}, ()
    query, separator, remainder = text.partition(_EMPTY_LINE)
    if not separator:
        raise UserError(f"{source} has an input without an empty line between question and text: {REMEDY}")
    if "options" not in fields:
        return {"query": query, "document": remainder}, ()
    match = _OPTIONS.match(remainder)
    if match is None:
        raise UserError(f"{source} has an input without options (A) to (D), a line each, before the text: {REMEDY}")
    option_lines = remainder[: match.end() - len(_EMPTY_LINE)]
    option_texts = tuple(map(_normalize_whitespace, match.groups()))
    return {"query": query, "options": option_lines, "document": remainder[match.end() :]}, option_texts


def _normalize_whitespace(text: str) -> str:
    """Normalise white space: options in inputs are wrapped and indented, outputs are not."""
    return " ".join(text.split())

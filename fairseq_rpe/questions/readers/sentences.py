"""Readers of sets with one labelled row per example: GLUE and most of SuperGLUE."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import SourceFile
from fairseq_rpe.questions.readers.tables import (
    REMEDY,
    Example,
    MissingLabel,
    RawRow,
    ReaderSpec,
    read_lines,
    read_rows,
)
from fairseq_rpe.utils.records import Natural


def read_labelled(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read rows whose ``label`` is one of the choices of the set.

    Args:
        files: Files of one split.
        spec: Fields, split and choices of the set.

    Yields:
        One example for each row.

    Raises:
        MissingLabel: A row has no label.
        UserError: A file is damaged, a field has no text, or a label is none of the choices.
    """
    for row in read_rows(files, spec, (*spec.fields, "label")):
        yield _example(row, spec, row.label(spec.choices))


def _example(row: RawRow, spec: ReaderSpec, answer: str) -> Example:
    return Example(row.source, row.id, {name: row.text(name) for name in spec.fields}, (answer,))


def read_stsb(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read STS-B: a ``label`` from 0 to 5, rounded as in T5 to the nearest multiple of 0.2 (ties to the even one).

    Args:
        files: Files of one split.
        spec: Fields, split and choices of the set.

    Yields:
        One example for each row.

    Raises:
        MissingLabel: A row has no label.
        UserError: A file is damaged, a field has no text, or a label is no number from 0 to 5.
    """
    for row in read_rows(files, spec, (*spec.fields, "label")):
        score = _parse_score(row.values.get("label"), row.source)
        yield _example(row, spec, f"{round(score * 5) / 5:.1f}")


def _parse_score(label: object, source: str) -> float:
    """Return a label of STS-B as a number from 0 to 5."""
    if label in (None, "", -1, "-1"):
        raise MissingLabel(source)
    try:
        score = float(label) if isinstance(label, (str, int, float)) else -1.0
    except ValueError:
        score = -1.0
    if not 0 <= score <= 5:
        raise UserError(f"{source} has a label that is no number from 0 to 5: {REMEDY}")
    return score


def read_copa(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read COPA as :func:`read_labelled` does, and check that ``question`` is ``cause`` or ``effect``.

    Args:
        files: Files of one split.
        spec: Fields, split and choices of the set.

    Yields:
        One example for each row.

    Raises:
        MissingLabel: A row has no label.
        UserError: A file is damaged, a field has no text, or a label or question is none of the choices.
    """
    for example in read_labelled(files, spec):
        if example.fields["question"] not in ("cause", "effect"):
            raise UserError(f"{example.source} has a 'question' that is neither cause nor effect: {REMEDY}")
        yield example


def read_mrpc(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read MRPC as :func:`read_labelled` does; its original text file has both splits.

    Args:
        files: Files of one split, or the original file and the list of the pairs that are the validation split.
        spec: Fields, split and choices of the set.

    Yields:
        One example for each row of the split.

    Raises:
        MissingLabel: A row has no label.
        UserError: A file is damaged, a field has no text, or a label is none of the choices.
    """
    if len(files) < 2 or files[0].format == "parquet":
        yield from read_labelled(files, spec)
        return
    rows_file, valid_pairs_file = files
    valid_pairs = set()
    for line in read_lines(valid_pairs_file):
        pair = tuple(line.text.split("\t"))
        if len(pair) != 2:
            raise UserError(f"{line.source} is no pair of numbers: {REMEDY}")
        valid_pairs.add(pair)
    first_id, second_id = "#1 ID", "#2 ID"  # columns of the sentences of a pair
    for row in read_rows([rows_file], spec, (*spec.fields, "label", first_id, second_id)):
        is_valid = (row.text(first_id), row.text(second_id)) in valid_pairs
        if is_valid == (spec.split == "valid"):
            yield _example(row, spec, row.label(spec.choices))


@dataclass(frozen=True)
class _Spans:
    """The noun (1) and the pronoun (2) of a row: the words, and the index of the first one in the text."""

    span1_text: str
    span1_index: Natural
    span2_text: str
    span2_index: Natural


def read_wsc(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read WSC with marked spans, ``* noun *`` and ``# pronoun #``.

    A published span is a text and the index of its first word. Matching ignores case, white space and surrounding
    punctuation, because a few spans differ from the text; spans that do not match stay unmarked, as in T5.

    Args:
        files: Files of one split.
        spec: Fields, split and choices of the set.

    Yields:
        One example for each row.

    Raises:
        MissingLabel: A row has no label.
        UserError: A file is damaged, a field has no text, or a span begins behind the last word.
    """
    for row in read_rows(files, spec):
        spans = row.read(_Spans, row.values.get("target", row.values))  # original files nest the spans
        text = _mark_spans(row.text("text"), spans, row.source)
        yield Example(row.source, row.id, {"text": text}, (row.label(spec.choices),))


class _Mark(NamedTuple):
    """A mark to insert into a text. Marks are sorted by these fields.

    Attributes:
        position: Character before which the mark goes.
        is_begin: Whether a span begins here; at one character, ends go before beginnings.
        nesting: Key for spans that begin or end at one character: the inner span ends first and begins last.
        text: The mark.
    """

    position: int
    is_begin: bool
    nesting: int
    text: str


def _mark_spans(text: str, spans: _Spans, source: str) -> str:
    """Return the text with stars around the noun and hashes around the pronoun."""
    marks: list[_Mark] = []
    for sign, words, index in (("*", spans.span1_text, spans.span1_index), ("#", spans.span2_text, spans.span2_index)):
        if span := _find_span(text, words, index, source):
            begin, end = span
            marks += [_Mark(begin, True, -end, f"{sign} "), _Mark(end, False, -begin, f" {sign}")]
    # From the last one, so that the positions of the others stay valid.
    for mark in sorted(marks, reverse=True):
        text = text[: mark.position] + mark.text + text[mark.position :]
    return text


def _find_span(text: str, words: str, index: int, source: str) -> tuple[int, int] | None:
    """Return begin and end (characters) of words whose first one is word number ``index``; None if unmatched."""
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    if index >= len(starts):
        raise UserError(f"{source} has a span at word {index} of a text of {len(starts)} words: {REMEDY}")
    pattern = r"\s+".join(map(re.escape, words.rstrip(" .,;:!?\n").split()))
    match = re.compile(rf"[^\w\s]*({pattern})", re.IGNORECASE).match(text, starts[index]) if pattern else None
    return match.span(1) if match else None

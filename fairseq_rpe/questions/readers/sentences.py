"""Examples of sets that have a row for each, with a label: GLUE's, and most of SuperGLUE's."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.sourcefiles import Entry
from fairseq_rpe.questions.readers.tables import REMEDY, Example, NoLabel, Row, Wanted, chosen, lines, rows
from fairseq_rpe.utils import records
from fairseq_rpe.utils.records import Natural


def labelled(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """Fields that are texts, and one of the set's choices as ``label``."""
    for row in rows(files, wanted, (*wanted.fields, "label")):
        yield _example(row, wanted, chosen(row.values.get("label"), row.source, wanted.choices))


def _example(row: Row, wanted: Wanted, answer: str) -> Example:
    return Example(row.source, row.id, {name: row.text(name) for name in wanted.fields}, (answer,))


def scored(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """A ``label`` from 0 to 5, written as T5 does: the nearest multiple of 0.2, halves to the even one."""
    for row in rows(files, wanted, (*wanted.fields, "label")):
        value = row.values.get("label")
        if value in (None, "", -1, "-1"):
            raise NoLabel(row.source)
        try:
            score = float(value) if isinstance(value, (str, int, float)) else -1.0
        except ValueError:
            score = -1.0
        if not 0 <= score <= 5:
            raise UserError(f"{row.source} has a label that is no number from 0 to 5: {REMEDY}")
        yield _example(row, wanted, f"{round(score * 5) / 5:.1f}")


def cause_or_effect(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """COPA: as :func:`labelled`, and ``question`` says which of the two is asked for."""
    for example in labelled(files, wanted):
        if example.fields["question"] not in ("cause", "effect"):
            raise UserError(f"{example.source} has a 'question' that is neither cause nor effect: {REMEDY}")
        yield example


def paraphrases(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """MRPC: as :func:`labelled`; its original text file holds both splits, and a list of pairs says which is valid."""
    if len(files) < 2 or files[0].kind == "parquet":
        yield from labelled(files, wanted)
        return
    pairs = set()
    for source, text in lines(files[1]):
        if text.count("\t") != 1:
            raise UserError(f"{source} is no pair of numbers: {REMEDY}")
        pairs.add(tuple(text.split("\t")))
    for row in rows(files[:1], wanted, (*wanted.fields, "label", "#1 ID", "#2 ID")):
        if ((row.text("#1 ID"), row.text("#2 ID")) in pairs) == (wanted.split == "valid"):
            yield _example(row, wanted, chosen(row.values.get("label"), row.source, wanted.choices))


@dataclass(frozen=True)
class _Spans:
    span1_text: str
    span1_index: Natural
    span2_text: str
    span2_index: Natural


def marked(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """WSC in its marked form: ``* noun *`` and ``# pronoun #``; a span is given by its text and its first word.

    A few published spans are not spelled as the text has them. White space, letter case and punctuation around them are
    of no account; what is found in no way stays unmarked, as in T5.
    """
    for row in rows(files, wanted):
        spans = records.read(_Spans, row.values.get("target", row.values), row.source, "the row", False, REMEDY)
        text = row.text("text")
        marks: list[tuple[int, int, int, str]] = []
        noun, pronoun = (spans.span1_text, spans.span1_index), (spans.span2_text, spans.span2_index)
        for mark, (words, index) in (("*", noun), ("#", pronoun)):
            if found := _span(text, words, index, row.source):
                begin, end = found
                # behind each other at the same place: ends of spans, the inner one's first, and beginnings, the outer
                marks += [(begin, 1, -end, f"{mark} "), (end, 0, -begin, f" {mark}")]
        # from the last on, so that the places before it stay what they are
        for place, _, _, mark in sorted(marks, reverse=True):
            text = text[:place] + mark + text[place:]
        answer = chosen(row.values.get("label"), row.source, wanted.choices)
        yield Example(row.source, row.id, {"text": text}, (answer,))


def _span(text: str, words: str, index: int, source: str) -> tuple[int, int] | None:
    """Where in a text some words begin and end; the first is its word number ``index``, from 0 on."""
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    if index >= len(starts):
        raise UserError(f"{source} has a span at word {index} of a text of {len(starts)} words: {REMEDY}")
    pattern = r"\s+".join(map(re.escape, words.rstrip(" .,;:!?\n").split()))
    found = re.compile(rf"[^\w\s]*({pattern})", re.IGNORECASE).match(text, starts[index]) if pattern else None
    return found.span(1) if found else None

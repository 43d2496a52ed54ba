"""The chapter on effective lengths: a table with a row for each method."""

from collections.abc import Sequence
from dataclasses import replace

from fairseq_rpe.reports.effective_length import (
    DEFINITION,
    LEARNED_MARGIN,
    NO_VERDICT,
    NOLIMA,
    NOLIMA_SHARE,
    NOT_LEARNED,
    RULER,
    RULER_PERCENT,
    MethodLength,
)
from fairseq_rpe.reports.page import Block, Part
from fairseq_rpe.reports.sweep_results import SOLVED_PERCENT, group_by
from fairseq_rpe.utils.table import Cell, Table, TableRow, number_cell, text_cell

_UNLEARNED_MARK = "†"  # after a base score below SOLVED_PERCENT


def chapter(blocks: Sequence[Block]) -> Part:
    """Return the chapter with the blocks of :func:`perplexity_blocks` or :func:`score_blocks`."""
    return Part("effective-length", "Effective length", blocks)


def perplexity_blocks(rows: Sequence[MethodLength]) -> list[Block]:
    """Build the table of effective lengths by perplexity, with a row for each method; nothing without rows."""
    if not rows:
        return []
    caption = (
        "Effective length in tokens by perplexity: the largest evaluated length up to which Definition 0.1 holds, with "
        f"δ = {rows[0].threshold:g}; one-sided, a lower perplexity is no deviation. Deviations count as measured, "
        f"without their intervals. {_about_cells(rows)}"
    )
    table_rows = []
    for method, of_method in group_by(rows, lambda row: row.method).items():
        first = of_method[0]
        cells = [Cell(str(first.trained_at), first.trained_at), *(row.cell() for row in of_method)]
        table_rows.append(TableRow(method, [*cells, Cell(str(first.mean.evaluated_to), first.mean.evaluated_to)]))
    return [Table(caption, ["encoding", "trained at", DEFINITION, "one-sided", "evaluated to"], table_rows)]


def score_blocks(rows: Sequence[MethodLength]) -> list[Block]:
    """Build the table of effective lengths by score, with a row for each task and method; nothing without rows."""
    if not rows:
        return []
    score = "mean exact match over depths" if rows[0].evidence == "exact match" else "score"
    caption = (
        f"Effective length by {score}: the largest evaluated length that passes together with all shorter ones. "
        f"{_about_scores()} {_about_cells(rows)}"
    )
    if any(row.base_score is not None and row.base_score < SOLVED_PERCENT for row in rows):
        caption += f" {_UNLEARNED_MARK}: the base score is below {SOLVED_PERCENT:g} %."
    if any(row.mean.remark == NOT_LEARNED for row in rows):
        caption += (
            f" {NOT_LEARNED.capitalize()}: {100 * NOLIMA_SHARE:g} % of the base score exceed the accuracy of a guess "
            f"by less than {LEARNED_MARGIN:g} percentage points."
        )
    table_rows = []
    for (task, method), pair in group_by(rows, lambda row: (row.task, row.method)).items():
        first = pair[0]
        base = number_cell(first.base_score, ".1f")
        if first.base_score is not None and first.base_score < SOLVED_PERCENT:
            base = replace(base, text=f"{base.text} {_UNLEARNED_MARK}")
        cells = [text_cell(method), Cell(f"{first.trained_at} {first.unit}", first.trained_at), base]
        cells += [*(row.cell() for row in pair), Cell(str(first.mean.evaluated_to), first.mean.evaluated_to)]
        table_rows.append(TableRow(task, cells))
    return [Table(caption, ["task", "method", "trained at", "base score", RULER, NOLIMA, "evaluated to"], table_rows)]


def _about_scores() -> str:
    """Return the two definitions in words."""
    return (
        f"{RULER}: the score exceeds {RULER_PERCENT:g} %, the score of Llama2-7B-chat at 4,096 tokens (arXiv "
        f"2404.06654). {NOLIMA}: the score is at least {100 * NOLIMA_SHARE:g} % of the base score, the method's best "
        "score at trained lengths (arXiv 2502.05167)."
    )


def _about_cells(rows: Sequence[MethodLength]) -> str:
    """Return in words what the cells of a table show."""
    text = "≥: all evaluated lengths pass."
    if any(row.mean.length == 0 for row in rows):
        text += " None: the shortest evaluated length does not pass."
    if any(len(row.seeds) > 1 for row in rows):
        text += " The mean over seeds decides; in brackets, the range over seeds where they differ."
    if any(row.mean.remark == NO_VERDICT for row in rows):
        is_perplexity = rows[0].evidence == "perplexity"
        reason = "the model does not use its context yet" if is_perplexity else "no trained length was evaluated"
        text += f" {NO_VERDICT.capitalize()}: {reason}."
    return text

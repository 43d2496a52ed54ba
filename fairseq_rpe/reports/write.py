"""Writes a sweep's report: tables, figures, TensorBoard and the page."""

from collections.abc import Callable
from functools import partial

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.figures import style
from fairseq_rpe.reports import extrapolation_definition, page, tensorboard
from fairseq_rpe.reports.chapters import asked_questions, exact_match, perplexities, published_comparison, training
from fairseq_rpe.reports.extrapolation_definition import DELTA
from fairseq_rpe.reports.page import Findings, Section
from fairseq_rpe.reports.question_scores import Scores, collect
from fairseq_rpe.reports.report_files import Places
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.sweeps.sweep_record import State, SweepFolder
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import latex_text


def check(folder: SweepFolder, delta: float | None) -> State:
    """What is on record of a sweep that ``delta`` can be asked of.

    Raises UserError: the folder holds no sweep, or one that is not on text and ``delta`` is given.
    """
    state = folder.state()
    if delta is not None and state.kind != "text":
        what = "counts exact answers" if state.kind == "algorithms" else "scores answers"
        raise UserError(f"--delta is about perplexity and {folder.path} {what}: drop it")
    return state


def write(folder: SweepFolder, delta: float | None = None, width: str | None = None, latex: bool = False) -> Section:
    """Write a sweep's report into its folder.

    Args:
        folder: of the sweep.
        delta: δ of Definition 0.1, ``DELTA`` without one.
        width: ``column`` or ``page`` of a paper, for the PNG and PDF figures; the page's figures fit a screen.
        latex: whether the tables are written as LaTeX as well.

    Returns:
        What the page says about the sweep.

    Raises:
        UserError: what :func:`check` refuses, or none of its runs is finished.
    """
    state = published_comparison.completed(check(folder, delta))
    found, at, runs = collect(folder, state), Places(folder, state), training.runs(folder, state)
    others = []
    build: Callable[[], Findings]
    if isinstance(found, Perplexities):
        judged = extrapolation_definition.judge(found, extrapolation_definition.predict(folder, state))
        others.append(extrapolation_definition.csv(judged, delta or DELTA))
        theory = extrapolation_definition.blocks(judged, found.trained_at, delta or DELTA)
        build = partial(perplexities.findings, state, runs, found, theory)
    elif isinstance(found, Scores):
        build = partial(asked_questions.findings, state, runs, found)
    else:
        build = partial(exact_match.findings, state, runs, found)
    made = build()
    parts = [*made.parts, *training.parts(state, runs), page.measurements(len(found.rows), made.every, at.results.name)]
    section = Section(
        name=folder.path.resolve().name,
        title=state.title or "",
        lead=made.lead,
        facts=training.facts(state, runs),
        parts=[part for part in parts if part.blocks],
        text=at.text(made.markdown),
    )
    with style.drawn_at(width):
        drawn = build() if width else made
        style.save(drawn.figure, *at.figures)
        for name, figure in drawn.others.items():
            style.save(figure, *at.drawn[name])
    if latex:
        atomic_write(at.latex, latex_text(page.tables(made.parts)))
    tensorboard.write(folder, state, found, at.evaluation)
    page.write([section], at.page)
    for path, text in zip(at.others, others, strict=True):
        atomic_write(path, text)
    for name, of in found.others.items() if isinstance(found, Perplexities) else ():
        atomic_write(at.texts[name][0], of.csv())
    atomic_write(at.table, made.markdown)
    atomic_write(at.results, found.csv())
    return section

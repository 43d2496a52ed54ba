"""Writes a sweep's report: tables, figures, TensorBoard and the page."""

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write
from fairseq_rpe.figures import style
from fairseq_rpe.reports import definition, page, tensorboard
from fairseq_rpe.reports.chapters import asked_questions, exact_match, literature, perplexities, training
from fairseq_rpe.reports.definition import DELTA
from fairseq_rpe.reports.findings import Perplexities
from fairseq_rpe.reports.kept import Places
from fairseq_rpe.reports.page import Section
from fairseq_rpe.reports.scored_answers import Scores, collect
from fairseq_rpe.sweeps.state import State, SweepFolder


def check(folder: SweepFolder, delta: float | None) -> State:
    """What is on record of a sweep that ``delta`` can be asked of.

    Raises UserError: the folder holds no sweep, or one that is not on text and ``delta`` is given.
    """
    state = folder.state()
    if delta is not None and state.kind != "text":
        what = "counts exact answers" if state.kind == "algorithms" else "scores answers"
        raise UserError(f"--delta is about perplexity and {folder.path} {what}: drop it")
    return state


def write(folder: SweepFolder, delta: float | None = None) -> Section:
    """Write a sweep's report into its folder. ``delta``: δ of Definition 0.1, ``DELTA`` without one.

    Raises UserError: what :func:`check` refuses, or none of its runs is finished.
    """
    state = literature.completed(check(folder, delta))
    found, at, runs = collect(folder, state), Places(folder, state), training.runs(folder, state)
    others = []
    if isinstance(found, Perplexities):
        judged = definition.judge(found, definition.predict(folder, state))
        others.append(definition.csv(judged, delta or DELTA))
        made = perplexities.findings(state, runs, found, definition.blocks(judged, found.trained_at, delta or DELTA))
    elif isinstance(found, Scores):
        made = asked_questions.findings(state, runs, found)
    else:
        made = exact_match.findings(state, runs, found)
    parts = [*made.parts, *training.parts(state, runs), page.measurements(len(found.rows), made.every, at.results.name)]
    section = Section(
        name=folder.path.resolve().name,
        title=state.title or "",
        lead=made.lead,
        facts=training.facts(state, runs),
        parts=[part for part in parts if part.blocks],
        text=at.text(made.markdown),
    )
    style.save(made.figure, *at.figures)
    for name, figure in made.others.items():
        style.save(figure, *at.drawn[name])
    tensorboard.write(folder, state, found, at.evaluation)
    page.write([section], at.page)
    for path, text in zip(at.others, others, strict=True):
        atomic_write(path, text)
    for name, of in found.others.items() if isinstance(found, Perplexities) else ():
        atomic_write(at.texts[name][0], of.csv())
    atomic_write(at.table, made.markdown)
    atomic_write(at.results, found.csv())
    return section

"""Writes a sweep's report: tables, figures, TensorBoard files and the HTML page."""

from collections.abc import Callable
from functools import partial

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.figures import style
from fairseq_rpe.reports import extrapolation_definition, page, tensorboard
from fairseq_rpe.reports.chapters import exact_match, perplexities, published_comparison, question_answering, training
from fairseq_rpe.reports.extrapolation_definition import DELTA
from fairseq_rpe.reports.page import ReportContent, Section
from fairseq_rpe.reports.question_scores import Scores, load_results
from fairseq_rpe.reports.report_files import ReportFiles
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import join_latex


def check_delta(folder: SweepFolder, delta: float | None) -> SweepRecord:
    """Read a sweep's record and check that ``delta`` applies to it.

    Raises:
        UserError: the folder is not that of a sweep, or ``delta`` is given for a sweep that is not on text.
    """
    record = folder.read_record()
    if delta is not None and record.kind != "text":
        measured = "exact-match accuracies" if record.kind == "algorithms" else "scores of answers"
        raise UserError(f"--delta is about perplexity and {folder.path} has {measured}: drop it")
    return record


def write_report(
    folder: SweepFolder, delta: float | None = None, width: str | None = None, latex: bool = False
) -> Section:
    """Write a sweep's report into its folder.

    Args:
        folder: folder of the sweep.
        delta: δ of Definition 0.1; None: ``DELTA``.
        width: ``column`` or ``page`` of a paper, for the PNG and PDF figures; figures on the page fit a screen.
        latex: whether to write the tables as LaTeX, too.

    Returns:
        The section of the HTML page.

    Raises:
        UserError: :func:`check_delta` refuses the sweep, or none of its runs is finished.
    """
    record = published_comparison.upgrade_record(check_delta(folder, delta))
    results, files, runs = load_results(folder, record), ReportFiles(folder, record), training.load_runs(folder, record)
    extra_tables = []
    build: Callable[[], ReportContent]
    if isinstance(results, Perplexities):
        predictions = extrapolation_definition.predict_verdicts(folder, record)
        verdicts = extrapolation_definition.observe_verdicts(results, predictions)
        extra_tables.append(extrapolation_definition.verdict_csv(verdicts, delta or DELTA))
        theory = extrapolation_definition.definition_blocks(verdicts, results.train_length, delta or DELTA)
        build = partial(perplexities.build_content, record, runs, results, theory)
    elif isinstance(results, Scores):
        build = partial(question_answering.build_content, record, runs, results)
    else:
        build = partial(exact_match.build_content, record, runs, results)
    content = build()
    measurements = page.measurements_part(len(results.results), content.build_measurements, files.results.name)
    parts = [*content.parts, *training.run_parts(record, runs), measurements]
    section = Section(
        name=folder.path.resolve().name,
        title=record.title or "",
        lead=content.lead,
        facts=training.setting_facts(record, runs),
        parts=[chapter for chapter in parts if chapter.blocks],
        text=files.summary(content.markdown),
    )
    with style.figures_at_width(width):
        figures = build() if width else content
        style.save(figures.figure, *files.figures)
        for name, figure in figures.other_figures.items():
            style.save(figure, *files.extra_figures[name])
    if latex:
        atomic_write(files.latex, join_latex(page.collect_tables(content.parts)))
    tensorboard.write_tensorboard(folder, record, results, files.evaluation)
    page.write_page([section], files.page)
    for path, text in zip(files.extra_tables, extra_tables, strict=True):
        atomic_write(path, text)
    if isinstance(results, Perplexities):
        for name, text_results in results.other_texts.items():
            atomic_write(files.texts[name][0], text_results.csv())
    atomic_write(files.table, content.markdown)
    # last: the report is current if this file has the current numbers
    atomic_write(files.results, results.csv())
    return section

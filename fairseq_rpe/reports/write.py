"""Writes a sweep's report: tables, figures, TensorBoard files and the HTML page."""

from collections.abc import Callable, Sequence
from functools import partial

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.figures import style
from fairseq_rpe.reports import extrapolation_definition, page, tensorboard
from fairseq_rpe.reports.chapters import exact_match, perplexities, published_comparison, question_answering, training
from fairseq_rpe.reports.chapters.training import TrainedRun
from fairseq_rpe.reports.extrapolation_definition import DELTA
from fairseq_rpe.reports.page import ReportContent, Section
from fairseq_rpe.reports.question_scores import AnyResults, Scores, load_results
from fairseq_rpe.reports.report_files import ReportFiles
from fairseq_rpe.reports.sweep_results import Accuracies, Perplexities
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import join_latex


def check_delta(folder: SweepFolder, delta: float | None) -> SweepRecord:
    """Read a sweep's record and check that ``delta`` applies to it.

    Args:
        folder: folder of the sweep.
        delta: δ of Definition 0.1, above 0; None if the user has not chosen it.

    Returns:
        The record.

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
        delta: δ of Definition 0.1, above 0; None: ``DELTA``.
        width: ``column`` or ``page`` of a paper, for the PNG and PDF figures; figures on the page fit a screen.
        latex: whether to write the tables as LaTeX, too.

    Returns:
        The section of the HTML page.

    Raises:
        UserError: :func:`check_delta` refuses the sweep, or none of its runs is finished.
    """
    record = published_comparison.upgrade_record(check_delta(folder, delta))
    results, files, runs = load_results(folder, record), ReportFiles(folder, record), training.load_runs(folder, record)
    build_content, extra_tables = _choose_content(folder, record, runs, results, DELTA if delta is None else delta)
    content = build_content()
    section = _assemble_section(folder, record, runs, content, len(results.results), files)
    _write_figures(files, content, build_content, width)
    if latex:
        atomic_write(files.latex, join_latex(page.collect_tables(content.parts)))
    tensorboard.write_tensorboard(folder, record, results, files.evaluation)
    page.write_page([section], files.page)
    _write_tables(files, results, content.markdown, extra_tables)
    return section


def _choose_content(
    folder: SweepFolder, record: SweepRecord, runs: Sequence[TrainedRun], results: AnyResults, delta: float
) -> tuple[Callable[[], ReportContent], list[str]]:
    """Return the function that builds the chapters of this kind of results, and the texts of its further CSV files."""
    if isinstance(results, Scores):
        return partial(question_answering.build_content, record, runs, results), []
    if isinstance(results, Accuracies):
        return partial(exact_match.build_content, record, runs, results), []
    predictions = extrapolation_definition.predict_verdicts(folder, record)
    verdicts = extrapolation_definition.observe_verdicts(results, predictions)
    theory = extrapolation_definition.definition_blocks(verdicts, results.train_length, delta)
    build_content = partial(perplexities.build_content, record, runs, results, theory)
    return build_content, [extrapolation_definition.verdict_csv(verdicts, delta)]


def _assemble_section(
    folder: SweepFolder,
    record: SweepRecord,
    runs: Sequence[TrainedRun],
    content: ReportContent,
    measurement_count: int,
    files: ReportFiles,
) -> Section:
    """Return the section of the HTML page: the chapters of the results, of the runs and of all measurements."""
    measurements = page.measurements_part(measurement_count, content.build_measurements, files.results.name)
    parts = [*content.parts, *training.run_parts(record, runs), measurements]
    return Section(
        name=folder.path.resolve().name,
        title=record.title or "",
        lead=content.lead,
        facts=training.setting_facts(record, runs),
        parts=[chapter for chapter in parts if chapter.blocks],
        text=files.summary(content.markdown),
    )


def _write_figures(
    files: ReportFiles, content: ReportContent, build_content: Callable[[], ReportContent], width: str | None
) -> None:
    """Write the figures as PNG and PDF."""
    with style.figures_at_width(width):
        # A figure gets its width when it is drawn. The page has the figures of ``content`` at the width of a screen, so
        # those for a paper are drawn again.
        figures = build_content() if width else content
        style.save(figures.figure, *files.figures)
        for name, figure in figures.other_figures.items():
            style.save(figure, *files.extra_figures[name])


def _write_tables(files: ReportFiles, results: AnyResults, markdown: str, extra_tables: Sequence[str]) -> None:
    """Write the CSV and Markdown tables, and the CSV of the results last.

    :func:`~fairseq_rpe.reports.report_files.current_summary` takes a report as current if that file has the current
    numbers. Written last, it leaves a report that was interrupted marked as out of date.
    """
    for path, text in zip(files.extra_tables, extra_tables, strict=True):
        atomic_write(path, text)
    if isinstance(results, Perplexities):
        for name, text_results in results.other_texts.items():
            atomic_write(files.texts[name].results, text_results.csv())
    atomic_write(files.table, markdown)
    atomic_write(files.results, results.csv())

"""Writes a sweep's report: tables, figures, TensorBoard files and the HTML page."""

from collections.abc import Callable, Mapping, Sequence

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.figures import style
from fairseq_rpe.reports import page, tensorboard
from fairseq_rpe.reports.chapters import published_comparison, training
from fairseq_rpe.reports.chapters.training import TrainedRun
from fairseq_rpe.reports.extrapolation_definition import DELTA
from fairseq_rpe.reports.kind_report import kind_report, load_results
from fairseq_rpe.reports.page import ReportContent, Section
from fairseq_rpe.reports.report_files import ReportFiles
from fairseq_rpe.reports.sweep_results import SweepResults
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import join_latex


def check_delta(folder: SweepFolder, delta: float | None) -> SweepRecord:
    """Read a sweep's record and check that ``delta`` applies to it.

    Args:
        folder: folder of the sweep.
        delta: δ of Definition 0.1, above 0: a model extrapolates if its perplexity at longer texts deviates relatively
            by less than δ. None if the user has not chosen it.

    Returns:
        The record.

    Raises:
        UserError: the folder is not that of a sweep, or ``delta`` is given for a sweep that is not on text.
    """
    record = folder.read_record()
    report = kind_report(record.kind)
    if delta is not None and not report.has_definition:
        raise UserError(f"--delta is about perplexity and {folder.path} has {report.measured}: drop it")
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
    # a record of an earlier version lacks titles and published settings, which its recipe has
    record = published_comparison.upgrade_record(check_delta(folder, delta))
    results, files = load_results(folder, record), ReportFiles.from_sweep(folder, record)
    runs = training.load_runs(folder, record)
    report, limit = kind_report(record.kind), DELTA if delta is None else delta
    build_content, extra_tables = report.content_builder(folder, record, runs, results, limit)
    # build_content draws the figures, too; extra_tables has the texts of the paths in files.extra_tables, by file name
    content = build_content()
    section = _assemble_section(folder, record, runs, content, len(results.results), files)
    # a report without its Markdown file counts as unfinished, so this file is written when all others are there
    with files.write_markdown_last(content.markdown):
        write_figures(files, content, build_content, width)
        write_tables(files, content, results, extra_tables, latex)
        tensorboard.write_tensorboard(folder, record, results, files.evaluation)
        page.write_page([section], files.page)
    return section


def _assemble_section(
    folder: SweepFolder,
    record: SweepRecord,
    runs: Sequence[TrainedRun],
    content: ReportContent,
    measurement_count: int,
    files: ReportFiles,
) -> Section:
    """Return the section of the HTML page, with chapters on the results, the runs and all measurements."""
    measurements = page.measurements_part(measurement_count, content.build_measurements, files.csv.name)
    parts = [*content.parts, *training.run_parts(runs), training.commands_part(record, runs), measurements]
    return Section(
        name=folder.path.resolve().name,
        title=record.title or "",
        lead=content.lead,
        facts=training.setting_facts(record, runs),
        parts=[chapter for chapter in parts if chapter.blocks],
        text=files.summary(content.markdown),
    )


def write_figures(
    files: ReportFiles, content: ReportContent, build_content: Callable[[], ReportContent], width: str | None
) -> None:
    """Write the figures as PNG and PDF.

    Args:
        files: paths of the report.
        content: its content, with figures at the width of a screen.
        build_content: builds the content again, with new figures.
        width: ``column`` or ``page`` of a paper; None: the width of a screen.
    """
    with style.figures_at_width(width):
        # a figure gets its width when it is drawn, so figures for a paper are drawn again
        figures = build_content() if width else content
        style.save(figures.figure, *files.figures)
        for name, figure in figures.other_figures.items():
            style.save(figure, *files.extra_figures[name])


def write_tables(
    files: ReportFiles, content: ReportContent, results: SweepResults, extra_tables: Mapping[str, str], latex: bool
) -> None:
    """Write the CSV files and, if wanted, the tables as LaTeX.

    Args:
        files: paths of the report.
        content: its content.
        results: results for the CSV files.
        extra_tables: text of each path in ``files.extra_tables``, by the name of the file.
        latex: whether to write the tables of ``content`` as LaTeX.
    """
    if latex:
        atomic_write(files.latex, join_latex(page.collect_tables(content.parts)))
    csv_texts = {path: extra_tables[path.name] for path in files.extra_tables} | files.csv_texts(results)
    for path, text in csv_texts.items():
        atomic_write(path, text)

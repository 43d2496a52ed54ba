"""Paths of a sweep's report, and its summary if the report is current, without drawing anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fairseq_rpe.algorithms import build
from fairseq_rpe.reports.sweep_results import SweepResults, load_results
from fairseq_rpe.sweeps.sweep_kind import sweep_kind
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord
from fairseq_rpe.utils.files import atomic_write


class TextFiles(NamedTuple):
    """Paths of the results on a further text, which a sweep evaluates besides its training text.

    Attributes:
        csv: numbers as CSV.
        png: figure as PNG.
        pdf: figure as PDF.
    """

    csv: Path
    png: Path
    pdf: Path


class ReportFiles:
    """Paths of the report of a sweep.

    Args:
        folder: folder of the sweep.
        record: its record, which decides what the report contains.

    Attributes:
        csv: numbers as CSV.
        markdown: tables as Markdown; a report without this file is unfinished, see :meth:`write_markdown_last`.
        latex: tables as LaTeX, written on demand.
        figures: main figure as PNG and PDF.
        page: HTML page.
        tensorboard: folder of all TensorBoard files.
        evaluation: TensorBoard folder of the evaluations, replaced as a whole.
        extra_tables: further CSV files: the verdicts on Definition 0.1 of a sweep on text.
        depth_maps: heat map of the results by length and depth as PNG and PDF; empty if no task of the sweep has depths
            in its split. The map is drawn once results with depths exist, see :meth:`is_current`.
        texts: paths of each further text, by the name of the text.
    """

    def __init__(self, folder: SweepFolder, record: SweepRecord) -> None:
        kind = sweep_kind(record.kind)
        self.csv = folder.path / f"{kind.csv_name}.csv"
        self.markdown = folder.path / f"{kind.csv_name}.md"
        self.latex = folder.path / f"{kind.csv_name}.tex"
        self.figures = _figure_paths(folder, kind.figure_name)
        self.page = folder.path / "report.html"
        self.tensorboard = folder.tensorboard
        self.evaluation = folder.tensorboard / "evaluation"
        self.extra_tables = [folder.path / name for name in kind.extra_tables]
        split = record.settings.split or "test"
        has_depths = any(build(task).depths(split) for task in record.algorithms)
        self.depth_maps = _figure_paths(folder, "depths") if has_depths else []
        self.texts = {
            name: TextFiles(folder.path / f"results-{name}.csv", *_figure_paths(folder, f"ppl-{name}"))
            for name in record.evaluate
        }

    @property
    def extra_figures(self) -> dict[str, list[Path]]:
        """PNG and PDF of further figures by name: ``depths`` is the heat map, other names are further texts."""
        depths = {"depths": self.depth_maps} if self.depth_maps else {}
        return depths | {name: [paths.png, paths.pdf] for name, paths in self.texts.items()}

    @property
    def files(self) -> list[Path]:
        """All files of the report except those of TensorBoard, and except ``latex``, which not every report has."""
        text_paths = [path for paths in self.texts.values() for path in paths]
        return [self.csv, self.markdown, self.page, *self.figures, *self.extra_tables, *self.depth_maps, *text_paths]

    @contextmanager
    def write_markdown_last(self, text: str) -> Iterator[None]:
        """Delete ``markdown``, run the block, which writes all other files, and write ``markdown`` if it succeeds.

        If the process dies in between, no such file exists, so :meth:`is_current` is false and the report is written
        again.

        Args:
            text: text of ``markdown``.
        """
        self.markdown.unlink(missing_ok=True)
        yield
        atomic_write(self.markdown, text)

    def csv_texts(self, results: SweepResults) -> dict[Path, str]:
        """Return the text of each CSV file with results, by path: that of the sweep and that of each further text."""
        further = {self.texts[name].csv: other.csv() for name, other in results.other_texts.items()}
        return {self.csv: results.csv(), **further}

    def is_current(self, results: SweepResults) -> bool:
        """Return whether the report is finished, and its CSV files have the numbers of ``results``."""
        paths = [self.markdown, self.page, self.evaluation, *self.figures, *self.extra_tables]
        # a further text or a heat map has files only if there are results for it
        if results.tasks_with_depths:
            paths += self.depth_maps
        paths += [path for name in results.other_texts for path in self.texts[name]]
        csv_texts = self.csv_texts(results)
        return all(path.exists() for path in (*paths, *csv_texts)) and all(
            path.read_text(encoding="utf-8") == text for path, text in csv_texts.items()
        )

    def summary(self, markdown: str) -> str:
        """Return the summary for the terminal: ``markdown``, the text of the tables, then the main paths."""
        heat_map = f"heat map:    {self.depth_maps[0]}\n" if self.depth_maps else ""
        return (
            f"{markdown}\n"
            f"results:     {self.csv}\n"
            f"figure:      {self.figures[0]}\n"
            f"{heat_map}"
            f"page:        {self.page}\n"
            f"TensorBoard: {self.tensorboard}"
        )


def _figure_paths(folder: SweepFolder, name: str) -> list[Path]:
    """Return the paths of a figure as PNG and PDF."""
    return [folder.path / f"{name}.{ending}" for ending in ("png", "pdf")]


def current_summary(folder: SweepFolder) -> str | None:
    """Return the summary of a current report, or None if results are new, a file is missing or the report unfinished.

    Args:
        folder: folder of the sweep.

    Returns:
        The text that :meth:`ReportFiles.summary` returns.

    Raises:
        UserError: the folder is not that of a sweep, or none of its runs is finished.
    """
    record = folder.read_record()
    files, results = ReportFiles(folder, record), load_results(folder, record)
    return files.summary(files.markdown.read_text(encoding="utf-8")) if files.is_current(results) else None

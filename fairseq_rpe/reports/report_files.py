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
        results: numbers as CSV.
        png: figure as PNG.
        pdf: figure as PDF.
    """

    results: Path
    png: Path
    pdf: Path


class ReportFiles:
    """Paths of the report of a sweep.

    Args:
        folder: folder of the sweep.
        record: its record, which decides what the report contains.

    Attributes:
        results: numbers as CSV.
        table: tables as Markdown; a report without this file is unfinished, see :meth:`write_table_last`.
        latex: tables as LaTeX, written on demand.
        figures: main figure as PNG and PDF.
        page: HTML page.
        tensorboard: folder of all TensorBoard files.
        evaluation: TensorBoard folder of the evaluations, replaced as a whole.
        extra_tables: further CSV files: the verdicts on Definition 0.1 of a sweep on text.
        extra_figures: PNG and PDF of further figures, by name: the heat map ``depths``, and the figure of each further
            text.
        texts: files of each further text, by name.
    """

    def __init__(self, folder: SweepFolder, record: SweepRecord) -> None:
        kind = sweep_kind(record.kind)
        results, figure = kind.csv_name, kind.figure_name
        self.results = folder.path / f"{results}.csv"
        self.table = folder.path / f"{results}.md"
        self.latex = folder.path / f"{results}.tex"
        self.figures = [folder.path / f"{figure}.{ending}" for ending in ("png", "pdf")]
        self.page = folder.path / "report.html"
        self.tensorboard = folder.tensorboard
        self.evaluation = folder.tensorboard / "evaluation"
        self.extra_tables = [folder.path / name for name in kind.extra_tables]
        self.extra_figures: dict[str, list[Path]] = {}
        if any(build(task).depths(record.settings.split or "test") for task in record.algorithms):
            self.extra_figures["depths"] = [folder.path / f"depths.{ending}" for ending in ("png", "pdf")]
        self.texts = {
            name: TextFiles(
                folder.path / f"results-{name}.csv", folder.path / f"ppl-{name}.png", folder.path / f"ppl-{name}.pdf"
            )
            for name in record.evaluate
        }
        self.extra_figures |= {name: [files.png, files.pdf] for name, files in self.texts.items()}

    @property
    def files(self) -> list[Path]:
        """All files of the report except those of TensorBoard."""
        extra = [path for paths in (*self.extra_figures.values(), *self.texts.values()) for path in paths]
        return [self.results, self.table, self.page, *self.figures, *self.extra_tables, *extra]

    @contextmanager
    def write_table_last(self, markdown: str) -> Iterator[None]:
        """Delete ``table``, run the block, which writes all other files, and write ``table`` if it succeeds.

        If the process dies in between, no table exists, so :meth:`is_current` is false and the report is written again.

        Args:
            markdown: text of ``table``.
        """
        self.table.unlink(missing_ok=True)
        yield
        atomic_write(self.table, markdown)

    def csv_texts(self, results: SweepResults) -> dict[Path, str]:
        """Return the text of each CSV file with results, by path: that of the sweep and that of each further text."""
        further = {self.texts[name].results: other.csv() for name, other in results.other_texts.items()}
        return {self.results: results.csv(), **further}

    def is_current(self, results: SweepResults) -> bool:
        """Return whether the report is finished, and its CSV files have the numbers of ``results``."""
        paths = [self.table, self.page, self.evaluation, *self.figures, *self.extra_tables]
        if results.tasks_with_depths:
            paths += self.extra_figures["depths"]
        paths += [path for name in results.other_texts for path in self.texts[name]]
        texts = self.csv_texts(results)
        return all(path.exists() for path in (*paths, *texts)) and all(
            path.read_text(encoding="utf-8") == text for path, text in texts.items()
        )

    def summary(self, table: str) -> str:
        """Return the summary for the terminal: ``table`` (Markdown), then the paths of the main files."""
        maps = [files[0] for name, files in self.extra_figures.items() if name not in self.texts]
        heat_maps = "".join(f"heat map:    {path}\n" for path in maps)
        return (
            f"{table}\n"
            f"results:     {self.results}\n"
            f"figure:      {self.figures[0]}\n"
            f"{heat_maps}"
            f"page:        {self.page}\n"
            f"TensorBoard: {self.tensorboard}"
        )


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
    return files.summary(files.table.read_text(encoding="utf-8")) if files.is_current(results) else None

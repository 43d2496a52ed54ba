"""Paths of a sweep's report, and its summary if the report is current, without drawing anything."""

from pathlib import Path
from typing import NamedTuple

from fairseq_rpe.algorithms import build
from fairseq_rpe.reports.question_scores import load_results
from fairseq_rpe.reports.sweep_results import Accuracies, Perplexities
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord

# Names of the CSV file and of the main figure by kind of sweep, without suffixes.
_NAMES = {"text": ("results", "ppl"), "algorithms": ("accuracy", "accuracy"), "answers": ("scores", "scores")}


class TextFiles(NamedTuple):
    """Paths of the results on a further text.

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
        results: numbers as CSV, written last: a report is current if this file has the current numbers.
        table: tables as Markdown.
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
        results, figure = _NAMES[record.kind]
        self.results = folder.path / f"{results}.csv"
        self.table = folder.path / f"{results}.md"
        self.latex = folder.path / f"{results}.tex"
        self.figures = [folder.path / f"{figure}.{ending}" for ending in ("png", "pdf")]
        self.page = folder.path / "report.html"
        self.tensorboard = folder.tensorboard
        self.evaluation = folder.tensorboard / "evaluation"
        self.extra_tables = [folder.path / "extrapolation.csv"] if record.kind == "text" else []
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
    """Return the summary of a current report, or None if results are new or a file is missing.

    A report is current if the CSV files, which are written last, have the numbers of the results.

    Args:
        folder: folder of the sweep.

    Returns:
        The text that :meth:`ReportFiles.summary` gives.

    Raises:
        UserError: the folder is not that of a sweep, or none of its runs is finished.
    """
    record = folder.read_record()
    files, results = ReportFiles(folder, record), load_results(folder, record)
    tables = {files.results: results.csv()}
    paths = [files.results, files.table, files.page, files.evaluation, *files.figures, *files.extra_tables]
    if isinstance(results, Accuracies) and results.tasks_with_depths:
        paths += files.extra_figures["depths"]
    if isinstance(results, Perplexities):
        for name, perplexities in results.other_texts.items():
            tables[files.texts[name].results] = perplexities.csv()
            paths += files.texts[name]
    if all(path.exists() for path in paths) and all(p.read_text(encoding="utf-8") == t for p, t in tables.items()):
        return files.summary(files.table.read_text(encoding="utf-8"))
    return None

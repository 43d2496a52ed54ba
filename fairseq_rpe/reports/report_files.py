"""Paths of a sweep's report, and its summary if the report is current, without drawing anything."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fairseq_rpe.algorithms import build
from fairseq_rpe.reports.kind_report import kind_report, load_results
from fairseq_rpe.reports.sweep_results import SweepResults
from fairseq_rpe.reports.training_axis import CSV_NAME, FIGURE_NAME
from fairseq_rpe.reports.uncertainty import without_bounds
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord
from fairseq_rpe.utils.files import atomic_write


class ReportFiles:
    """Paths of a report.

    Args:
        folder: folder of the report.
        kind: kind of the results: text, algorithms or answers.
        texts: names of the further texts that the models are evaluated on.
        has_depths: whether results depend on a depth.
        has_training_axis: whether checkpoints on the way of the trainings are evaluated.

    Attributes:
        csv: numbers as CSV.
        markdown: tables as Markdown; a report without this file is unfinished, see :meth:`write_markdown_last`.
        latex: tables as LaTeX, written on demand.
        figures: main figure as PNG and PDF.
        page: HTML page.
        tensorboard: folder of all TensorBoard files.
        evaluation: TensorBoard folder of the evaluations, replaced as a whole.
        extra_tables: further CSV files: effective lengths, and the verdicts on Definition 0.1 of a sweep on text.
        text_tables: CSV file of each further text, by the name of the text.
        depth_maps: heat map of the results by length and depth as PNG and PDF; empty if no task of the sweep has depths
            in its split. The map is drawn once results with depths exist, see :meth:`is_current`.
        training_axis: CSV file of the perplexities along the training; None if no checkpoints on the way are evaluated.
        extra_figures: PNG and PDF of further figures by name: ``depths`` is the heat map, ``training axis`` the ratio
            along the training, others are further texts.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        texts: Iterable[str] = (),
        has_depths: bool = False,
        has_training_axis: bool = False,
    ) -> None:
        report = kind_report(kind)
        self.csv, self.markdown, self.latex = (folder / f"{report.csv_name}.{end}" for end in ("csv", "md", "tex"))
        self.figures = _figure_paths(folder, report.figure_name)
        self.page = folder / "report.html"
        self.tensorboard = folder / "tensorboard"
        self.evaluation = self.tensorboard / "evaluation"
        self.extra_tables = [folder / name for name in report.extra_tables]
        self.text_tables = {name: folder / f"results-{name}.csv" for name in texts}
        self.depth_maps = _figure_paths(folder, "depths") if has_depths else []
        depths = {"depths": self.depth_maps} if has_depths else {}
        axis = {FIGURE_NAME: _figure_paths(folder, CSV_NAME.removesuffix(".csv"))} if has_training_axis else {}
        self.training_axis = folder / CSV_NAME if has_training_axis else None
        self.extra_figures = depths | axis | {name: _figure_paths(folder, f"ppl-{name}") for name in self.text_tables}

    @classmethod
    def from_sweep(cls, folder: SweepFolder, record: SweepRecord) -> "ReportFiles":
        """Return the paths of the report of a sweep, whose record decides what the report contains."""
        split = record.settings.split or "test"
        has_depths = any(build(task).depths(split) for task in record.algorithms)
        return cls(folder.path, record.kind, record.evaluate, has_depths, bool(record.evaluate_at))

    @property
    def files(self) -> list[Path]:
        """All files of the report except those of TensorBoard, and except ``latex``, which not every report has."""
        figures = [path for paths in (self.figures, *self.extra_figures.values()) for path in paths]
        return [self.csv, self.markdown, self.page, *figures, *self.extra_tables, *self.text_tables.values()] + (
            [] if self.training_axis is None else [self.training_axis]
        )

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

    def csv_texts(self, results: SweepResults, with_bounds: bool = True) -> dict[Path, str]:
        """Return the text of each CSV file with results, by path: that of the sweep and that of each further text.

        Args:
            results: the results.
            with_bounds: whether to compute the bounds of intervals.
        """
        further = {self.text_tables[name]: other.csv(with_bounds) for name, other in results.other_texts.items()}
        along_training = {} if self.training_axis is None else {self.training_axis: results.training_axis_csv()}
        return {self.csv: results.csv(with_bounds), **further, **along_training}

    def is_current(self, results: SweepResults) -> bool:
        """Return whether the report is finished, and its CSV files have the numbers of ``results``.

        Bounds of intervals are not compared, because they follow from the results and computing them imports SciPy.
        """
        paths = [self.markdown, self.page, self.evaluation, *self.figures, *self.extra_tables]
        # a further text or a heat map has files only if there are results for it
        shown = [*results.other_texts, *(["depths"] if results.tasks_with_depths else [])]
        paths += [path for name in shown for path in self.extra_figures.get(name, ())]
        csv_texts = self.csv_texts(results, with_bounds=False)
        return all(path.exists() for path in (*paths, *csv_texts)) and all(
            without_bounds(path.read_text(encoding="utf-8")) == text for path, text in csv_texts.items()
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


def _figure_paths(folder: Path, name: str) -> list[Path]:
    """Return the paths of a figure as PNG and PDF."""
    return [folder / f"{name}.{ending}" for ending in ("png", "pdf")]


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
    files, results = ReportFiles.from_sweep(folder, record), load_results(folder, record)
    return files.summary(files.markdown.read_text(encoding="utf-8")) if files.is_current(results) else None

"""Where a sweep's report lies, and what it says as long as it is up to date: told without drawing anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.reports.findings import collect
from fairseq_rpe.sweeps.state import SweepFolder


@dataclass(frozen=True)
class Places:
    """The files of a report. ``results``: its numbers as CSV, written last, because the others belong to them."""

    results: Path
    table: Path
    figures: tuple[Path, ...]
    page: Path
    tensorboard: Path
    others: tuple[Path, ...] = ()

    @property
    def evaluation(self) -> Path:
        """What TensorBoard shows of the results, replaced as a whole."""
        return self.tensorboard / "evaluation"

    def text(self, table: str) -> str:
        """What is printed: the table and where everything is."""
        return (
            f"{table}\n"
            f"results:     {self.results}\n"
            f"figure:      {self.figures[0]}\n"
            f"page:        {self.page}\n"
            f"TensorBoard: {self.tensorboard}"
        )


def places(folder: SweepFolder, algorithms: bool) -> Places:
    """Of a sweep on text or over algorithmic tasks."""
    results, figure = ("accuracy", "accuracy") if algorithms else ("results", "ppl")
    return Places(
        results=folder.path / f"{results}.csv",
        table=folder.path / f"{results}.md",
        figures=tuple(folder.path / f"{figure}.{ending}" for ending in ("png", "pdf")),
        page=folder.path / "report.html",
        tensorboard=folder.tensorboard,
        others=() if algorithms else (folder.path / "extrapolation.csv",),
    )


def text(folder: SweepFolder) -> str | None:
    """What the report says, or nothing if it has to be written: results are new or a file of it is missing.

    Raises:
        UserError: the folder holds no sweep, or none of its runs is finished.
    """
    state = folder.state()
    at = places(folder, bool(state.algorithms))
    found = collect(folder, state).csv()
    if not all(path.exists() for path in (at.table, at.page, at.evaluation, *at.figures, *at.others)):
        return None
    if not at.results.exists() or at.results.read_text(encoding="utf-8") != found:
        return None
    return at.text(at.table.read_text(encoding="utf-8"))

"""Where a sweep's report lies, and what it says as long as it is up to date: told without drawing anything."""

from pathlib import Path

from fairseq_rpe.algorithms import build
from fairseq_rpe.reports.question_scores import collect
from fairseq_rpe.reports.sweep_results import ExactAnswers, Perplexities
from fairseq_rpe.sweeps.sweep_record import State, SweepFolder

_NAMES = {"text": ("results", "ppl"), "algorithms": ("accuracy", "accuracy"), "answers": ("scores", "scores")}


class Places:
    """The files of a report on a sweep.

    ``results``: its numbers as CSV, written last, because the others belong to them; ``latex``: the tables for a paper,
    written on demand; ``evaluation``: what TensorBoard shows of them, replaced as a whole.
    """

    def __init__(self, folder: SweepFolder, state: State) -> None:
        results, figure = _NAMES[state.kind]
        self.results = folder.path / f"{results}.csv"
        self.table = folder.path / f"{results}.md"
        self.latex = folder.path / f"{results}.tex"
        self.figures = [folder.path / f"{figure}.{ending}" for ending in ("png", "pdf")]
        self.page = folder.path / "report.html"
        self.tensorboard = folder.tensorboard
        self.evaluation = folder.tensorboard / "evaluation"
        self.others = [folder.path / "extrapolation.csv"] if state.kind == "text" else []
        deep = any(build(task).depths(state.settings.subset or "test") for task in state.algorithms)
        # figures beside the first, by name
        self.drawn = {"depths": [folder.path / f"depths.{ending}" for ending in ("png", "pdf")]} if deep else {}
        # of further texts, by name: numbers and figures
        self.texts = {
            name: [folder.path / file for file in (f"results-{name}.csv", f"ppl-{name}.png", f"ppl-{name}.pdf")]
            for name in state.evaluate
        }
        self.drawn |= {name: files[1:] for name, files in self.texts.items()}

    @property
    def files(self) -> list[Path]:
        """All files of the report, but for those of TensorBoard."""
        drawn = [path for paths in (*self.drawn.values(), *self.texts.values()) for path in paths]
        return [self.results, self.table, self.page, *self.figures, *self.others, *drawn]

    def text(self, table: str) -> str:
        """What is printed: the table and where everything is."""
        maps = "".join(f"heat map:    {files[0]}\n" for name, files in self.drawn.items() if name not in self.texts)
        return (
            f"{table}\n"
            f"results:     {self.results}\n"
            f"figure:      {self.figures[0]}\n"
            f"{maps}"
            f"page:        {self.page}\n"
            f"TensorBoard: {self.tensorboard}"
        )


def text(folder: SweepFolder) -> str | None:
    """What the report says, or nothing if it has to be written: results are new or a file of it is missing.

    Raises UserError: the folder holds no sweep, or none of its runs is finished.
    """
    state = folder.state()
    at, found = Places(folder, state), collect(folder, state)
    numbers = {at.results: found.csv()}
    files = [at.results, at.table, at.page, at.evaluation, *at.figures, *at.others]
    files += at.drawn["depths"] if isinstance(found, ExactAnswers) and found.deep else []
    for name, of in found.others.items() if isinstance(found, Perplexities) else ():
        numbers[at.texts[name][0]] = of.csv()
        files += at.texts[name]
    if all(path.exists() for path in files) and all(p.read_text(encoding="utf-8") == n for p, n in numbers.items()):
        return at.text(at.table.read_text(encoding="utf-8"))
    return None

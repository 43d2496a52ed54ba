"""Chapter that compares accuracies on generated tasks with guesses and with a reader of the last tokens only."""

from itertools import groupby

from fairseq_rpe.algorithms import build
from fairseq_rpe.algorithms.base import Algorithm
from fairseq_rpe.algorithms.window_oracle import window_accuracy
from fairseq_rpe.reports.page import Block, Text
from fairseq_rpe.reports.sweep_results import Accuracies
from fairseq_rpe.utils.table import Cell, Table, TableRow, number_cell

_ABOUT = (
    "A guess draws an answer at random, as docs/ruler.md defines for each task. The reader of the last tokens sees as "
    "many tokens of each prompt as the longest example of the training has, answers correctly if they show the answer, "
    "and guesses otherwise. A method with a clearly higher accuracy uses text from farther back. A method with a "
    "similar accuracy does not show this."
)


def reader_blocks(accuracies: Accuracies, split: str) -> list[Block]:
    """Return the tables of all tasks whose lengths are in tokens, and what they show.

    Args:
        accuracies: Results of a sweep.
        split: Split of the results. Only the test split has examples of fixed lengths, so other splits have no tables.
    """
    if split != "test":
        return []
    tasks = {name: build(name) for name in accuracies.tasks}
    tables: list[Block] = [
        _reader_table(accuracies, name, task) for name, task in tasks.items() if task.length_unit == "tokens"
    ]
    return [*tables, Text(_ABOUT)] if tables else []


def _reader_table(accuracies: Accuracies, name: str, task: Algorithm) -> Table:
    """Return the table of one task: guesses, the reader and all methods by length."""
    lengths = sorted({row.result.length for row in accuracies.results if row.result.algorithm == name})
    window = task.max_length("train")
    readers: dict[int, float | None] = {}
    for n, examples in groupby(task.examples("test"), lambda example: example.length):
        if n in lengths:
            readers[n] = window_accuracy(task, examples, window)
    guesses = {n: task.chance_accuracy(n) for n in lengths}
    rows = [
        TableRow("(a guess)", [_percent(guesses[n]) for n in lengths]),
        TableRow(f"(reader of the last {window} tokens)", [_percent(readers.get(n)) for n in lengths]),
    ]
    for method in accuracies.methods(name):
        values = accuracies.values_by_length(name, method)
        means = (sum(values[n]) / len(values[n]) if n in values else None for n in lengths)
        rows.append(TableRow(method, [number_cell(mean, ".1f") for mean in means]))
    measure = "right labels" if task.has_labels else "exact match"
    return Table(f"{name}: {measure} in % by the number of tokens.", ["method", *map(str, lengths)], rows)


def _percent(share: float | None) -> Cell:
    """Return the cell of a share in percent with three digits, so that small chances are not 0.0."""
    return Cell("") if share is None else Cell(f"{100 * share:.3g}", 100 * share)

"""Compares perplexity, from sweeps on text, with retrieval, from sweeps over generated tasks, for the same encodings.

An encoding whose attention decays with the distance can keep its perplexity by ignoring distant tokens, because near
tokens are enough to predict most of a text. Such an encoding extrapolates by Definition 0.1, but does not retrieve
distant text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fairseq_rpe.reports import extrapolation_definition
from fairseq_rpe.reports.effective_length import (
    ONE_SIDED,
    RULER,
    RULER_PERCENT,
    MethodLength,
    accuracy_lengths,
    perplexity_lengths,
)
from fairseq_rpe.reports.extrapolation_definition import DELTA, NONE, NOT_CERTAIN, ObservedVerdict, PredictedVerdict
from fairseq_rpe.reports.kind_report import load_results
from fairseq_rpe.reports.page import Block, Part, Section, Text, markdown
from fairseq_rpe.reports.sweep_results import SOLVED_PERCENT, Accuracies, Perplexities
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, number_cell, text_cell

NO_VERDICT = "no verdict"
_LENGTH_COLUMNS = ("trained at", "perplexity holds to", "finds to")
_ABOUT_LENGTHS = (
    "Effective lengths: perplexity holds to the largest evaluated length up to which the one-sided Definition 0.1 is "
    f"true at δ = {DELTA:g}. A model finds to the largest evaluated length up to which its exact match, mean over "
    f"depths, exceeds {RULER_PERCENT:g} %, the threshold of RULER. ≥: all evaluated lengths pass."
)


@dataclass(frozen=True)
class RetrievalResult:
    """Accuracy of a method on a task with depths, in percent at the worst depth.

    Attributes:
        name: name of the method.
        trained: lowest accuracy at trained lengths.
        beyond: lowest accuracy at lengths beyond them.
        solved_length: length up to which the task is solved at every depth; None if it is not solved at any.
    """

    name: str
    trained: float
    beyond: float
    solved_length: int | None

    @property
    def retrieves(self) -> str:
        """``yes`` or ``no``: whether the task is solved at every depth of every length beyond training.

        ``NO_VERDICT`` if it is not even solved at trained lengths.
        """
        if self.trained < SOLVED_PERCENT:
            return NO_VERDICT
        return "yes" if self.beyond >= SOLVED_PERCENT else "no"


class EffectiveLengths(NamedTuple):
    """Effective lengths of one encoding.

    Attributes:
        perplexity: that of the model of the sweep on text, by the one-sided Definition 0.1.
        retrieval: that of the model of the sweep over tasks, by RULER's threshold.
    """

    perplexity: MethodLength
    retrieval: MethodLength

    def cells(self) -> list[Cell]:
        """Return the cells of the columns of ``_LENGTH_COLUMNS``."""
        trained = f"{self.perplexity.trained_at} {self.perplexity.unit}"
        trained_on_task = f"{self.retrieval.trained_at} {self.retrieval.unit}"
        if trained_on_task != trained:
            trained += f" (task: {trained_on_task})"
        return [text_cell(trained), self.perplexity.cell(), self.retrieval.cell()]


class MethodComparison(NamedTuple):
    """Perplexity and retrieval of one encoding.

    Attributes:
        verdict: observed verdict of the method of the sweep on text.
        retrieval: result of the method of the sweep over tasks, under the name of the method on text.
        lengths: effective lengths of both; None if seeds have no lengths in common.
    """

    verdict: ObservedVerdict
    retrieval: RetrievalResult
    lengths: EffectiveLengths | None = None

    @property
    def extrapolates(self) -> str:
        """Whether the perplexity extrapolates, one-sided, as :meth:`ObservedVerdict.answers` has it."""
        _, one_sided = self.verdict.answers(DELTA)
        return one_sided


def comparison_sections(folders: Sequence[SweepFolder]) -> list[Section]:
    """Build a section for each sweep on text and each task with depths that have methods in common.

    If a sweep has tasks without depths or several tasks, one more section has the effective lengths on all of them.

    Two methods are the same if they have the same encoding and the same positions; their names may differ.

    Args:
        folders: folders of sweeps of any kind.

    Returns:
        The sections; empty without a sweep on text or without a sweep over generated tasks.

    Raises:
        UserError: a folder has no finished evaluation.
    """
    records = {folder: folder.read_record() for folder in folders}
    results = {folder: load_results(folder, record) for folder, record in records.items()}
    names = {folder: folder.path.resolve().name for folder in folders}
    sections = []
    for text_folder, perplexities in results.items():
        if not isinstance(perplexities, Perplexities):
            continue
        for task_folder, accuracies in results.items():
            if not isinstance(accuracies, Accuracies):
                continue
            for task in accuracies.tasks_with_depths:
                comparisons = _compare_methods(
                    perplexities, records[text_folder], accuracies, records[task_folder], task
                )
                if comparisons:
                    sections.append(_section(names[text_folder], names[task_folder], task, perplexities, comparisons))
            if len(accuracies.tasks) > 1 or not accuracies.tasks_with_depths:
                lengths = _common_lengths(perplexities, records[text_folder], accuracies, records[task_folder])
                if lengths:
                    sections.append(_lengths_section(names[text_folder], names[task_folder], lengths))
    return sections


def _compare_methods(
    perplexities: Perplexities, text_record: SweepRecord, accuracies: Accuracies, task_record: SweepRecord, task: str
) -> list[MethodComparison]:
    """Compare the methods of ``task`` that have a retrieval result and an equal method on text."""
    no_predictions = dict.fromkeys(perplexities.encodings, PredictedVerdict(NONE))
    verdicts = {
        verdict.name: verdict for verdict in extrapolation_definition.observe_verdicts(perplexities, no_predictions)
    }
    lengths = _common_lengths(perplexities, text_record, accuracies, task_record)
    comparisons = []
    for method in accuracies.methods(task):
        name = _same_method(task_record.method(method), map(text_record.method, verdicts))
        retrieval = retrieval_result(accuracies, task, method)
        if name is not None and retrieval is not None:
            comparisons.append(
                MethodComparison(verdicts[name], replace(retrieval, name=name), lengths.get((task, name)))
            )
    return comparisons


def _common_lengths(
    perplexities: Perplexities, text_record: SweepRecord, accuracies: Accuracies, task_record: SweepRecord
) -> dict[tuple[str, str], EffectiveLengths]:
    """Return the effective lengths by task and by name of the method on text, of methods that both sweeps have."""
    methods = {name: text_record.method(name) for name in perplexities.encodings}
    by_perplexity = {
        row.method: row for row in perplexity_lengths(perplexities, DELTA, methods) if row.definition == ONE_SIDED
    }
    lengths = {}
    for row in accuracy_lengths(accuracies):
        name = _same_method(task_record.method(row.method), [methods[name] for name in by_perplexity])
        if row.definition == RULER and name is not None:
            lengths[row.task, name] = EffectiveLengths(by_perplexity[name], row)
    return lengths


def _same_method(method: Method, others: Iterable[Method]) -> str | None:
    """Return the name of the method among others that has the same encodings, positions and trainings, or None."""
    names = ("rpe", "rpe_eval", "positions_train", "positions_eval", "continues", "further")
    return next((o.name for o in others if all(getattr(o, name) == getattr(method, name) for name in names)), None)


def retrieval_result(accuracies: Accuracies, task: str, method: str) -> RetrievalResult | None:
    """Return a method's retrieval result, or None unless it was evaluated at trained lengths and beyond them."""
    worst, train_length = accuracies.worst_depth_by_length(task, method), accuracies.train_items[task]
    trained = [accuracy for length, accuracy in worst.items() if length <= train_length]
    beyond = [accuracy for length, accuracy in worst.items() if length > train_length]
    if not trained or not beyond:
        return None
    return RetrievalResult(method, min(trained), min(beyond), accuracies.solved_length(task, method))


def _section(
    text: str, sweep: str, task: str, perplexities: Perplexities, comparisons: Sequence[MethodComparison]
) -> Section:
    """Return the section about ``task``; ``text`` and ``sweep`` are names of the sweep on text and over tasks."""
    blocks: list[Block] = [
        Text(
            "Definition 0.1 judges the perplexity beyond the training length. The retrieval test judges whether a "
            f"distant answer is retrieved, with at least {SOLVED_PERCENT:g} % exact match at every depth of every "
            f"length beyond training. The two models of an encoding are different: one is trained on the text of "
            f"{text}, the other on {task} of {sweep}."
        ),
        _table(perplexities, comparisons),
    ]
    title, lead = "Perplexity and retrieval", describe_comparisons(comparisons)
    return Section(
        name=f"{text} and {sweep}",
        title=title,
        lead=lead,
        facts=[("perplexity", text), ("retrieval", f"{sweep}, {task}"), ("δ of Definition 0.1", f"{DELTA:g}")],
        parts=[Part("retrieval", title, blocks)],
        text=f"{title}\n{markdown([*blocks, *map(Text, lead)])}",
    )


def _table(perplexities: Perplexities, comparisons: Sequence[MethodComparison]) -> Table:
    rows = []
    for verdict, retrieval, lengths in comparisons:
        solved = "none" if retrieval.solved_length is None else f"{retrieval.solved_length} tokens"
        cells = [
            number_cell(verdict.deviation.end, "+.3f"),
            *map(text_cell, verdict.answers(DELTA)),
            number_cell(retrieval.trained, ".0f"),
            number_cell(retrieval.beyond, ".0f"),
            text_cell(solved),
            text_cell(retrieval.retrieves),
            *(lengths.cells() if lengths else [Cell("")] * len(_LENGTH_COLUMNS)),
        ]
        rows.append(TableRow(verdict.name, cells))
    head = ["encoding", f"deviation at {perplexities.lengths[-1]}", "extrapolates", "one-sided"]
    head += ["retrieved, trained", "retrieved, beyond", "solved up to", "retrieves", *_LENGTH_COLUMNS]
    caption = (
        f"Perplexity: relative deviation from that at {perplexities.train_length} tokens, and Definition 0.1 at "
        f"δ = {DELTA:g}. Retrieved: exact match in % at the worst depth, lowest of the trained lengths and lowest of "
        f"those beyond; the length up to which it is at least {SOLVED_PERCENT:g} %; whether this holds at every "
        f"length. {_ABOUT_LENGTHS}"
    )
    return Table(caption, head, rows)


def _lengths_section(text: str, sweep: str, lengths: Mapping[tuple[str, str], EffectiveLengths]) -> Section:
    """Return the section on the effective lengths of all tasks; ``text`` and ``sweep`` are names of the sweeps."""
    rows = [TableRow(task, [text_cell(name), *pair.cells()]) for (task, name), pair in lengths.items()]
    blocks: list[Block] = [Table(_ABOUT_LENGTHS, ["task", "encoding", *_LENGTH_COLUMNS], rows)]
    title = "Effective length by perplexity and by task"
    return Section(
        name=f"{text} and {sweep}",
        title=title,
        lead=["Text and tasks have separate models of each encoding."],
        facts=[("perplexity", text), ("tasks", sweep), ("δ of Definition 0.1", f"{DELTA:g}")],
        parts=[Part("effective-length", title, blocks)],
        text=f"{title}\n{markdown(blocks)}",
    )


def describe_comparisons(comparisons: Sequence[MethodComparison]) -> list[str]:
    """Return in words which methods extrapolate by perplexity (one-sided) and which retrieve distant text."""

    def names(extrapolates: str, retrieves: str) -> list[str]:
        return [
            c.retrieval.name
            for c in comparisons
            if (c.extrapolates, c.retrieval.retrieves) == (extrapolates, retrieves)
        ]

    groups = {
        "Extrapolates by perplexity and fails at retrieval": names("yes", "no"),
        "Extrapolates by perplexity and retrieves": names("yes", "yes"),
        "Retrieves, though its perplexity rises": names("no", "yes"),
        "Does neither": names("no", "no"),
        "Perplexity does not decide, because δ is within the interval of its deviation": [
            c.retrieval.name for c in comparisons if c.extrapolates == NOT_CERTAIN
        ],
        "No verdict on perplexity": [c.retrieval.name for c in comparisons if c.extrapolates == "no verdict"],
        f"No verdict on retrieval, because accuracy at trained lengths is below {SOLVED_PERCENT:g} %": [
            c.retrieval.name for c in comparisons if c.retrieval.retrieves == NO_VERDICT
        ],
    }
    return [f"{title}: {', '.join(members)}." for title, members in groups.items() if members]

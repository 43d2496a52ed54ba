"""Perplexity of sweeps on text against retrieval of sweeps over tasks with depths, for the same encodings.

An encoding whose attention decays with the distance can keep its perplexity by ignoring distant tokens, because near
tokens are enough to predict most of a text. It then extrapolates by Definition 0.1 and does not retrieve distant text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fairseq_rpe.reports import extrapolation_definition
from fairseq_rpe.reports.extrapolation_definition import DELTA, NONE, ObservedVerdict, PredictedVerdict
from fairseq_rpe.reports.page import Block, Part, Section, Text, markdown
from fairseq_rpe.reports.question_scores import load_results
from fairseq_rpe.reports.sweep_results import SOLVED_PERCENT, Accuracies, Perplexities
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.utils.table import Table, TableRow, number_cell, text_cell

NO_VERDICT = "no verdict"  # not solved at trained lengths


@dataclass(frozen=True)
class RetrievalResult:
    """Accuracy of a method on a task with depths, in percent at the worst depth.

    Attributes:
        name: name of the method.
        trained: lowest accuracy at trained lengths.
        beyond: lowest accuracy at lengths beyond them.
        solved_length: length up to which the task is solved at every depth; None: no length.
    """

    name: str
    trained: float
    beyond: float
    solved_length: int | None

    @property
    def retrieves(self) -> str:
        """Whether the task is solved at every depth of every length beyond training, if it is at trained ones."""
        if self.trained < SOLVED_PERCENT:
            return NO_VERDICT
        return "yes" if self.beyond >= SOLVED_PERCENT else "no"


def comparison_sections(folders: Sequence[SweepFolder]) -> list[Section]:
    """Build a section for each sweep on text and each task with depths that have methods in common.

    Methods are the same if their encoding and positions are, whatever their names.

    Raises:
        UserError: a folder has no finished evaluation.
    """
    records = {folder: folder.read_record() for folder in folders}
    if not {"text", "algorithms"} <= {record.kind for record in records.values()}:
        return []
    loaded = [(folder.path.resolve().name, record, load_results(folder, record)) for folder, record in records.items()]
    texts = [(name, record, results) for name, record, results in loaded if isinstance(results, Perplexities)]
    tasks = [(name, record, results) for name, record, results in loaded if isinstance(results, Accuracies)]
    sections = []
    for text_name, text_record, perplexities in texts:
        no_predictions = dict.fromkeys(perplexities.encodings, PredictedVerdict(NONE))
        verdicts = {
            verdict.name: verdict for verdict in extrapolation_definition.observe_verdicts(perplexities, no_predictions)
        }
        for task_name, task_record, accuracies in tasks:
            for task in accuracies.tasks_with_depths:
                pairs = [
                    (verdicts[name], replace(retrieval, name=name))
                    for method in accuracies.methods(task)
                    if (name := _same_method(task_record.method(method), map(text_record.method, verdicts)))
                    and (retrieval := retrieval_result(accuracies, task, method))
                ]
                if pairs:
                    sections.append(_section(text_name, task_name, task, perplexities, *zip(*pairs, strict=True)))
    return sections


def _same_method(method: Method, others: Iterable[Method]) -> str | None:
    """Return the name of the method among others that has the same encoding and positions, or None."""
    key = (method.rpe, method.positions_train, method.positions_eval)
    return next((o.name for o in others if (o.rpe, o.positions_train, o.positions_eval) == key), None)


def retrieval_result(accuracies: Accuracies, task: str, method: str) -> RetrievalResult | None:
    """Return a method's retrieval result, or None unless it was evaluated at trained lengths and beyond them."""
    worst, trained = accuracies.worst_depth_by_length(task, method), accuracies.train_items[task]
    within, beyond = ([v for n, v in worst.items() if (n > trained) is side] for side in (False, True))
    if not within or not beyond:
        return None
    return RetrievalResult(method, min(within), min(beyond), accuracies.solved_length(task, method))


def _section(
    text: str,
    sweep: str,
    task: str,
    perplexities: Perplexities,
    verdicts: Sequence[ObservedVerdict],
    retrievals: Sequence[RetrievalResult],
) -> Section:
    blocks: list[Block] = [
        Text(
            "Definition 0.1 judges the perplexity beyond the training length. The retrieval test judges whether a "
            f"distant answer is retrieved, with at least {SOLVED_PERCENT:g} % exact match at every depth of every "
            f"length beyond training. The two models of an encoding are different: one is trained on the text of "
            f"{text}, the other on {task} of {sweep}."
        ),
        _table(perplexities, verdicts, retrievals),
    ]
    title, lead = "Perplexity and retrieval", describe_verdicts(verdicts, retrievals)
    return Section(
        name=f"{text} and {sweep}",
        title=title,
        lead=lead,
        facts=[("perplexity", text), ("retrieval", f"{sweep}, {task}"), ("δ of Definition 0.1", f"{DELTA:g}")],
        parts=[Part("retrieval", title, blocks)],
        text=f"{title}\n{markdown([*blocks, *map(Text, lead)])}",
    )


def _table(
    perplexities: Perplexities, verdicts: Sequence[ObservedVerdict], retrievals: Sequence[RetrievalResult]
) -> Table:
    rows = []
    for verdict, retrieval in zip(verdicts, retrievals, strict=True):
        solved = "none" if retrieval.solved_length is None else f"{retrieval.solved_length} tokens"
        cells = [number_cell(verdict.deviation.end, "+.3f"), *map(text_cell, verdict.answers(DELTA))]
        cells += [number_cell(retrieval.trained, ".0f"), number_cell(retrieval.beyond, ".0f")]
        rows.append(TableRow(verdict.name, [*cells, text_cell(solved), text_cell(retrieval.retrieves)]))
    head = ["encoding", f"deviation at {perplexities.lengths[-1]}", "extrapolates", "one-sided"]
    head += ["retrieved, trained", "retrieved, beyond", "solved up to", "retrieves"]
    caption = (
        f"Perplexity: relative deviation from that at {perplexities.train_length} tokens, and Definition 0.1 at "
        f"δ = {DELTA:g}. Retrieved: exact match in % at the worst depth, lowest of the trained lengths and lowest of "
        f"those beyond; the length up to which it is at least {SOLVED_PERCENT:g} %; whether this holds at every length."
    )
    return Table(caption, head, rows)


def describe_verdicts(verdicts: Sequence[ObservedVerdict], retrievals: Sequence[RetrievalResult]) -> list[str]:
    """Return in words which methods extrapolate by perplexity (one-sided) and which retrieve distant text."""
    pairs = [(verdict.answers(DELTA)[1], r.retrieves, r.name) for verdict, r in zip(verdicts, retrievals, strict=True)]

    def names(extrapolates: str, retrieves: str) -> list[str]:
        return [name for a, b, name in pairs if (a, b) == (extrapolates, retrieves)]

    groups = {
        "Extrapolates by perplexity and fails at retrieval": names("yes", "no"),
        "Extrapolates by perplexity and retrieves": names("yes", "yes"),
        "Retrieves, though its perplexity rises": names("no", "yes"),
        "Does neither": names("no", "no"),
        "No verdict on perplexity": [name for extrapolates, _, name in pairs if extrapolates == "no verdict"],
        f"No verdict on retrieval, because accuracy at trained lengths is below {SOLVED_PERCENT:g} %": [
            name for _, retrieves, name in pairs if retrieves == NO_VERDICT
        ],
    }
    return [f"{title}: {', '.join(members)}." for title, members in groups.items() if members]

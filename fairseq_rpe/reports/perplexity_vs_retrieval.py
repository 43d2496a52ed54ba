"""Sweeps on text beside sweeps over tasks with depths: does a low perplexity mean that the far text is read?

An encoding whose attention falls with the distance can keep its perplexity by forgetting: near tokens are enough to
predict most of a text. It then extrapolates in the sense of Definition 0.1 and does not find what stands far away.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fairseq_rpe.reports import extrapolation_definition
from fairseq_rpe.reports.extrapolation_definition import DELTA, NONE, Judged, Prediction
from fairseq_rpe.reports.page import Block, Part, Section, Text, markdown
from fairseq_rpe.reports.question_scores import collect
from fairseq_rpe.reports.sweep_results import HELD, ExactAnswers, Perplexities
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.utils.table import Row, Table, number, words

TOO_FEW = "no verdict"  # already at trained lengths


@dataclass(frozen=True)
class Finder:
    """Exact answers of a method in per cent at the worst depth: at trained lengths, and the least of those beyond."""

    name: str
    trained: float
    beyond: float
    reach: int | None

    @property
    def finds(self) -> str:
        """Whether what is asked for is found at every depth of every length beyond the trained ones, and at those."""
        if self.trained < HELD:
            return TOO_FEW
        return "yes" if self.beyond >= HELD else "no"


def sections(folders: Sequence[SweepFolder]) -> list[Section]:
    """A section for each sweep on text and each task with depths that have a method in common, by whatever name.

    Raises UserError: a folder holds no finished evaluation.
    """
    states = {folder: folder.state() for folder in folders}
    if not {"text", "algorithms"} <= {state.kind for state in states.values()}:
        return []
    found = [(folder.path.resolve().name, state, collect(folder, state)) for folder, state in states.items()]
    texts = [(name, state, one) for name, state, one in found if isinstance(one, Perplexities)]
    tasks = [(name, state, one) for name, state, one in found if isinstance(one, ExactAnswers)]
    made = []
    for text, of_text, read in texts:
        judged = {
            one.name: one
            for one in extrapolation_definition.judge(read, dict.fromkeys(read.encodings, Prediction(NONE)))
        }
        for name, of_task, answered in tasks:
            for task in answered.deep:
                both = [
                    (judged[same], replace(one, name=same))
                    for method in answered.methods(task)
                    if (same := _same(of_task.method(method), map(of_text.method, judged)))
                    and (one := finder(answered, task, method))
                ]
                if both:
                    made.append(_section(text, name, task, read, [one for one, _ in both], [one for _, one in both]))
    return made


def _same(method: Method, others: Iterable[Method]) -> str | None:
    """The name of the one among others that is the same encoding with the same positions, by whatever name."""
    alike = (method.rpe, method.positions_train, method.positions_eval)
    return next((one.name for one in others if (one.rpe, one.positions_train, one.positions_eval) == alike), None)


def finder(found: ExactAnswers, task: str, method: str) -> Finder | None:
    """What a method finds; ``None`` where it was not evaluated at trained lengths and beyond them."""
    worst, trained = found.worst(task, method), found.trained[task]
    within, beyond = ([v for n, v in worst.items() if (n > trained) is side] for side in (False, True))
    if not within or not beyond:
        return None
    return Finder(method, min(within), min(beyond), found.reach(task, method))


def _section(
    text: str, tasks: str, task: str, read: Perplexities, judged: Sequence[Judged], finders: Sequence[Finder]
) -> Section:
    blocks: list[Block] = [
        Text(
            f"Definition 0.1 asks for the perplexity beyond the training length, the retrieval test whether an answer "
            f"far away is found: at least {HELD:g} % exact at every depth of every length beyond training. The models "
            f"are others, trained with the same encodings: on the text of {text} and on {task} of {tasks}."
        ),
        _table(read, judged, finders),
    ]
    title, said = "Perplexity beside retrieval", verdicts(judged, finders)
    return Section(
        name=f"{text} beside {tasks}",
        title=title,
        lead=said,
        facts=[("perplexity", text), ("retrieval", f"{tasks}, {task}"), ("δ of Definition 0.1", f"{DELTA:g}")],
        parts=[Part("beside", title, blocks)],
        text=f"{title}\n{markdown([*blocks, *map(Text, said)])}",
    )


def _table(read: Perplexities, judged: Sequence[Judged], finders: Sequence[Finder]) -> Table:
    longest, start = read.lengths[-1], read.trained_at
    rows = []
    for one, own in zip(judged, finders, strict=True):
        answers = one.answers(DELTA)
        found = words("none" if own.reach is None else f"{own.reach} tokens")
        cells = [number(one.found.end, "+.3f"), *map(words, answers), number(own.trained, ".0f")]
        rows.append(Row(one.name, [*cells, number(own.beyond, ".0f"), found, words(own.finds)]))
    head = ["encoding", f"deviation at {longest}", "extrapolates", "one-sided", "found, trained", "found, beyond"]
    caption = (
        f"Perplexity: its relative deviation from that at {start} tokens and Definition 0.1 at δ = {DELTA:g}. "
        "Found: exact match in % at the worst depth, at trained lengths and, the least, beyond; up to which length it "
        f"is {HELD:g} % or more; whether it is so at every length."
    )
    return Table(caption, [*head, "found to", "retrieves"], rows)


def verdicts(judged: Sequence[Judged], finders: Sequence[Finder]) -> list[str]:
    """In words, who extrapolates by perplexity, one-sided, and still does not find what stands far away."""
    pairs = list(zip((one.answers(DELTA)[1] for one in judged), finders, strict=True))
    said = {
        "Extrapolates by perplexity and fails at retrieval": [
            f.name for a, f in pairs if (a, f.finds) == ("yes", "no")
        ],
        "Extrapolates by perplexity and retrieves": [f.name for a, f in pairs if (a, f.finds) == ("yes", "yes")],
        "Retrieves, though its perplexity rises": [f.name for a, f in pairs if (a, f.finds) == ("no", "yes")],
        "Does neither": [f.name for a, f in pairs if (a, f.finds) == ("no", "no")],
        "No verdict on perplexity": [f.name for a, f in pairs if a == "no verdict"],
        f"No verdict on retrieval, below {HELD:g} % at trained lengths already": [
            f.name for _, f in pairs if f.finds == TOO_FEW
        ],
    }
    return [f"{what}: {', '.join(names)}." for what, names in said.items() if names]

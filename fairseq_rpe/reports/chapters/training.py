"""What is the same for every kind of sweep: its setting, its runs, their training, surroundings and commands."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import AnswerResult, TextResult
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.page import NOT_RECORDED, Block, Commands, Part, Text, picture
from fairseq_rpe.reports.sweep_results import asked
from fairseq_rpe.runs import log
from fairseq_rpe.runs.log import TrainLog
from fairseq_rpe.runs.reserved_flags import LATER, known
from fairseq_rpe.runs.run_folder import RunFolder, Start
from fairseq_rpe.sweeps.grid import RESULTS
from fairseq_rpe.sweeps.sweep_record import PublishedSettings, State, SweepFolder
from fairseq_rpe.utils.records import filled
from fairseq_rpe.utils.table import Cell, Row, Table, number, words

_DIGITS = 12  # of a digest: enough to tell checkpoints apart
_TITLES = {"commit": "git commit", "python": "Python", "threads": "threads of a process", "gpus": "GPUs"}
_LAST = ("threads", "gpus")
OPTIMISER = "AdamW"  # fairseq's adam, whose weight decay is decoupled
TIED = {True: "one table for input and output", False: "two tables"}
_PROGRAM = re.compile(r"\S*python[\d.]*( -P)?( \S+/run_module\.py)? -m fairseq_rpe\.cli\.main\b")
_ABSOLUTE = re.compile(r"(?<![\w.~/…$-])/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")
_COSTS = ("parameters", "training (s)", "tokens/s", "training loss", "validation loss", "evaluation (s)", "tokens/s")
_OPTIONAL = ("peak memory (MiB)", "engine")  # columns that are shown where they say something


@dataclass(frozen=True)
class Run:
    """A training run with what it left behind; ``rows``: its evaluations, of every method that shares it."""

    name: str
    label: str
    checkpoint: str | None
    starts: Sequence[Start]
    log: TrainLog
    rows: Sequence[TextResult | AnswerResult | QuestionResult]


def runs(folder: SweepFolder, state: State) -> list[Run]:
    """The runs of a sweep that were started, each once, in the order in which they were asked for.

    Of a sweep over questions the fine-tuned ones, after those of its own that they begin with.
    """
    found: dict[str, Run] = {}
    tuned = [(method.name, place) for _, method, _, place in asked(folder, state)]
    known = {place.name for _, place in tuned}
    begun = [] if state.kind != "answers" else [name for name in state.commands if name not in known]
    before = [(f"{name}, on text", RunFolder(folder.path / "runs" / name)) for name in begun]
    for label, place in (*before, *tuned):
        record = place.checkpoints.record()
        if place.name in found or record is None:
            continue
        checkpoint = record.finished.checkpoint
        kept: Sequence[Any] = records.read(RESULTS[state.kind], place.results)
        rows = [row for row in kept if row.checkpoint == checkpoint]
        own = (place.checkpoints.starts(), log.read(place.train_log), rows)
        found[place.name] = Run(place.name, label, checkpoint, *own)
    return list(found.values())


def here(state: State, made: Sequence[Run]) -> PublishedSettings:
    """The setting of a sweep, of questions that of its fine-tuning, as far as it or a log has it on record."""
    own = state.tuned or state.settings
    named = _portable(state.data or next((run.log.data for run in made if run.log.data), None) or "", made) or None
    sizes = [run.log.parameters for run in made if run.log.parameters]
    flags = {word.partition("=")[0] for word in own.extra or ()}
    # what a further flag may have changed is not known
    later = {name: own.usual(name) if own.arch and known(name, own.extra or ()) else None for name in LATER}
    schedule = own.schedule or (None if own.lr is None else "inverse_sqrt")
    found = filled(
        PublishedSettings,
        own,
        data=None if state.algorithms else ", ".join(state.questions) or named,
        model=own.arch,
        vocabulary=next((run.log.vocabulary for run in made if run.log.vocabulary), None),
        parameters=max(sizes, default=None),
        # of all processes together
        batch_sentences=(own.batch_sentences or 0) * (own.update_freq or 1) * (own.nproc or 1) or None,
        schedule=schedule,
        optimiser=OPTIMISER if own.arch and "--optimizer" not in flags else None,
        context=records.context_of(own.usual("blocks"), bool(own.separate_documents)) if state.kind == "text" else None,
        **later,
    )
    return found if schedule == "cosine" else replace(found, min_lr=None)


def facts(state: State, made: Sequence[Run]) -> list[tuple[str, str]]:
    """What was trained and how, as far as it is on record."""
    settings, own = state.tuned or state.settings, here(state, made)
    sizes = sorted({run.log.parameters for run in made if run.log.parameters})
    shapes = {"linear": "linear to 0", "cosine": f"cosine to {own.min_lr or 0:g}"}
    falls = shapes.get(own.schedule or "", "inverse square root")
    trained = own.batch_sentences and own.updates is not None
    found = [
        ("recipe", state.recipe),
        ("paper", state.paper),
        ("tasks", ", ".join(state.algorithms)),
        ("questions", _questions(state, made)),
        ("trained before", state.tuned and _before(state, made)),
        ("compared", ", ".join(state.encodings)),
        ("data", own.data),
        ("evaluated on", ", ".join(f"{name}: {_portable(one.data, made)}" for name, one in state.evaluate.items())),
        ("data, SHA-256", settings.data if state.kind == "text" else None),
        ("vocabulary", own.vocabulary and f"{own.vocabulary:,} types"),
        ("architecture", own.model),
        ("activation", own.activation_fn),
        ("embeddings", None if own.share_embeddings is None else TIED[own.share_embeddings]),
        ("parameters", " to ".join(dict.fromkeys(f"{n:,}" for n in (*sizes[:1], *sizes[-1:])))),
        ("training length", own.tokens and f"{own.tokens} tokens"),
        ("blocks", own.context),
        ("training", f"{own.updates:,} updates of {_sequences(own)}" if trained else None),
        ("learning rate", own.lr and f"{own.lr:g}, {own.warmup} of warm-up, {falls}"),
        ("optimiser", _optimiser(own)),
        ("dropout", None if settings.dropout is None else f"{settings.dropout:g}"),
        ("further flags", " ".join(settings.extra or ())),
        ("seeds", ", ".join(map(str, state.seeds))),
    ]
    return [(key, str(value)) for key, value in found if value]


def _questions(state: State, made: Sequence[Run]) -> str:
    return ", ".join(f"{name}: {_portable(one.data, made)}" for name, one in state.questions.items())


def _before(state: State, made: Sequence[Run]) -> str:
    """The training on text that a fine-tuning begins with."""
    own = here(replace(state, tuned=None, questions={}), [])
    at = f" at {own.tokens} tokens" if own.tokens else ""
    updates = f", {own.updates:,} updates of {_sequences(own)}" if own.updates else ""
    return f"on {_portable(state.data or 'text', made)}{at}{updates}"


def _sequences(own: PublishedSettings) -> str:
    """What an update reads: so many sequences, or of documents, which differ in length, the tokens of as many."""
    if own.context != "within documents":
        return f"{own.batch_sentences} sequences"
    return f"up to {(own.batch_sentences or 0) * (own.tokens or 0):,} tokens, each sequence of one document"


def _optimiser(own: PublishedSettings) -> str | None:
    """Where all of it is known."""
    if own.optimiser is None or own.betas is None or own.weight_decay is None or own.clip_norm is None:
        return None
    betas = ", ".join(f"{beta:g}" for beta in own.betas)
    return f"{own.optimiser}, betas {betas}, weight decay {own.weight_decay:g}, gradients clipped at {own.clip_norm:g}"


def parts(state: State, made: Sequence[Run]) -> list[Part]:
    """Training, costs, environment and commands."""
    return [
        Part("training", "Training", _training(made)),
        Part("runs", "Runs", [_costs(made)]),
        Part("environment", "Environment", _environment(made)),
        Part("commands", "Commands", _commands(state, made)),
    ]


def _training(made: Sequence[Run]) -> list[Block]:
    logged = [run for run in made if run.log.loss]
    absent = _absent("Training curves", made, logged)
    if not logged:
        return absent
    final = ", ".join(f"{run.name} {list(run.log.loss.values())[-1]:.2f}" for run in logged)
    alt = f"Training loss in bits per token against updates. At the end: {final}."
    caption = "Training loss by update, the mean since the point before; right: the second half of training, enlarged."
    return [picture(sweep_curves.training([(run.label, run.log.loss) for run in logged]), alt, caption), *absent]


def _absent(what: str, made: Sequence[Run], recorded: Sequence[Run]) -> list[Block]:
    """Says which runs lack a record, if any."""
    missing = [run.name for run in made if run not in recorded]
    which = "" if len(missing) == len(made) else f" for {', '.join(missing)}"
    return [Text(f"{what}: {NOT_RECORDED}{which}.")] if missing else []


def _costs(made: Sequence[Run]) -> Table:
    rows = []
    for run in made:
        texts = [row for row in run.rows if isinstance(row, TextResult)]
        seconds = sum(row.seconds or 0.0 for row in run.rows) or None
        tokens = sum(row.tokens for row in texts if row.seconds)
        cells = [
            _known(run.log.parameters, ",d"),
            _known(run.log.seconds, ".0f"),
            _known(run.log.tokens_per_second, ",.0f"),
            _known(next(reversed(run.log.loss.values()), None), ".3f"),
            _known(next(reversed(run.log.valid.values()), None), ".3f"),
            _known(seconds, ".1f"),
            number(tokens / seconds if tokens and seconds else None, ",.0f"),
            number(max((row.peak_mb for row in texts if row.peak_mb is not None), default=None), ",.0f"),
            Cell(", ".join(dict.fromkeys(row.engine for row in texts if row.engine))),
            words(run.log.backend or NOT_RECORDED),
            Cell(run.checkpoint[:_DIGITS], run.checkpoint) if run.checkpoint else Cell("unfinished"),
        ]
        rows.append(Row(run.name, cells, "" if run.name.startswith(run.label) else run.label))
    head = [*_COSTS, *_OPTIONAL, "attention", "checkpoint"]
    shown = [k for k, title in enumerate(head) if title not in _OPTIONAL or any(row.cells[k].text for row in rows)]
    caption = (
        "Cost of each run. Training time: of all its starts, validation and saving included; its tokens/s: median over "
        "the log. Losses in bits per token, the last logged. Evaluation: all lengths and methods of the run together. "
        "Checkpoint: how its SHA-256 begins."
    )
    lines = [replace(row, cells=[row.cells[k] for k in shown]) for row in rows]
    return Table(caption, ["run", *(head[k] for k in shown)], lines)


def _known(value: float | None, form: str) -> Cell:
    return Cell(NOT_RECORDED) if value is None else number(value, form)


def _environment(made: Sequence[Run]) -> list[Block]:
    """What the starts of training found, those that found the same together."""
    groups: dict[Start, list[tuple[Run, Start]]] = {}
    for run in made:
        for start in run.starts:
            groups.setdefault(replace(start, time=None, from_update=None, working_folder=None), []).append((run, start))
    blocks: list[Block] = []
    names = sorted((f.name for f in fields(Start)), key=lambda name: name in _LAST)
    for count, (fixed, own) in enumerate(groups.items(), start=1):
        known = [(name, value) for name in names if (value := getattr(fixed, name)) is not None]
        lines = [Row(_TITLES.get(name, name), [_shown(value)]) for name, value in known]
        times = [start.time for _, start in own if start.time]
        lines.append(Row("started (UTC)", [Cell(" … ".join(dict.fromkeys((min(times), max(times)))))] if times else []))
        resumed = [f" (resumed after update {start.from_update})" if start.from_update else "" for _, start in own]
        titles = [run.name + after for (run, _), after in zip(own, resumed, strict=True)]
        lines.append(Row("runs", [Cell(", ".join(titles))]))
        which = f" {count} of {len(groups)}" if len(groups) > 1 else ""
        blocks.append(Table(f"Recorded when training started{which}.", ["", "value"], lines, words=True))
    return [*blocks, *_absent("Environment of training", made, [run for run in made if run.starts])]


def _shown(value: object) -> Cell:
    return Cell(", ".join(map(str, value)) or "none used") if isinstance(value, tuple) else words(value)


def _commands(state: State, made: Sequence[Run]) -> list[Block]:
    noted = [run for run in made if state.commands.get(run.name)]
    absent = _absent("Commands", made, noted)
    if not noted:
        return absent
    stages = {run.name: state.commands[run.name].items() for run in noted}
    lines = [
        (name, [(stage, _portable(line, made)) for stage, lines in own for line in lines])
        for name, own in stages.items()
    ]
    about = "What the sweep carried out. Paths start at the folder where it was started; others are shown by their end."
    return [Text(about), Commands(lines), *absent]


def _portable(text: str, made: Sequence[Run]) -> str:
    """A path or command as it can be shown anywhere: without the folders of the machine that it comes from."""
    text = _PROGRAM.sub("fairseq-rpe", text)
    roots = {start.working_folder for run in made for start in run.starts if start.working_folder}
    for root in sorted(roots - {"/"}, key=len, reverse=True):
        text = re.sub(
            rf"(?<![\w.]){re.escape(root)}(?:/|(?![\w.-]))", lambda found: "" if found[0].endswith("/") else ".", text
        )
    return _ABSOLUTE.sub("…/", text)

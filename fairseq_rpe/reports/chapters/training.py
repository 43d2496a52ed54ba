"""What is the same for every kind of sweep: its setting, its runs, their training, surroundings and commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from fairseq_rpe.core.table import Cell, Row, Table, number, words
from fairseq_rpe.evaluation import results
from fairseq_rpe.evaluation.results import AnswerResult, TextResult
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.page import NOT_RECORDED, Block, Commands, Part, Text, picture
from fairseq_rpe.runs import log
from fairseq_rpe.runs.log import TrainLog
from fairseq_rpe.runs.run_folder import RunRecord, Start
from fairseq_rpe.sweeps.state import State, SweepFolder

_DIGITS = 12  # of a digest: enough to tell checkpoints apart
_TITLES = {
    "commit": "git commit",
    "python": "Python",
    "threads": "threads of a process",
    "gpus": "GPUs",
    "working_folder": "working folder",
}
_LAST = ("threads", "gpus", "working_folder")


@dataclass(frozen=True)
class Run:
    """A training run with what it left behind; ``rows``: its evaluations, of every method that shares it."""

    name: str
    label: str
    seed: int
    record: RunRecord
    starts: Sequence[Start]
    log: TrainLog
    rows: Sequence[TextResult | AnswerResult]


@dataclass(frozen=True)
class Evaluated:
    """What the evaluations of a run took together; ``tokens`` of those whose time is on record."""

    seconds: float
    tokens: int
    peak_mb: float | None
    engines: str


def runs(folder: SweepFolder, state: State) -> list[Run]:
    """The runs of a sweep that were started, each once, in the order in which they were asked for."""
    found: dict[str, Run] = {}
    for task in state.algorithms or (None,):
        for label in state.encodings:
            for seed in state.seeds:
                place = folder.run_of(state.method(label), seed, task)
                record = place.checkpoints.record()
                if place.name in found or record is None:
                    continue
                kept = results.read(AnswerResult if task else TextResult, place.results)
                found[place.name] = Run(
                    name=place.name,
                    label=label,
                    seed=seed,
                    record=record,
                    starts=place.checkpoints.starts(),
                    log=log.read(place.train_log),
                    rows=[row for row in kept if row.checkpoint == record.finished.checkpoint],
                )
    return list(found.values())


def vocabulary(made: Sequence[Run]) -> int | None:
    """The types of the dictionary, from a training log."""
    return next((run.log.vocabulary for run in made if run.log.vocabulary), None)


def data_name(state: State, made: Sequence[Run]) -> str | None:
    """The data folder as it was named, from the sweep's record or from a training log."""
    return state.data or next((run.log.data for run in made if run.log.data), None)


def batch(state: State) -> int:
    """Sequences of an update, of all processes together; 0: not on record."""
    settings = state.settings
    return (settings.batch_sentences or 0) * (settings.update_freq or 1) * (settings.nproc or 1)


def facts(state: State, made: Sequence[Run], paper: str) -> list[tuple[str, str]]:
    """What was trained and how, as far as it is on record."""
    settings, types = state.settings, vocabulary(made)
    text = not state.algorithms
    sizes = sorted({run.log.parameters for run in made if run.log.parameters})
    schedule = "linear to 0" if settings.schedule == "linear" else "inverse square root"
    trained = batch(state) and settings.updates is not None
    found = [
        ("recipe", state.recipe),
        ("paper", paper),
        ("tasks", ", ".join(state.algorithms)),
        ("compared", ", ".join(state.encodings)),
        ("data", data_name(state, made) if text else None),
        ("data, SHA-256", settings.data if text else None),
        ("vocabulary", f"{types:,} types" if types else None),
        ("architecture", settings.arch),
        ("parameters", " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1]))) if sizes else None),
        ("training length", f"{settings.tokens} tokens" if settings.tokens else None),
        ("training", f"{settings.updates:,} updates of {batch(state)} sequences" if trained else None),
        ("learning rate", settings.lr and f"{settings.lr:g}, {settings.warmup} of warm-up, {schedule}"),
        ("dropout", None if settings.dropout is None else f"{settings.dropout:g}"),
        ("further flags", " ".join(settings.extra or ())),
        ("seeds", ", ".join(map(str, state.seeds))),
    ]
    return [(key, value) for key, value in found if value]


def parts(state: State, made: Sequence[Run]) -> list[Part]:
    """Training, costs, environment and commands."""
    return [
        Part("training", "Training", _training(made)),
        Part("runs", "Runs", [_costs(made)]),
        Part("environment", "Environment", _environment(made)),
        Part("commands", "Commands", _commands(state, made)),
    ]


def _training(made: Sequence[Run]) -> list[Block]:
    absent = _absent("Training curves", made, lambda run: bool(run.log.loss))
    curves = [(run.label, run.log.loss) for run in made if run.log.loss]
    if not curves:
        return absent
    final = ", ".join(f"{run.name} {list(run.log.loss.values())[-1]:.2f}" for run in made if run.log.loss)
    alt = f"Training loss in bits per token against updates. At the end: {final}."
    caption = "Training loss by update, the mean since the point before; right: the second half of training, enlarged."
    return [picture(sweep_curves.training(curves), alt, caption), *absent]


def _absent(what: str, made: Sequence[Run], recorded: Callable[[Run], bool]) -> list[Block]:
    """Says which runs lack a record, if any."""
    missing = [run.name for run in made if not recorded(run)]
    if not missing:
        return []
    which = "" if len(missing) == len(made) else f" for {', '.join(missing)}"
    return [Text(f"{what}: {NOT_RECORDED}{which}.")]


def _costs(made: Sequence[Run]) -> Table:
    evaluated = [_evaluated(run) for run in made]
    peaks, engines = any(one.peak_mb is not None for one in evaluated), any(one.engines for one in evaluated)
    head = ["run", "parameters", "training (s)", "tokens/s", "training loss", "validation loss"]
    head += ["evaluation (s)", "tokens/s"]
    head += ["peak memory (MiB)"] * peaks + ["engine"] * engines + ["attention", "checkpoint"]
    lines = []
    for run, one in zip(made, evaluated, strict=True):
        digest = run.record.finished.checkpoint
        cells = [
            _known(run.log.parameters, ",d"),
            _known(run.log.seconds, ".0f"),
            _known(run.log.tokens_per_second, ",.0f"),
            _known(list(run.log.loss.values())[-1] if run.log.loss else None, ".3f"),
            _known(list(run.log.valid.values())[-1] if run.log.valid else None, ".3f"),
            _known(one.seconds or None, ".1f"),
            number(one.tokens / one.seconds if one.tokens and one.seconds else None, ",.0f"),
            *[number(one.peak_mb, ",.0f")] * peaks,
            *[Cell(one.engines)] * engines,
            words(run.log.backend or NOT_RECORDED),
            Cell(digest[:_DIGITS], digest) if digest else Cell("unfinished"),
        ]
        lines.append(Row(run.name, cells, "" if run.name.startswith(run.label) else run.label))
    caption = (
        "Cost of each run. Training time: of all its starts, validation and saving included; its tokens/s: median over "
        "the log. Losses in bits per token, the last logged. Evaluation: all lengths and methods of the run together. "
        "Checkpoint: how its SHA-256 begins."
    )
    return Table(caption, head, lines)


def _evaluated(run: Run) -> Evaluated:
    timed = [row for row in run.rows if row.seconds]
    texts = [row for row in run.rows if isinstance(row, TextResult)]
    return Evaluated(
        seconds=sum(row.seconds or 0.0 for row in timed),
        tokens=sum(row.tokens for row in timed if isinstance(row, TextResult)),
        peak_mb=max((row.peak_mb for row in texts if row.peak_mb is not None), default=None),
        engines=", ".join(dict.fromkeys(row.engine for row in texts if row.engine)),
    )


def _known(value: float | None, form: str) -> Cell:
    return Cell(NOT_RECORDED) if value is None else number(value, form)


def _environment(made: Sequence[Run]) -> list[Block]:
    """What the starts of training found, those that found the same together."""
    groups: dict[Start, list[tuple[Run, Start]]] = {}
    for run in made:
        for start in run.starts:
            groups.setdefault(replace(start, time=None, from_update=None), []).append((run, start))
    blocks: list[Block] = []
    for count, (fixed, own) in enumerate(groups.items(), start=1):
        names = sorted((f.name for f in fields(Start)), key=lambda name: name in _LAST)
        known = [(name, value) for name in names if (value := getattr(fixed, name)) is not None]
        lines = [Row(_TITLES.get(name, name), [_shown(value)]) for name, value in known]
        times = [start.time for _, start in own if start.time]
        lines.append(Row("started (UTC)", [Cell(" … ".join(dict.fromkeys((min(times), max(times)))))] if times else []))
        resumed = [f" (resumed after update {start.from_update})" if start.from_update else "" for _, start in own]
        titles = [run.name + after for (run, _), after in zip(own, resumed, strict=True)]
        lines.append(Row("runs", [Cell(", ".join(titles))]))
        which = f" {count} of {len(groups)}" if len(groups) > 1 else ""
        blocks.append(Table(f"Recorded when training started{which}.", ["", "value"], lines, words=True))
    return [*blocks, *_absent("Environment of training", made, lambda run: bool(run.starts))]


def _shown(value: object) -> Cell:
    if isinstance(value, tuple):
        return Cell(", ".join(map(str, value)) or "none used")
    return words(value)


def _commands(state: State, made: Sequence[Run]) -> list[Block]:
    noted = [
        (run.name, [(stage, line) for stage, lines in state.commands[run.name].items() for line in lines])
        for run in made
        if state.commands.get(run.name)
    ]
    blocks: list[Block] = []
    if noted:
        blocks += [Text("What the sweep carried out; relative paths start at the working folder."), Commands(noted)]
    return [*blocks, *_absent("Commands", made, lambda run: bool(state.commands.get(run.name)))]

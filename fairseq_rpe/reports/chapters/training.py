"""Chapters that all kinds of sweeps share: settings, runs, training, environment and commands."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, TextResult
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.page import NOT_RECORDED, Block, Commands, Part, Text, svg_picture
from fairseq_rpe.reports.sweep_results import planned_runs
from fairseq_rpe.runs import log
from fairseq_rpe.runs.log import TrainLog
from fairseq_rpe.runs.reserved_flags import SETTING_FLAGS, is_unchanged_by_flags
from fairseq_rpe.runs.run_folder import RunFolder, TrainingStart
from fairseq_rpe.sweeps.grid import RESULT_TYPES
from fairseq_rpe.sweeps.sweep_record import PublishedSettings, SweepFolder, SweepRecord
from fairseq_rpe.utils.records import from_attributes
from fairseq_rpe.utils.table import Cell, Table, TableRow, number_cell, text_cell

_DIGITS = 12  # shown digits of a digest
_TITLES = {"commit": "git commit", "python": "Python", "threads": "threads of a process", "gpus": "GPUs"}
_LAST = ("threads", "gpus")
OPTIMISER = "AdamW"  # fairseq's adam, whose weight decay is decoupled
TIED = {True: "one table for input and output", False: "two tables"}
_PROGRAM = re.compile(r"\S*python[\d.]*( -P)?( \S+/run_module\.py)? -m fairseq_rpe\.cli\.main\b")
_ABSOLUTE = re.compile(r"(?<![\w.~/…$-])/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")
_COSTS = ("parameters", "training (s)", "tokens/s", "training loss", "validation loss", "evaluation (s)", "tokens/s")
_OPTIONAL = ("peak memory (MiB)", "engine")  # columns that are left out if they are empty


@dataclass(frozen=True)
class TrainedRun:
    """A finished training run.

    Attributes:
        name: name of the run folder.
        label: name of the method, for figures.
        checkpoint: digest of the last checkpoint.
        starts: environment of each start of the training.
        log: values from the training log.
        rows: results of all methods that share the run.
    """

    name: str
    label: str
    checkpoint: str | None
    starts: Sequence[TrainingStart]
    log: TrainLog
    rows: Sequence[TextResult | ExactMatchResult | QuestionResult]


def load_runs(folder: SweepFolder, record: SweepRecord) -> list[TrainedRun]:
    """Read the finished runs of a sweep, each once, in the order of the sweep.

    For a sweep over questions, the pre-training runs of the sweep come before the fine-tuned ones.
    """
    compared = [(method.name, run) for _, method, _, run in planned_runs(folder, record)]
    names = {run.name for _, run in compared}
    others = [name for name in record.commands if name not in names] if record.kind == "answers" else []
    pretrained = [(f"{name}, on text", RunFolder(folder.path / "runs" / name)) for name in others]
    loaded: dict[str, TrainedRun] = {}
    for label, run in (*pretrained, *compared):
        run_record = run.checkpoints.read_record()
        if run.name in loaded or run_record is None:
            continue
        checkpoint = run_record.finished.checkpoint
        results: Sequence[Any] = records.read_results(RESULT_TYPES[record.kind], run.results)
        rows = [result for result in results if result.checkpoint == checkpoint]
        starts, train_log = run.checkpoints.read_starts(), log.read_log(run.train_log)
        loaded[run.name] = TrainedRun(run.name, label, checkpoint, starts, train_log, rows)
    return list(loaded.values())


def own_settings(record: SweepRecord, runs: Sequence[TrainedRun]) -> PublishedSettings:
    """Return the settings of a sweep in the form of a paper's; for a sweep over questions those of the fine-tuning.

    Args:
        record: record of the sweep.
        runs: trained runs, whose logs have further values.
    """
    settings = record.fine_tuning or record.settings
    data = _portable(record.data or next((run.log.data for run in runs if run.log.data), None) or "", runs) or None
    sizes = [run.log.parameters for run in runs if run.log.parameters]
    flags = settings.extra or ()
    flag_names = {word.partition("=")[0] for word in flags}
    # a further flag may have changed a default: then the value is unknown
    effective = {
        name: settings.effective(name) if settings.arch and is_unchanged_by_flags(name, flags) else None
        for name in SETTING_FLAGS
    }
    schedule = settings.schedule or (None if settings.lr is None else "inverse_sqrt")
    context = None
    if record.kind == "text":
        context = records.document_context(settings.effective("blocks"), bool(settings.separate_documents))
    published = from_attributes(
        PublishedSettings,
        settings,
        data=None if record.algorithms else ", ".join(record.questions) or data,
        model=settings.arch,
        vocabulary=next((run.log.vocabulary for run in runs if run.log.vocabulary), None),
        parameters=max(sizes, default=None),
        # sum over all processes
        batch_sentences=(settings.batch_sentences or 0) * (settings.update_freq or 1) * (settings.nproc or 1) or None,
        schedule=schedule,
        optimiser=OPTIMISER if settings.arch and "--optimizer" not in flag_names else None,
        context=context,
        **effective,
    )
    return published if schedule == "cosine" else replace(published, min_lr=None)


def setting_facts(record: SweepRecord, runs: Sequence[TrainedRun]) -> list[tuple[str, str]]:
    """Return name and value of each recorded setting, for the page."""
    settings, ours = record.fine_tuning or record.settings, own_settings(record, runs)
    sizes = sorted({run.log.parameters for run in runs if run.log.parameters})
    schedules = {"linear": "linear to 0", "cosine": f"cosine to {ours.min_lr or 0:g}"}
    schedule = schedules.get(ours.schedule or "", "inverse square root")
    has_updates = ours.batch_sentences and ours.updates is not None
    texts = ", ".join(f"{name}: {_portable(text.data, runs)}" for name, text in record.evaluate.items())
    questions = ", ".join(f"{name}: {_portable(folder.data, runs)}" for name, folder in record.questions.items())
    facts = [
        ("recipe", record.recipe),
        ("paper", record.paper),
        ("tasks", ", ".join(record.algorithms)),
        ("questions", questions),
        ("pre-training", record.fine_tuning and _pretraining(record, runs)),
        ("compared", ", ".join(record.encodings)),
        ("data", ours.data),
        ("evaluated on", texts),
        ("data, SHA-256", settings.data if record.kind == "text" else None),
        ("vocabulary", ours.vocabulary and f"{ours.vocabulary:,} types"),
        ("architecture", ours.model),
        ("activation", ours.activation_fn),
        ("embeddings", None if ours.share_embeddings is None else TIED[ours.share_embeddings]),
        ("parameters", " to ".join(dict.fromkeys(f"{n:,}" for n in (*sizes[:1], *sizes[-1:])))),
        ("training length", ours.tokens and f"{ours.tokens} tokens"),
        ("blocks", ours.context),
        ("training", f"{ours.updates:,} updates of {_batch(ours)}" if has_updates else None),
        ("learning rate", ours.lr and f"{ours.lr:g}, {ours.warmup} of warm-up, {schedule}"),
        ("optimiser", _optimiser(ours)),
        ("dropout", None if settings.dropout is None else f"{settings.dropout:g}"),
        ("further flags", " ".join(settings.extra or ())),
        ("seeds", ", ".join(map(str, record.seeds))),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _pretraining(record: SweepRecord, runs: Sequence[TrainedRun]) -> str:
    """Describe the pre-training on text of a fine-tuning."""
    settings = own_settings(replace(record, fine_tuning=None, questions={}), [])
    length = f" at {settings.tokens} tokens" if settings.tokens else ""
    updates = f", {settings.updates:,} updates of {_batch(settings)}" if settings.updates else ""
    return f"on {_portable(record.data or 'text', runs)}{length}{updates}"


def _batch(settings: PublishedSettings) -> str:
    """Describe the batch: a number of sequences, or of tokens for blocks of one document, which differ in length."""
    if settings.context != "within documents":
        return f"{settings.batch_sentences} sequences"
    tokens = (settings.batch_sentences or 0) * (settings.tokens or 0)
    return f"up to {tokens:,} tokens, each sequence from one document"


def _optimiser(settings: PublishedSettings) -> str | None:
    """Describe the optimiser, or return None if a setting is unknown."""
    values = (settings.optimiser, settings.betas, settings.weight_decay, settings.clip_norm)
    if settings.betas is None or any(value is None for value in values):
        return None
    betas = ", ".join(f"{beta:g}" for beta in settings.betas)
    return (
        f"{settings.optimiser}, betas {betas}, weight decay {settings.weight_decay:g}, gradients clipped at "
        f"{settings.clip_norm:g}"
    )


def run_parts(record: SweepRecord, runs: Sequence[TrainedRun]) -> list[Part]:
    """Build the chapters on training, costs, environment and commands."""
    return [
        Part("training", "Training", _training(runs)),
        Part("runs", "Runs", [_costs(runs)]),
        Part("environment", "Environment", _environment(runs)),
        Part("commands", "Commands", _commands(record, runs)),
    ]


def _training(runs: Sequence[TrainedRun]) -> list[Block]:
    logged = [run for run in runs if run.log.loss]
    absent = _absent("Training curves", runs, logged)
    if not logged:
        return absent
    final = ", ".join(f"{run.name} {list(run.log.loss.values())[-1]:.2f}" for run in logged)
    alt = f"Training loss in bits per token against updates. At the end: {final}."
    caption = "Training loss by update, mean since the previous point; right: the second half of training, enlarged."
    return [
        svg_picture(sweep_curves.draw_training_loss([(run.label, run.log.loss) for run in logged]), alt, caption),
        *absent,
    ]


def _absent(what: str, runs: Sequence[TrainedRun], recorded: Sequence[TrainedRun]) -> list[Block]:
    """Note on the runs that lack a record, if there are any."""
    missing = [run.name for run in runs if run not in recorded]
    which = "" if len(missing) == len(runs) else f" for {', '.join(missing)}"
    return [Text(f"{what}: {NOT_RECORDED}{which}.")] if missing else []


def _costs(runs: Sequence[TrainedRun]) -> Table:
    rows = []
    for run in runs:
        texts = [row for row in run.rows if isinstance(row, TextResult)]
        seconds = sum(row.seconds or 0.0 for row in run.rows) or None
        tokens = sum(row.tokens for row in texts if row.seconds)
        cells = [
            _recorded_number(run.log.parameters, ",d"),
            _recorded_number(run.log.seconds, ".0f"),
            _recorded_number(run.log.tokens_per_second, ",.0f"),
            _recorded_number(next(reversed(run.log.loss.values()), None), ".3f"),
            _recorded_number(next(reversed(run.log.valid.values()), None), ".3f"),
            _recorded_number(seconds, ".1f"),
            number_cell(tokens / seconds if tokens and seconds else None, ",.0f"),
            number_cell(max((row.peak_mb for row in texts if row.peak_mb is not None), default=None), ",.0f"),
            Cell(", ".join(dict.fromkeys(row.engine for row in texts if row.engine))),
            text_cell(run.log.backend or NOT_RECORDED),
            Cell(run.checkpoint[:_DIGITS], run.checkpoint) if run.checkpoint else Cell("unfinished"),
        ]
        rows.append(TableRow(run.name, cells, "" if run.name.startswith(run.label) else run.label))
    head = [*_COSTS, *_OPTIONAL, "attention", "checkpoint"]
    shown = [
        column
        for column, title in enumerate(head)
        if title not in _OPTIONAL or any(row.cells[column].text for row in rows)
    ]
    caption = (
        "Cost of each run. Training time: sum over all starts, with validation and saving; its tokens/s: median over "
        "the log. Losses: the last logged value in bits per token. Evaluation: sum over all lengths and methods of the "
        "run. Checkpoint: first digits of its SHA-256."
    )
    shown_rows = [replace(row, cells=[row.cells[column] for column in shown]) for row in rows]
    return Table(caption, ["run", *(head[column] for column in shown)], shown_rows)


def _recorded_number(value: float | None, form: str) -> Cell:
    return Cell(NOT_RECORDED) if value is None else number_cell(value, form)


def _environment(runs: Sequence[TrainedRun]) -> list[Block]:
    """Tables of the environments of training; starts with the same environment share a table."""
    groups: dict[TrainingStart, list[tuple[TrainedRun, TrainingStart]]] = {}
    for run in runs:
        for start in run.starts:
            groups.setdefault(replace(start, time=None, from_update=None, working_folder=None), []).append((run, start))
    blocks: list[Block] = []
    names = sorted((f.name for f in fields(TrainingStart)), key=lambda name: name in _LAST)
    for count, (fixed, members) in enumerate(groups.items(), start=1):
        recorded = [(name, value) for name in names if (value := getattr(fixed, name)) is not None]
        lines = [TableRow(_TITLES.get(name, name), [_shown(value)]) for name, value in recorded]
        times = [start.time for _, start in members if start.time]
        lines.append(
            TableRow("started (UTC)", [Cell(" … ".join(dict.fromkeys((min(times), max(times)))))] if times else [])
        )
        resumed = [f" (resumed after update {start.from_update})" if start.from_update else "" for _, start in members]
        titles = [run.name + after for (run, _), after in zip(members, resumed, strict=True)]
        lines.append(TableRow("runs", [Cell(", ".join(titles))]))
        which = f" {count} of {len(groups)}" if len(groups) > 1 else ""
        blocks.append(Table(f"Recorded when training started{which}.", ["", "value"], lines, is_text=True))
    return [*blocks, *_absent("Environment of training", runs, [run for run in runs if run.starts])]


def _shown(value: object) -> Cell:
    return Cell(", ".join(map(str, value)) or "none used") if isinstance(value, tuple) else text_cell(value)


def _commands(record: SweepRecord, runs: Sequence[TrainedRun]) -> list[Block]:
    with_commands = [run for run in runs if record.commands.get(run.name)]
    absent = _absent("Commands", runs, with_commands)
    if not with_commands:
        return absent
    stages = {run.name: record.commands[run.name].items() for run in with_commands}
    lines = [
        (name, [(stage, _portable(line, runs)) for stage, lines in members for line in lines])
        for name, members in stages.items()
    ]
    about = (
        "Commands that the sweep ran. Paths are relative to the folder where it was started; other paths are shortened."
    )
    return [Text(about), Commands(lines), *absent]


def _portable(text: str, runs: Sequence[TrainedRun]) -> str:
    """Return a path or command without the folders of the machine that it comes from."""
    text = _PROGRAM.sub("fairseq-rpe", text)
    roots = {start.working_folder for run in runs for start in run.starts if start.working_folder}
    for root in sorted(roots - {"/"}, key=len, reverse=True):
        text = re.sub(
            rf"(?<![\w.]){re.escape(root)}(?:/|(?![\w.-]))", lambda match: "" if match[0].endswith("/") else ".", text
        )
    return _ABSOLUTE.sub("…/", text)

"""Chapters that all kinds of sweeps share: settings, runs, training, environment and commands."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fairseq_rpe.checkpoints.model_sizes import find_size
from fairseq_rpe.core.layer_pattern import format_layers, is_pattern, parse_pattern
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, Result, TextResult
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.page import NOT_RECORDED, Block, Commands, Part, Text, svg_picture
from fairseq_rpe.reports.sweep_results import planned_runs
from fairseq_rpe.runs import log
from fairseq_rpe.runs.log import TrainLog
from fairseq_rpe.runs.reserved_flags import flag_values, is_unchanged_by_flags
from fairseq_rpe.runs.run_folder import RunFolder, RunRecord, TrainingStart
from fairseq_rpe.runs.settings import RunSettings
from fairseq_rpe.runs.training_config import OVERRIDABLE, option_name
from fairseq_rpe.sweeps.sweep_kind import sweep_kind
from fairseq_rpe.sweeps.sweep_record import PublishedSettings, SweepFolder, SweepRecord
from fairseq_rpe.utils.records import from_attributes
from fairseq_rpe.utils.table import Cell, Table, TableRow, number_cell, text_cell

_DIGITS = 12  # shown digits of a digest
# fields of TrainingStart with another title than their name, and those that the page shows last
_TITLES = {"commit": "git commit", "python": "Python", "threads": "threads of a process", "gpus": "GPUs"}
_LAST = ("threads", "gpus")
_PUBLISHED = {f.name for f in fields(PublishedSettings)}
OPTIMISER = "AdamW"  # fairseq's adam, whose weight decay is decoupled
TIED = {True: "one table for input and output", False: "two tables"}
_LAYERS = "--decoder-layers"
_COSTS = ("parameters", "training (s)", "tokens/s", "training loss", "validation loss", "evaluation (s)", "tokens/s")
_COSTS += ("peak memory (MiB)", "engine", "attention", "checkpoint")
_OPTIONAL_COSTS = ("peak memory (MiB)", "engine")  # columns that are left out if they are empty
# how a sweep starts its commands, as in "/usr/bin/python3 -P …/run_module.py -m fairseq_rpe.cli.main train"
_PROGRAM = re.compile(r"\S*python[\d.]*( -P)?( \S+/run_module\.py)? -m fairseq_rpe\.cli\.main\b")
# folders of an absolute path, without its last component
_ABSOLUTE = re.compile(r"(?<![\w.~/…$-])/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")


@dataclass(frozen=True)
class TrainedRun:
    """A finished training run.

    Attributes:
        name: name of the run folder.
        label: name of the method, for figures.
        checkpoint: digest of the evaluated checkpoint, None if the training is not finished.
        starts: environment of each start of the training.
        log: values from the training log.
        results: results of all methods that share the run.
    """

    name: str
    label: str
    checkpoint: str | None
    starts: Sequence[TrainingStart]
    log: TrainLog
    results: Sequence[TextResult | ExactMatchResult | QuestionResult]


def load_runs(folder: SweepFolder, record: SweepRecord) -> list[TrainedRun]:
    """Read the finished runs of a sweep, each once, in the order of the sweep.

    In a sweep over questions, the runs of the pre-training on text come before the fine-tuned runs.
    """
    labelled = [(method.name, run) for _, method, _, run in planned_runs(folder, record)]
    kinds = {run.name: record.question_config.checkpoint for _, run in labelled} if record.question_config else {}
    if record.fine_tuning is not None:
        fine_tuned = {run.name for _, run in labelled}
        pretrained = [name for name in record.commands if name not in fine_tuned]
        labelled = [(f"{name}, on text", RunFolder(folder.path / "runs" / name)) for name in pretrained] + labelled
    loaded: dict[str, TrainedRun] = {}
    for label, run in labelled:
        run_record = run.checkpoints.read_record()
        if run.name not in loaded and run_record is not None:
            result_type = sweep_kind(record.kind).result_type
            is_best, finished = kinds.get(run.name) == "best", run_record.finished
            digest = finished.best if is_best else finished.checkpoint
            loaded[run.name] = load_run(label, run, run.train_log, digest, result_type)
    return list(loaded.values())


def load_run(label: str, run: RunFolder, train_log: Path, checkpoint: str | None, kind: type[Result]) -> TrainedRun:
    """Read the logs and results of a run.

    Args:
        label: name of the run in figures.
        run: its folder.
        train_log: log of the training.
        checkpoint: digest of the evaluated checkpoint, None if the training is not finished.
        kind: record of one result.

    Returns:
        The run, with the results of that checkpoint.
    """
    all_results: Sequence[Any] = records.read_results(kind, run.results)
    results = [result for result in all_results if result.checkpoint == checkpoint]
    return TrainedRun(run.name, label, checkpoint, run.checkpoints.read_starts(), log.read_log(train_log), results)


def own_settings(record: SweepRecord, runs: Sequence[TrainedRun]) -> PublishedSettings:
    """Return the settings of a sweep in the form of a paper's; for a sweep over questions those of the fine-tuning.

    Args:
        record: record of the sweep.
        runs: trained runs, whose logs have further values.

    Returns:
        The settings; None for each that is not known.
    """
    settings = record.fine_tuning or record.settings
    data = ", ".join(record.questions) or None if record.tasks else _data_name(record.data, runs)
    return _paper_settings(settings, settings.updates, data, not record.tasks, runs)


def _paper_settings(
    settings: RunSettings, updates: int | None, data: str | None, is_on_text: bool, runs: Sequence[TrainedRun]
) -> PublishedSettings:
    """Return the settings of trainings in the form of a paper's; ``data`` names the data."""
    flags = settings.extra or ()
    flag_names = {word.partition("=")[0] for word in flags}
    # a further flag may have changed a default: then the value is unknown
    effective = {
        name: settings.effective(name) if settings.arch and is_unchanged_by_flags(name, flags) else None
        for name in OVERRIDABLE
        if name in _PUBLISHED
    }
    if effective["schedule"] != "cosine":
        effective["min_lr"] = None  # other schedules have no last learning rate
    context = None
    if is_on_text:
        context = records.document_context(settings.effective("blocks"), bool(settings.separate_documents))
    process_count = settings.nproc or 1
    sentences_per_process = (settings.batch_sentences or 0) * (settings.update_freq or 1)
    return from_attributes(
        PublishedSettings,
        settings,
        data=data,
        updates=updates,
        model=settings.arch,
        vocabulary=next((run.log.vocabulary for run in runs if run.log.vocabulary), None),
        parameters=max((run.log.parameters for run in runs if run.log.parameters), default=None),
        batch_sentences=sentences_per_process * process_count or None,
        optimiser=OPTIMISER if settings.arch and "--optimizer" not in flag_names else None,
        context=context,
        **effective,
    )


def _data_name(recorded: str | None, runs: Sequence[TrainedRun]) -> str | None:
    """Return the data folder of trainings on text, by its record or else by their logs; None if unknown."""
    data = recorded or next((run.log.data for run in runs if run.log.data), None)
    return _portable(data, runs) or None if data else None


def setting_facts(record: SweepRecord, runs: Sequence[TrainedRun]) -> list[tuple[str, str]]:
    """Return name and value of each recorded setting, for the page."""
    settings, ours = record.fine_tuning or record.settings, own_settings(record, runs)
    texts = ", ".join(f"{name}: {_portable(text.data, runs)}" for name, text in record.evaluate.items())
    questions = ", ".join(f"{name}: {_portable(folder.data, runs)}" for name, folder in record.questions.items())
    facts = [
        ("recipe", record.recipe),
        ("paper", record.paper),
        ("tasks", ", ".join(record.algorithms)),
        ("questions", questions),
        ("pre-training", record.fine_tuning and _pretraining(record, runs)),
        ("compared", ", ".join(record.encodings)),
        *_layer_facts([method.rpe for method in map(record.method, record.encodings)], settings),
        ("data", ours.data),
        ("evaluated on", texts),
        ("data, SHA-256", None if record.tasks else settings.data),
        *_training_facts(settings, ours, runs),
        ("seeds", ", ".join(map(str, record.seeds))),
    ]
    return [(name, str(value)) for name, value in facts if value]


def run_facts(run: TrainedRun, record: RunRecord) -> list[tuple[str, str]]:
    """Return name and value of each recorded setting of one run on text, for the page."""
    settings, runs = record.settings, [run]
    ours = _paper_settings(settings, record.updates, _data_name(None, runs), True, runs)
    facts = [
        ("encoding", settings.rpe),
        *_layer_facts([settings.rpe or ""], settings),
        ("position transform", settings.positions_train),
        ("data", ours.data),
        ("data, SHA-256", settings.data),
        *_training_facts(settings, ours, runs),
        ("seed", settings.seed),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _layer_facts(specs: Iterable[str], settings: RunSettings) -> list[tuple[str, str | None]]:
    """Return the layers of each encoding of the patterns of layers among ``specs``, if the architecture is known."""
    size = find_size(settings.arch or "")
    stated = flag_values(settings.extra or (), [_LAYERS]).get(_LAYERS, "")
    count = int(stated) if stated.isdecimal() else size.layers if size else 0
    facts: list[tuple[str, str | None]] = []
    for spec in filter(is_pattern, dict.fromkeys(specs)):
        if count:
            groups = parse_pattern(spec).groups(count)
            layers = "; ".join(f"{format_layers(group.layers)}: {group.spec}" for group in groups)
            facts.append((f"layers of {spec}", layers))
    return facts


def _training_facts(
    settings: RunSettings, ours: PublishedSettings, runs: Sequence[TrainedRun]
) -> list[tuple[str, str | None]]:
    """Return name and value of each setting of trainings; ``ours`` has the settings in the form of a paper's."""
    sizes = [run.log.parameters for run in runs if run.log.parameters]
    has_updates = ours.batch_sentences and ours.updates is not None
    return [
        ("vocabulary", f"{ours.vocabulary:,} types" if ours.vocabulary else None),
        ("architecture", ours.model),
        ("layers", " ".join(_block_flags(settings))),
        ("activation", ours.activation_fn),
        ("embeddings", None if ours.share_embeddings is None else TIED[ours.share_embeddings]),
        ("parameters", " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)})) if sizes else None),
        ("training length", f"{ours.tokens} tokens" if ours.tokens else None),
        ("blocks", ours.context),
        ("training", f"{ours.updates:,} updates of {_batch(ours)}" if has_updates else None),
        ("learning rate", f"{ours.lr:g}, {ours.warmup} of warm-up, {_schedule(ours)}" if ours.lr else None),
        ("optimiser", _optimiser(ours)),
        ("dropout", None if settings.dropout is None else f"{settings.dropout:g}"),
        ("further flags", " ".join(settings.extra or ())),
    ]


def _block_flags(settings: RunSettings) -> list[str]:
    """Return the options of the layers that differ from those of an architecture, as for ``fairseq-rpe train``."""
    names = ("block", "norm", "norm_position", "bias", "block_init")
    names += ("kv_heads", "head_dim", "qk_norm", "logit_softcap")
    values = {name: getattr(settings, name) for name in names}
    return [f"{option_name(name)} {value}" for name, value in values.items() if value is not None]


def _schedule(settings: PublishedSettings) -> str:
    """Describe the schedule of the learning rate."""
    if settings.schedule == "cosine":
        return f"cosine to {settings.min_lr or 0:g}"
    return "linear to 0" if settings.schedule == "linear" else "inverse square root"


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


def run_parts(runs: Sequence[TrainedRun]) -> list[Part]:
    """Build the chapters on training, costs and environment."""
    return [
        Part("training", "Training", _training(runs)),
        Part("runs", "Runs", [_costs(runs)]),
        Part("environment", "Environment", _environment(runs)),
    ]


def _training(runs: Sequence[TrainedRun]) -> list[Block]:
    """Build the figure of the training losses, and a note on runs without them."""
    logged = [run for run in runs if run.log.loss]
    absent = _absent("Training curves", runs, logged)
    if not logged:
        return absent
    final = ", ".join(f"{run.name} {_last_value(run.log.loss):.2f}" for run in logged)
    alt = f"Training loss in bits per token against updates. At the end: {final}."
    caption = "Training loss by update, mean since the previous point; right: the second half of training, enlarged."
    figure = sweep_curves.draw_training_loss([(run.label, run.log.loss) for run in logged])
    return [svg_picture(figure, alt, caption), *absent]


def _last_value(loss_by_update: dict[int, float]) -> float | None:
    """Return the value of the last update, or None if there is none."""
    return next(reversed(loss_by_update.values()), None)


def _absent(what: str, runs: Sequence[TrainedRun], recorded: Sequence[TrainedRun]) -> list[Block]:
    """Build a note on the runs that lack a record; nothing if all have it.

    Args:
        what: what is recorded, as the start of a sentence.
        runs: all runs.
        recorded: runs that have the record.
    """
    missing = [run.name for run in runs if run not in recorded]
    which = "" if len(missing) == len(runs) else f" for {', '.join(missing)}"
    return [Text(f"{what}: {NOT_RECORDED}{which}.")] if missing else []


def _costs(runs: Sequence[TrainedRun]) -> Table:
    """Return the table of the costs of each run."""
    cells = {run.name: _cost_cells(run) for run in runs}
    shown = [
        column
        for column, title in enumerate(_COSTS)
        if title not in _OPTIONAL_COSTS or any(row[column].text for row in cells.values())
    ]
    rows = []
    for run in runs:
        note = "" if run.name.startswith(run.label) else run.label
        rows.append(TableRow(run.name, [cells[run.name][column] for column in shown], note))
    caption = (
        "Cost of each run. Training time: sum over all starts, with validation and saving; its tokens/s: median over "
        "the log. Losses: the last logged value in bits per token. Evaluation: sum over all lengths and methods of the "
        "run. Checkpoint: first digits of its SHA-256."
    )
    return Table(caption, ["run", *(_COSTS[column] for column in shown)], rows)


def _cost_cells(run: TrainedRun) -> list[Cell]:
    """Return the cells of a run, in the order of ``_COSTS``."""
    text_results = [result for result in run.results if isinstance(result, TextResult)]
    seconds = sum(result.seconds or 0.0 for result in run.results) or None
    tokens = sum(result.tokens for result in text_results if result.seconds)
    peak_mb = max((result.peak_mb for result in text_results if result.peak_mb is not None), default=None)
    return [
        _recorded_number(run.log.parameters, ",d"),
        _recorded_number(run.log.seconds, ".0f"),
        _recorded_number(run.log.tokens_per_second, ",.0f"),
        _recorded_number(_last_value(run.log.loss), ".3f"),
        _recorded_number(_last_value(run.log.valid), ".3f"),
        _recorded_number(seconds, ".1f"),
        number_cell(tokens / seconds if tokens and seconds else None, ",.0f"),
        number_cell(peak_mb, ",.0f"),
        Cell(", ".join(dict.fromkeys(result.engine for result in text_results if result.engine))),
        text_cell(run.log.backend or NOT_RECORDED),
        Cell(run.checkpoint[:_DIGITS], run.checkpoint) if run.checkpoint else Cell("unfinished"),
    ]


def _recorded_number(value: float | None, form: str) -> Cell:
    return Cell(NOT_RECORDED) if value is None else number_cell(value, form)


def _environment(runs: Sequence[TrainedRun]) -> list[Block]:
    """Build the tables of the environments of training; starts with the same environment share a table."""
    groups: dict[TrainingStart, list[tuple[TrainedRun, TrainingStart]]] = {}
    for run in runs:
        for start in run.starts:
            environment = replace(start, time=None, from_update=None, working_folder=None)
            groups.setdefault(environment, []).append((run, start))
    blocks: list[Block] = []
    for number, (environment, members) in enumerate(groups.items(), start=1):
        which = f" {number} of {len(groups)}" if len(groups) > 1 else ""
        rows = _environment_rows(environment, members)
        blocks.append(Table(f"Recorded when training started{which}.", ["", "value"], rows, is_text=True))
    return [*blocks, *_absent("Environment of training", runs, [run for run in runs if run.starts])]


def _environment_rows(
    environment: TrainingStart, members: Sequence[tuple[TrainedRun, TrainingStart]]
) -> list[TableRow]:
    """Return the rows of an environment, with the times and names of the runs that started in it."""
    names = sorted((field.name for field in fields(TrainingStart)), key=lambda name: name in _LAST)
    values = {name: getattr(environment, name) for name in names}
    rows = [
        TableRow(_TITLES.get(name, name), [_value_cell(value)]) for name, value in values.items() if value is not None
    ]
    times = [start.time for _, start in members if start.time]
    first_and_last = " … ".join(sorted({min(times), max(times)})) if times else ""
    rows.append(TableRow("started (UTC)", [Cell(first_and_last)] if times else []))
    titles = []
    for run, start in members:
        titles.append(f"{run.name} (resumed after update {start.from_update})" if start.from_update else run.name)
    rows.append(TableRow("runs", [Cell(", ".join(titles))]))
    return rows


def _value_cell(value: object) -> Cell:
    return Cell(", ".join(map(str, value)) or "none used") if isinstance(value, tuple) else text_cell(value)


def commands_part(record: SweepRecord, runs: Sequence[TrainedRun]) -> Part:
    """Build the chapter on the commands of each run, with a note on runs without them."""
    return Part("commands", "Commands", _commands(record, runs))


def _commands(record: SweepRecord, runs: Sequence[TrainedRun]) -> list[Block]:
    with_commands = [run for run in runs if record.commands.get(run.name)]
    absent = _absent("Commands", runs, with_commands)
    if not with_commands:
        return absent
    commands = []
    for run in with_commands:
        stages = record.commands[run.name]
        commands.append(
            (run.name, [(stage, _portable(line, runs)) for stage, lines in stages.items() for line in lines])
        )
    about = (
        "Commands that the sweep ran. Paths are relative to the folder where it was started; other paths are shortened."
    )
    return [Text(about), Commands(commands), *absent]


def _portable(text: str, runs: Sequence[TrainedRun]) -> str:
    """Return a path or command without the folders of the machine that it comes from.

    A path in a working folder of the runs becomes relative; of any other absolute path only the last component stays.
    """
    text = _PROGRAM.sub("fairseq-rpe", text)
    roots = {start.working_folder for run in runs for start in run.starts if start.working_folder}
    for root in sorted(roots - {"/"}, key=len, reverse=True):  # longest first: one may contain another
        # "root/file" becomes "file", and "root" alone becomes "."
        pattern = rf"(?<![\w.]){re.escape(root)}(?:/|(?![\w.-]))"
        text = re.sub(pattern, lambda match: "" if match[0].endswith("/") else ".", text)
    return _ABSOLUTE.sub("…/", text)

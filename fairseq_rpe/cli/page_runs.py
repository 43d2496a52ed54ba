"""The part of a report's page that is the same for every kind of sweep: its runs, their training and surroundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import environment, report, train_log
from fairseq_rpe.cli.page import NOT_RECORDED, Block, Cell, Commands, Part, Row, Table, Text, number, picture, words
from fairseq_rpe.core.files import read_json, read_json_lines

_DIGITS = 12  # of a digest: enough to tell checkpoints apart
_SHOWN = {
    "fairseq_rpe": "fairseq_rpe",
    "commit": "git commit",
    "fairseq": "fairseq",
    "torch": "torch",
    "python": "Python",
    "system": "system",
    "processor": "processor",
    "cores": "cores",
    "threads": "threads of a process",
    "gpus": "GPUs",
    "working_folder": "working folder",
}


@dataclass(frozen=True)
class Run:
    """A training run with what it left behind; ``rows``: its evaluations, of every method that shares it."""

    name: str
    label: str
    seed: int
    record: dict[str, Any]
    starts: list[dict[str, Any]]
    log: train_log.TrainLog
    rows: list[dict[str, Any]]

    @property
    def checkpoint(self) -> str | None:
        return self.record.get("finished", {}).get("checkpoint")


def runs(folder: Path, state: dict[str, Any]) -> list[Run]:
    """The runs of a sweep that were started, each once, in the order in which they were asked for."""
    found: dict[str, Run] = {}
    for task in state.get("algorithms") or [None]:
        for label in state["encodings"]:
            for seed in state["seeds"]:
                name = report.run_name(report.method_of(state, label), seed, task)
                place = folder / "runs" / name
                path = place / "checkpoints" / "run.json"
                if name in found or not path.exists():
                    continue
                record = read_json(path)
                checkpoint = record.get("finished", {}).get("checkpoint")
                rows = [r for r in read_json_lines(place / report.RESULTS) if r["checkpoint"] == checkpoint]
                found[name] = Run(
                    name=name,
                    label=label,
                    seed=seed,
                    record=record,
                    starts=environment.starts_of(place / "checkpoints"),
                    log=train_log.read(place / "train.log"),
                    rows=rows,
                )
    return list(found.values())


def parts(state: dict[str, Any], made: list[Run]) -> list[Part]:
    """Training, costs, environment and commands."""
    return [
        Part("training", "Training", _training(made)),
        Part("runs", "Runs", [_costs(made)]),
        Part("environment", "Environment", _environment(made)),
        Part("commands", "Commands", _commands(state, made)),
    ]


def _training(made: list[Run]) -> list[Block]:
    from fairseq_rpe.cli.figure import training

    curves = [(run.label, run.log.loss) for run in made if run.log.loss]
    if not curves:
        return _absent("Training curves", made, lambda run: run.log.loss)
    final = ", ".join(f"{run.name} {list(run.log.loss.values())[-1]:.2f}" for run in made if run.log.loss)
    alt = f"Training loss in bits per token against updates. At the end: {final}."
    caption = "Training loss by update, the mean since the point before; right: the second half of training, enlarged."
    return [picture(training(curves), alt, caption), *_absent("Training curves", made, lambda run: run.log.loss)]


def _absent(what: str, made: list[Run], recorded: Callable[[Run], Any]) -> list[Block]:
    """Says which runs lack a record, if any."""
    missing = [run.name for run in made if not recorded(run)]
    if not missing:
        return []
    which = "" if len(missing) == len(made) else f" for {', '.join(missing)}"
    return [Text(f"{what}: {NOT_RECORDED}{which}.")]


def _costs(made: list[Run]) -> Table:
    head = [
        "run",
        "parameters",
        "training (s)",
        "tokens/s",
        "training loss",
        "validation loss",
        "evaluation (s)",
        "tokens/s",
    ]
    peaks = [max((r["peak_mb"] for r in run.rows if r.get("peak_mb") is not None), default=None) for run in made]
    engines = [", ".join(dict.fromkeys(str(r["engine"]) for r in run.rows if r.get("engine"))) for run in made]
    head += ["peak memory (MiB)"] if any(peak is not None for peak in peaks) else []
    head += ["engine"] if any(engines) else []
    head += ["attention", "checkpoint"]
    lines = []
    for run, peak, engine in zip(made, peaks, engines, strict=True):
        log, timed = run.log, [r for r in run.rows if r.get("seconds")]
        seconds = sum(r["seconds"] for r in timed)
        scored = sum(r.get("tokens", 0) for r in timed)
        cells = [
            _known(log.parameters, ",d"),
            _known(log.seconds, ".0f"),
            _known(log.tokens_per_second, ",.0f"),
            _known(list(log.loss.values())[-1] if log.loss else None, ".3f"),
            _known(list(log.valid.values())[-1] if log.valid else None, ".3f"),
            _known(seconds or None, ".1f"),
            number(scored / seconds, ",.0f") if scored and seconds else Cell(""),
        ]
        cells += [number(peak, ",.0f")] if "peak memory (MiB)" in head else []
        cells += [Cell(engine)] if "engine" in head else []
        digest = run.checkpoint
        cells += [words(log.backend or NOT_RECORDED)]
        cells += [Cell(digest[:_DIGITS], digest) if digest else Cell("unfinished")]
        lines.append(Row(run.name, cells, "" if run.name.startswith(run.label) else run.label))
    caption = (
        "Cost of each run. Training time: of all its starts, validation and saving included; its tokens/s: median over "
        "the log. Losses in bits per token, the last logged. Evaluation: all lengths and methods of the run together. "
        "Checkpoint: how its SHA-256 begins."
    )
    return Table(caption, head, lines)


def _known(value: float | None, form: str) -> Cell:
    return Cell(NOT_RECORDED) if value is None else number(value, form)


def _environment(made: list[Run]) -> list[Block]:
    groups: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {}
    for run in made:
        for start in run.starts:
            fixed = {key: value for key, value in start.items() if key not in environment.OCCASION}
            _, names, times = groups.setdefault(repr(sorted(fixed.items())), (fixed, [], []))
            after = start.get("from_update")
            names.append(f"{run.name} (resumed after update {after})" if after else run.name)
            times += [start["time"]] if start.get("time") else []
    blocks: list[Block] = []
    for count, (fixed, names, times) in enumerate(groups.values(), start=1):
        lines = [Row(title, [_shown(fixed.get(key))]) for key, title in _SHOWN.items() if key in fixed]
        lines.append(Row("started (UTC)", [Cell(" … ".join(dict.fromkeys((min(times), max(times)))))] if times else []))
        lines.append(Row("runs", [Cell(", ".join(names))]))
        which = f" {count} of {len(groups)}" if len(groups) > 1 else ""
        blocks.append(Table(f"Recorded when training started{which}.", ["", "value"], lines, words=True))
    return [*blocks, *_absent("Environment of training", made, lambda run: run.starts)]


def _shown(value: Any) -> Cell:
    if isinstance(value, list):
        return Cell(", ".join(map(str, value)) or "none used")
    return words("none" if value is None else value)


def _commands(state: dict[str, Any], made: list[Run]) -> list[Block]:
    known = state.get("commands") or {}
    noted = [
        (run.name, [(stage, line) for stage, lines in known[run.name].items() for line in lines])
        for run in made
        if known.get(run.name)
    ]
    blocks: list[Block] = []
    if noted:
        blocks += [Text("What the sweep carried out; relative paths start at the working folder."), Commands(noted)]
    return [*blocks, *_absent("Commands", made, lambda run: known.get(run.name))]

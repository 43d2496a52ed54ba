"""A sweep's evaluations for TensorBoard: a curve and an HParams session per result, and a layout of charts.

Written by torch's SummaryWriter, each with ``purge_step`` so that a running TensorBoard forgets what it had read of the
replaced files. Tags begin with a number where TensorBoard, which sorts them, is to show them first. Not by the writer's
``add_hparams``: that would purge nothing, repeat the experiment in every session (of which TensorBoard takes the first,
so columns would depend on what that one measured) and name columns by their tags.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fairseq_rpe.reports.question_scores import Scores
from fairseq_rpe.reports.sweep_results import ExactAnswers, Perplexities, asked, grouped
from fairseq_rpe.runs.run_folder import RunRecord
from fairseq_rpe.runs.settings import IDENTITY
from fairseq_rpe.sweeps.sweep_record import Method, State, SweepFolder, slug

_LEARNED = re.compile(r'"(?:train_)?rpe_(\w+?)_[lh]\d+": ')
Chosen = dict[str, str | float]


def write(folder: SweepFolder, state: State, found: Perplexities | ExactAnswers | Scores, target: Path) -> None:
    """Replace the folder ``target`` by a sweep's evaluations."""
    if isinstance(found, Perplexities):
        names = {f"ppl_at/{n}": f"ppl at {n} tokens" for n in found.shown_lengths}
        tag, title = "1_by_length/ppl", "perplexity over evaluation length (step = tokens)"
    elif isinstance(found, Scores):
        names = {f"score_at/{n}": f"mean score (%) at {n} tokens" for n in found.lengths}
        tag, title = "1_by_length/score", "mean score in % over context length (step = tokens)"
    else:
        names = {f"exact/{part}": f"exact match (%), {part}" for part in ("trained", "beyond", "all")}
        tag, title = "1_by_items/exact", "exact match in % over items (step = items)"
    # runs of older versions have their losses without a group
    charts = {title: tag, "validation loss (bits per token)": "2_validation/loss"}
    charts |= {"training loss (bits per token)": "(?:3_training/)?loss", "validation perplexity": "2_validation/ppl"}
    charts |= _learned(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    # beside tensorboard/, not in it: a running TensorBoard would show the unfinished folder
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".board-") as name:
        made, sessions = Path(name) / "new", []
        by_run: dict[Any, list[Any]] = grouped(found.rows, lambda row: (row.task, row.method, row.seed))
        for task, method, seed, run in asked(folder, state):
            label = method.name
            if rows := by_run.get((task, label, seed)):
                sessions.append(_chosen(state, task, method, seed, run.checkpoints.record() or RunRecord()))
                session = made / slug(f"{task}@{label}" if task else label, seed)
                metrics, curve = _measured(replace(found, rows=rows), label, task)
                _session(session, sessions[-1], {k: v for k, v in metrics.items() if k in names}, curve, tag)
        _experiment(made, charts, names, sessions)
        if target.exists():
            target.rename(Path(name) / "old")
        made.rename(target)


def _measured(
    own: Perplexities | ExactAnswers | Scores, label: str, task: str | None
) -> tuple[dict[str, float], dict[int, float]]:
    """Of one run, the metrics by tag and the curve by step."""
    if isinstance(own, Perplexities):
        curve = {row.result.length: row.result.ppl for row in own.rows}
        return {f"ppl_at/{length}": ppl for length, ppl in curve.items()}, curve
    if isinstance(own, Scores):
        curve = {length: seeds[0] for length, seeds in own.over_sets(label).items()}
        return {f"score_at/{length}": value for length, value in curve.items()}, curve
    metrics = {f"exact/{part}": mean for part, mean in own.means(task, label).items() if mean is not None}
    return metrics, {items: values[0] for items, values in own.of(task, label).items()}


def _chosen(state: State, task: str | None, method: Method, seed: int, run: RunRecord) -> Chosen:
    """The settings of a run that the HParams tab compares; those not on record are left out."""
    moved = method.positions_train
    values = {
        "task": task,
        "method": method.name if method.name != method.rpe else None,
        "encoding": method.rpe,
        "encoding_eval": method.rpe_eval,
        "positions_train": moved,
        "positions_eval": method.positions_eval or (moved if moved == IDENTITY else f"default of {moved}"),
        "seed": seed,
        "arch": run.settings.arch or state.settings.arch,
        "tokens": run.settings.tokens or state.settings.tokens,
        "updates": run.updates or state.settings.updates,
    }
    # numbers are of one type, as torch wants them
    return {k: v if isinstance(v, str) else float(v) for k, v in values.items() if v is not None}


def _learned(folder: SweepFolder) -> dict[str, str]:
    """Charts of the quantities that training has logged: title -> pattern of tags."""
    names: dict[str, None] = {}
    for log in sorted(folder.path.glob("runs/*/train.log")):
        # a quantity is on every line that training logs, and only there as a quoted key
        names |= dict.fromkeys(_LEARNED.findall(log.read_text(encoding="utf-8", errors="replace")))
    charts = {}
    for name in names:
        charts[f"{name}, each encoding and head (--inspect-every)"] = f"rpe/{re.escape(name)}/.*"
        charts[f"{name} of each head, mean over layers"] = rf"(?:4_encoding/)?rpe_{re.escape(name)}_h\d+"
        charts[f"{name} of each layer, mean over heads"] = rf"(?:4_encoding/)?rpe_{re.escape(name)}_l\d+"
    return charts


def _experiment(
    folder: Path, charts: Mapping[str, str], metrics: Mapping[str, str], sessions: Sequence[Chosen]
) -> None:
    """The columns of the HParams tab: ``metrics``, by tag their titles; chart -> pattern of a whole tag.

    Each chart is a category of its own, because those of one category share rows.
    """
    keys = dict.fromkeys(key for chosen in sessions for key in chosen)
    values = {key: list(dict.fromkeys(chosen[key] for chosen in sessions if key in chosen)) for key in keys}
    columns, _, _ = hparams({key: v[0] for key, v in values.items()}, dict.fromkeys(metrics, 0.0), values)
    about = columns.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(about.content)
    for info in data.experiment.metric_infos:
        info.display_name = metrics[info.name.tag]
    about.content = data.SerializeToString()
    layout = {title: {title: ["Multiline", [f"^{pattern}$"]]} for title, pattern in charts.items()}
    with SummaryWriter(str(folder), purge_step=0) as writer:
        writer.file_writer.add_summary(columns, 0)
        writer.add_custom_scalars(layout)


def _session(folder: Path, chosen: Chosen, metrics: Mapping[str, float], curve: Mapping[int, float], tag: str) -> None:
    """One run of the HParams tab: what was chosen, what came out, and the curve behind it by step."""
    _, start, end = hparams(chosen, {})
    with SummaryWriter(str(folder), purge_step=0) as writer:
        writer.file_writer.add_summary(start, 0)
        for key, value in metrics.items():
            writer.add_scalar(key, value, 0)
        writer.file_writer.add_summary(end, 0)
        for step, value in curve.items():
            writer.add_scalar(tag, value, step)

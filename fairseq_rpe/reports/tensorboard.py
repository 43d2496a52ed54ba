"""A sweep's evaluations for TensorBoard: a curve and an HParams session for each run, and a layout of charts.

torch's SummaryWriter writes the files, with ``purge_step`` so that a running TensorBoard drops the values of replaced
files. TensorBoard sorts tags, so tags to be shown first begin with a number. The writer's ``add_hparams`` is not used:
it purges nothing, names columns by their tags, and repeats the experiment in every session, of which TensorBoard reads
only the first, so that columns would depend on that session.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fairseq_rpe.reports.question_scores import AnyResults, Scores
from fairseq_rpe.reports.sweep_results import Perplexities, group_by, planned_runs
from fairseq_rpe.runs.run_folder import RunRecord
from fairseq_rpe.runs.settings import IDENTITY
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord, slug

_QUANTITY = re.compile(r'"(?:train_)?rpe_(\w+?)_[lh]\d+": ')  # key of a logged quantity of a layer or head
RunSettings = dict[str, str | float]


class _MetricTags(NamedTuple):
    """Tags of a sweep's evaluations.

    Attributes:
        names: names of the metrics, the columns of the HParams tab, by tag.
        curve: tag of the curve of each run.
        title: title of the chart of all curves.
    """

    names: dict[str, str]
    curve: str
    title: str


def write_tensorboard(folder: SweepFolder, record: SweepRecord, results: AnyResults, target: Path) -> None:
    """Write a sweep's evaluations in place of the folder ``target``.

    Args:
        folder: folder of the sweep.
        record: record of the sweep.
        results: results of the sweep.
        target: folder to replace.
    """
    tags = _metric_tags(results)
    # runs of earlier versions log their losses without a group
    charts = {tags.title: tags.curve, "validation loss (bits per token)": "2_validation/loss"}
    charts |= {"training loss (bits per token)": "(?:3_training/)?loss", "validation perplexity": "2_validation/ppl"}
    charts |= _encoding_charts(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    # not inside tensorboard/: a running TensorBoard would show the unfinished folder
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".board-") as name:
        new_folder, sessions = Path(name) / "new", []
        by_run: dict[Any, list[Any]] = group_by(results.results, lambda row: (row.task, row.method, row.seed))
        for task, method, seed, run in planned_runs(folder, record):
            label = method.name
            if rows := by_run.get((task, label, seed)):
                sessions.append(_run_settings(record, task, method, seed, run.checkpoints.read_record() or RunRecord()))
                session = new_folder / slug(f"{task}@{label}" if task else label, seed)
                metrics, curve = _metrics_and_curve(replace(results, results=rows), label, task)
                shown = {key: value for key, value in metrics.items() if key in tags.names}
                _write_session(session, sessions[-1], shown, curve, tags.curve)
        _write_experiment(new_folder, charts, tags.names, sessions)
        if target.exists():
            target.rename(Path(name) / "old")
        new_folder.rename(target)


def _metric_tags(results: AnyResults) -> _MetricTags:
    if isinstance(results, Perplexities):
        names = {f"ppl_at/{n}": f"ppl at {n} tokens" for n in results.shown_lengths}
        return _MetricTags(names, "1_by_length/ppl", "perplexity over evaluation length (step = tokens)")
    if isinstance(results, Scores):
        names = {f"score_at/{n}": f"mean score (%) at {n} tokens" for n in results.lengths}
        return _MetricTags(names, "1_by_length/score", "mean score in % over context length (step = tokens)")
    names = {f"exact/{items}": f"exact match (%), {items}" for items in ("trained", "beyond", "all")}
    return _MetricTags(names, "1_by_items/exact", "exact match in % over items (step = items)")


def _metrics_and_curve(results: AnyResults, label: str, task: str | None) -> tuple[dict[str, float], dict[int, float]]:
    """Return one run's metrics by tag, and its curve by step."""
    if isinstance(results, Perplexities):
        curve = {row.result.length: row.result.ppl for row in results.results}
        return {f"ppl_at/{length}": ppl for length, ppl in curve.items()}, curve
    if isinstance(results, Scores):
        curve = {length: seeds[0] for length, seeds in results.set_means(label).items()}
        return {f"score_at/{length}": value for length, value in curve.items()}, curve
    metrics = {f"exact/{items}": mean for items, mean in results.mean_by_range(task, label).items() if mean is not None}
    return metrics, {items: values[0] for items, values in results.values_by_length(task, label).items()}


def _run_settings(record: SweepRecord, task: str | None, method: Method, seed: int, run: RunRecord) -> RunSettings:
    """Return the settings of a run that the HParams tab compares; settings that are not recorded are left out."""
    transform = method.positions_train
    values = {
        "task": task,
        "method": method.name if method.name != method.rpe else None,
        "encoding": method.rpe,
        "encoding_eval": method.rpe_eval,
        "positions_train": transform,
        "positions_eval": method.positions_eval or (transform if transform == IDENTITY else f"default of {transform}"),
        "seed": seed,
        "arch": run.settings.arch or record.settings.arch,
        "tokens": run.settings.tokens or record.settings.tokens,
        "updates": run.updates or record.settings.updates,
    }
    # all numbers as float: torch refuses mixed types
    return {k: v if isinstance(v, str) else float(v) for k, v in values.items() if v is not None}


def _encoding_charts(folder: SweepFolder) -> dict[str, str]:
    """Return the charts of logged quantities of encodings: title -> pattern of tags."""
    names: dict[str, None] = {}
    for log in sorted(folder.path.glob("runs/*/train.log")):
        # every line of the log has all quantities, as quoted keys
        names |= dict.fromkeys(_QUANTITY.findall(log.read_text(encoding="utf-8", errors="replace")))
    charts = {}
    for name in names:
        charts[f"{name}, each encoding and head (--log-encodings-every)"] = f"rpe/{re.escape(name)}/.*"
        charts[f"{name} of each head, mean over layers"] = rf"(?:4_encoding/)?rpe_{re.escape(name)}_h\d+"
        charts[f"{name} of each layer, mean over heads"] = rf"(?:4_encoding/)?rpe_{re.escape(name)}_l\d+"
    return charts


def _write_experiment(
    folder: Path, charts: Mapping[str, str], metrics: Mapping[str, str], sessions: Sequence[RunSettings]
) -> None:
    """Write the columns of the HParams tab and the layout of charts.

    Each chart is its own category, because the charts of one category share rows.

    Args:
        folder: output folder.
        charts: title -> pattern of a whole tag.
        metrics: tag -> title.
        sessions: settings of each run.
    """
    keys = dict.fromkeys(key for chosen in sessions for key in chosen)
    values = {key: list(dict.fromkeys(chosen[key] for chosen in sessions if key in chosen)) for key in keys}
    # torch builds the summary of the columns, with the tag of each metric as its title; the titles are replaced below
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


def _write_session(
    folder: Path, chosen: RunSettings, metrics: Mapping[str, float], curve: Mapping[int, float], tag: str
) -> None:
    """Write one run of the HParams tab: settings, metrics, and curve by step."""
    _, start, end = hparams(chosen, {})
    with SummaryWriter(str(folder), purge_step=0) as writer:
        writer.file_writer.add_summary(start, 0)
        for key, value in metrics.items():
            writer.add_scalar(key, value, 0)
        writer.file_writer.add_summary(end, 0)
        for step, value in curve.items():
            writer.add_scalar(tag, value, step)

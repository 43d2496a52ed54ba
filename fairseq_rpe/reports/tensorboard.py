"""Writes a sweep's evaluations for TensorBoard: a curve and an HParams session for each run, and a layout of charts.

torch's SummaryWriter writes the files. Its ``purge_step`` makes a running TensorBoard drop the values of replaced
files. Its ``add_hparams`` is not used for three reasons: it purges nothing, it names columns by their tags, and it
repeats the list of columns in every session, of which TensorBoard reads only the first.
"""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fairseq_rpe.reports.kind_report import MetricTags, kind_report
from fairseq_rpe.reports.sweep_results import PlannedRun, SweepResults, group_by, planned_runs
from fairseq_rpe.runs.run_folder import RunRecord
from fairseq_rpe.runs.training_config import IDENTITY
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord, slug

_QUANTITY = re.compile(r'"(?:train_)?rpe_(\w+?)_[lh]\d+": ')  # key of a logged quantity of a layer or head
RunSettings = dict[str, str | float]


def write_tensorboard(folder: SweepFolder, record: SweepRecord, results: SweepResults, target: Path) -> None:
    """Write a sweep's evaluations in place of the folder ``target``.

    Args:
        folder: folder of the sweep.
        record: record of the sweep.
        results: results of the sweep.
        target: folder to replace.
    """
    tags = kind_report(record.kind).metric_tags(results)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The new folder is built outside of tensorboard/, because a running TensorBoard would show it unfinished.
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".board-") as name:
        new_folder, old_folder = Path(name) / "new", Path(name) / "old"
        sessions = _write_sessions(new_folder, folder, record, results, tags)
        _write_experiment(new_folder, _charts(folder, tags), tags.names, sessions)
        if target.exists():
            target.rename(old_folder)
        new_folder.rename(target)


def _write_sessions(
    new_folder: Path, folder: SweepFolder, record: SweepRecord, results: SweepResults, tags: MetricTags
) -> list[RunSettings]:
    """Write a session for each run that has results, and return the settings of these runs."""
    by_run: dict[Any, list[Any]] = group_by(results.results, lambda row: (row.task, row.method, row.seed))
    report, sessions = kind_report(record.kind), []
    for run in planned_runs(folder, record):
        rows = by_run.get((run.task, run.method.name, run.seed))
        if not rows:
            continue
        sessions.append(_run_settings(record, run))
        label = f"{run.task}@{run.method.name}" if run.task else run.method.name
        rows_alone = replace(results, results=rows)
        metrics, curve = report.metrics_and_curve(rows_alone, run.method.name, run.task)
        shown = {tag: value for tag, value in metrics.items() if tag in tags.names}
        curves = {tags.curve: curve, **report.further_curves(rows_alone, run.method.name)}
        _write_session(new_folder / slug(label, run.seed), sessions[-1], shown, curves)
    return sessions


def _charts(folder: SweepFolder, tags: MetricTags) -> dict[str, str]:
    """Return the charts of the layout: title -> pattern of tags."""
    return {
        tags.title: tags.curve,
        **tags.further,
        "validation loss (bits per token)": "2_validation/loss",
        # runs of earlier versions log their losses without a group
        "training loss (bits per token)": "(?:3_training/)?loss",
        "validation perplexity": "2_validation/ppl",
        **_encoding_charts(folder),
    }


def _run_settings(record: SweepRecord, run: PlannedRun) -> RunSettings:
    """Return the settings of a run that the HParams tab compares; settings that are not recorded are left out."""
    method, transform = run.method, run.method.positions_train
    run_record = run.folder.checkpoints.read_record() or RunRecord()
    values = {
        "task": run.task,
        "method": method.name if method.name != method.rpe else None,
        "encoding": method.rpe,
        "encoding_eval": method.rpe_eval,
        "positions_train": transform,
        "positions_eval": method.positions_eval or (transform if transform == IDENTITY else f"default of {transform}"),
        "seed": run.seed,
        "arch": run_record.settings.arch or record.settings.arch,
        "tokens": run_record.settings.tokens or record.settings.tokens,
        "updates": run_record.updates or record.settings.updates,
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

    Args:
        folder: output folder.
        charts: title -> pattern of a whole tag.
        metrics: tag -> title.
        sessions: settings of each run.
    """
    # each chart is a category of its own, because the charts of one category share rows
    layout = {title: {title: ["Multiline", [f"^{pattern}$"]]} for title, pattern in charts.items()}
    with SummaryWriter(str(folder), purge_step=0) as writer:
        writer.file_writer.add_summary(_hparams_columns(metrics, sessions), 0)
        writer.add_custom_scalars(layout)


def _hparams_columns(metrics: Mapping[str, str], sessions: Sequence[RunSettings]) -> Summary:
    """Return the summary of the columns: every setting with its values, and every metric with its title."""
    keys = dict.fromkeys(key for settings in sessions for key in settings)
    values = {key: list(dict.fromkeys(settings[key] for settings in sessions if key in settings)) for key in keys}
    examples = {key: key_values[0] for key, key_values in values.items()}
    # torch builds the summary with the tag of each metric as its title; the titles are replaced in the serialised data
    columns, _, _ = hparams(examples, dict.fromkeys(metrics, 0.0), values)
    plugin_data = columns.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin_data.content)
    for info in content.experiment.metric_infos:
        info.display_name = metrics[info.name.tag]
    plugin_data.content = content.SerializeToString()
    return columns


def _write_session(
    folder: Path, settings: RunSettings, metrics: Mapping[str, float], curves: Mapping[str, Mapping[int, float]]
) -> None:
    """Write one run of the HParams tab: its settings, its metrics by tag, and its curves by tag and step."""
    _, start, end = hparams(settings, {})
    with SummaryWriter(str(folder), purge_step=0) as writer:
        writer.file_writer.add_summary(start, 0)
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, 0)
        writer.file_writer.add_summary(end, 0)
        for tag, curve in curves.items():
            for step, value in curve.items():
                writer.add_scalar(tag, value, step)

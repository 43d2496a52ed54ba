"""A sweep's evaluations for TensorBoard: a curve and an HParams session per result, and a layout of charts.

Written as records of TensorBoard without torch, so that a report stays quick. All of it lies below
OUT/tensorboard/evaluation, which is replaced as a whole.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.report import BOARD, IDENTITY, method_of, run_name, slug
from fairseq_rpe.core.files import read_json

_LEARNED = re.compile(r'"(?:train_)?rpe_(\w+?)_[lh]\d+": ')


@dataclass(frozen=True)
class Session:
    """One run of the HParams tab: what was chosen, what came out, and the curve behind it as (step, value)."""

    name: str
    chosen: dict[str, str | float]
    metrics: dict[str, float]
    curve: list[tuple[int, float]]


def write_text(folder: Path, state: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Perplexity over length, from the rows of ``report.collect``."""
    sessions = []
    for label, seed in dict.fromkeys((r["encoding"], r["seed"]) for r in rows):
        curve = [(r["length"], r["ppl"]) for r in rows if (r["encoding"], r["seed"]) == (label, seed)]
        metrics = {f"ppl_at/{length}": ppl for length, ppl in curve}
        sessions.append(Session(slug(label, seed), _chosen(folder, state, label, seed), metrics, curve))
    lengths = sorted({r["length"] for r in rows})
    names = {f"ppl_at/{n}": f"ppl at {n} tokens" for n in lengths}
    write(folder, "ppl_by_length", "perplexity over evaluation length (step = tokens)", names, sessions)


def write_algorithms(folder: Path, state: dict[str, Any], rows: list[dict[str, Any]], trained: dict[str, int]) -> None:
    """Exact match over the number of items, from the rows of ``exactness.collect``; ``trained``: a task's longest."""
    sessions = []
    for task, label, seed in dict.fromkeys((r["task"], r["method"], r["seed"]) for r in rows):
        own = [r for r in rows if (r["task"], r["method"], r["seed"]) == (task, label, seed)]
        curve = [(r["items"], 100 * r["accuracy"]) for r in own]
        parts = {
            "trained": [y for n, y in curve if n <= trained[task]],
            "beyond": [y for n, y in curve if n > trained[task]],
            "all": [y for _, y in curve],
        }
        metrics = {f"exact/{part}": sum(values) / len(values) for part, values in parts.items() if values}
        chosen = {"task": task, **_chosen(folder, state, label, seed, task)}
        sessions.append(Session(slug(f"{task}@{label}", seed), chosen, metrics, curve))
    names = {f"exact/{part}": f"exact match (%), {part}" for part in ("trained", "beyond", "all")}
    write(folder, "exact_by_items", "exact match in % over items (step = items)", names, sessions)


def _chosen(
    folder: Path, state: dict[str, Any], label: str, seed: int, task: str | None = None
) -> dict[str, str | float]:
    """The settings of a run that the HParams tab compares; those not on record are left out."""
    method = method_of(state, label)
    record = read_json(folder / "runs" / run_name(method, seed, task) / "checkpoints" / "run.json")
    settings = {**state["settings"], **record.get("settings", {})}
    moved = method["positions_train"]
    values = {
        "method": label if label != method["rpe"] else None,
        "encoding": method["rpe"],
        "positions_train": moved,
        "positions_eval": method["positions_eval"] or (moved if moved == IDENTITY else f"default of {moved}"),
        "seed": seed,
        "arch": settings.get("arch"),
        "tokens": settings.get("tokens"),
        "updates": record.get("updates", settings.get("updates")),
    }
    return {key: value for key, value in values.items() if value is not None}


def write(folder: Path, tag: str, title: str, metrics: dict[str, str], sessions: list[Session]) -> None:
    """Replace the sweep's evaluations.

    Args:
        folder: of the sweep.
        tag, title: of the curve, as a scalar and as a chart.
        metrics: tag -> what the HParams tab calls it, in the order of its columns.
        sessions: one for each result.
    """
    charts = {
        "Evaluation": {title: tag},
        "Loss": {"loss (bits per token)": "loss", "perplexity": "ppl"},
        "Learned parameters": _learned(folder),
    }
    target = folder / BOARD
    target.parent.mkdir(parents=True, exist_ok=True)
    # beside tensorboard/, not in it: a running TensorBoard would show the unfinished folder
    with tempfile.TemporaryDirectory(dir=folder, prefix=".board-") as name:
        made = Path(name) / "new"
        _record(made, [_experiment(metrics, sessions), _layout(charts)])
        for session in sessions:
            start, end = _session(session)
            scalars = [_scalar(key, value) for key, value in session.metrics.items()]
            _record(made / session.name, [start, *scalars, end], [(n, _scalar(tag, y)) for n, y in session.curve])
        if target.exists():
            target.rename(Path(name) / "old")
        made.rename(target)


def _learned(folder: Path) -> dict[str, str]:
    """Charts of the quantities that training has logged: title -> pattern of tags."""
    names: dict[str, None] = {}
    for log in sorted(folder.glob("runs/*/train.log")):
        # a quantity is on every line that training logs, and only there as a quoted key
        names |= dict.fromkeys(_LEARNED.findall(log.read_text(encoding="utf-8", errors="replace")))
    charts = {}
    for name in names:
        charts[f"{name}, each encoding and head (--inspect-every)"] = f"rpe/{re.escape(name)}/.*"
        charts[f"{name} of each head, mean over layers"] = rf"rpe_{re.escape(name)}_h\d+"
        charts[f"{name} of each layer, mean over heads"] = rf"rpe_{re.escape(name)}_l\d+"
    return charts


def _record(folder: Path, summaries: Iterable[Any], steps: Iterable[tuple[int, Any]] = ()) -> None:
    """An event file of summaries at step 0 and of others at their steps."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    now = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"events.out.tfevents.{now:.6f}.report", "wb") as file:
        out = RecordWriter(file)
        out.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        # a TensorBoard that was running forgets what it had read of the replaced file
        out.write(Event(wall_time=now, session_log=SessionLog(status=SessionLog.START)).SerializeToString())
        for step, value in [*((0, s) for s in summaries), *steps]:
            out.write(Event(wall_time=now, step=step, summary=Summary(value=[value])).SerializeToString())


def _scalar(tag: str, number: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=tag, simple_value=number)


def _layout(charts: dict[str, dict[str, str]]) -> Any:
    """The Custom Scalars tab: category -> chart -> pattern of the whole tag."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=category,
                chart=[
                    layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{pattern}$"]))
                    for title, pattern in shown.items()
                ],
            )
            for category, shown in charts.items()
            if shown
        ]
    )
    tensor = TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=metadata.create_summary_metadata())


def _experiment(metrics: dict[str, str], sessions: list[Session]) -> Any:
    from google.protobuf.struct_pb2 import ListValue, Value
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    infos = []
    for key in dict.fromkeys(key for session in sessions for key in session.chosen):
        values = list(dict.fromkeys(s.chosen[key] for s in sessions if key in s.chosen))
        words = isinstance(values[0], str)
        domain = [Value(string_value=v) if words else Value(number_value=v) for v in values]
        kind = api_pb2.DATA_TYPE_STRING if words else api_pb2.DATA_TYPE_FLOAT64
        infos.append(api_pb2.HParamInfo(name=key, type=kind, domain_discrete=ListValue(values=domain)))
    columns = [
        api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=shown) for tag, shown in metrics.items()
    ]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=columns)
    return _hparams(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment))


def _session(session: Session) -> tuple[Any, Any]:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for key, value in session.chosen.items():
        if isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return (
        _hparams(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=start)),
        _hparams(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end)),
    )


def _hparams(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)

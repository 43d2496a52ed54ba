"""``plan``: estimate the costs of a sweep or of one training, without training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_rpe.cli.options import int_list, positive_float, positive_int, seed_list, share, spec
from fairseq_rpe.cli.printing import add_json
from fairseq_rpe.cli.sweep import add_evaluate_at, add_grid_options, named_folder, resolve_sweep
from fairseq_rpe.cli.train import add_fairseq_flags, add_settings
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.training_config import SETTINGS
from fairseq_rpe.sweeps.device_kinds import DEVICE_KINDS, Hardware, find_device
from fairseq_rpe.sweeps.resolve import Inputs, Sweep, load_inputs
from fairseq_rpe.sweeps.sweep_kind import sweep_kind
from fairseq_rpe.utils.table import Cell, Table, TableRow

if TYPE_CHECKING:
    from fairseq_rpe.sweeps.cost_model import RunEstimate, SweepTotals

_GIB = 2**30
# settings that change no cost: names of folders and devices
_OTHERS = ("device", "log_encodings_every")
# what each line of --explain states: name -> formula
FORMULAS = {
    "parameters": "exact: embedding V·C + layers + output V·C if it is a table of its own + encodings",
    "FLOPs of a row, forward": "linear layers 2·n·P, attention 4·H·D for each visible pair, output 2·n·C·V",
    "FLOPs of a row, training": "3 × forward; with --checkpoint-activations the layers once more",
    "weights": "exact: 4·N bytes",
    "gradients": "exact: 4·N bytes, twice with several processes",
    "optimiser": "exact: 8·N bytes, two moments of Adam",
    "activations": "estimate: tensors that layers save for the backward pass, or with checkpointing their inputs",
    "loss": "estimate: gradient of the output projection and a chunk of logits; answers: all of their logits",
    "biases": "estimate: 4·H·n bytes of each encoding; n² with --attention-backend reference",
    "peak": "estimate: weights + optimiser + the larger of activations and loss, or gradients and the update",
    "most rows": "estimate: largest batch whose peak is at most 90 % of the memory",
    "checkpoint": "exact but for at most 60 kB: 12·N bytes, weights and two moments",
    "time": "estimate: FLOPs / (peak × utilisation), or tokens / tokens per second",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    parser.description = (
        "Estimate parameters, FLOPs, memory, checkpoints and time of a sweep, or with --rpe of one training. Nothing "
        "is trained, and the data need not exist."
    )
    add_grid_options(parser)
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help="instead of --encodings: encoding of one training")
    parser.add_argument(
        "--lengths", type=int_list, metavar="N,N,...", help="lengths of the evaluation (default: the training length)"
    )
    parser.add_argument(
        "--eval-data",
        type=named_folder,
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="further text of the evaluation (may be repeated)",
    )
    add_evaluate_at(parser)
    parser.add_argument("--split", help="split to score (default: test; for questions valid)")
    parser.add_argument("--seeds", type=seed_list, metavar="N,N,...", help="seeds of the runs (default: 1)")
    parser.add_argument(
        "--vocabulary", type=positive_int, metavar="N", help="token ids of a text that does not exist yet"
    )
    kinds = ", ".join(DEVICE_KINDS)
    parser.add_argument("--device", dest="device_kind", metavar="NAME", help=f"kind of GPU: {kinds}")
    parser.add_argument(
        "--devices", type=positive_int, metavar="N", help="GPUs of all runs together (default: those of one run)"
    )
    parser.add_argument(
        "--utilisation",
        type=share,
        metavar="U",
        help="share of the peak that trainings reach (default: 0.3, an assumption; bench --model measures)",
    )
    parser.add_argument(
        "--tokens-per-second", type=positive_float, metavar="X", help="measured speed of training on one device"
    )
    parser.add_argument("--tflops", type=positive_float, metavar="X", help="peak of another device in TFLOP/s")
    parser.add_argument("--memory", type=positive_float, metavar="GB", help="memory of another device in 10^9 bytes")
    parser.add_argument("--explain", action="store_true", help="show every quantity of each model with its formula")
    add_json(parser)
    add_settings(parser, [name for name, s in SETTINGS.items() if s.in_sweep and name not in _OTHERS])
    add_fairseq_flags(parser)


def _hardware(args: argparse.Namespace) -> Hardware:
    """Return the devices that a command line names."""
    if args.tokens_per_second is not None and (args.utilisation is not None or args.tflops is not None):
        option = "--utilisation" if args.utilisation is not None else "--tflops"
        raise UserError(f"--tokens-per-second is a measured speed: drop {option}")
    kind = find_device(args.device_kind) if args.device_kind is not None else None
    if args.utilisation is not None and kind is None and args.tflops is None:
        raise UserError("--utilisation is a share of a peak: give --device NAME or --tflops X")
    return Hardware(
        name="device" if kind is None else kind.title,
        kind=kind,
        tflops=args.tflops,
        memory=None if args.memory is None else args.memory * 1e9,
        utilisation=Hardware.utilisation if args.utilisation is None else args.utilisation,
        tokens_per_second=args.tokens_per_second,
    )


def planned_sweep(args: argparse.Namespace) -> Sweep:
    """Return the sweep that a command line names; one training is a sweep of one method.

    Args:
        args: parsed command line, which is completed.

    Raises:
        UserError: an option is missing, or options contradict each other.
    """
    if args.rpe is not None:
        if args.recipe is not None or args.encodings is not None:
            raise UserError("--rpe is for one training: drop it, or drop --recipe and --encodings")
        args.encodings, args.rpe = (args.rpe,), None
    if args.recipe is None and args.data is None and args.algorithms is None and args.vocabulary is not None:
        args.data = Path("DATA")
    if args.lengths is None and args.recipe is None and args.algorithms is None:
        from fairseq_rpe.runs.defaults import defaults_for

        args.lengths = (args.tokens or defaults_for(args.arch or "tiny", False).tokens,)
    args.out, args.jobs, args.max_tokens = None if args.recipe else Path("runs/plan"), None, None
    return resolve_sweep(args)


def presumed_inputs(sweep: Sweep) -> Inputs:
    """Return the digests of data that need not exist, which are empty.

    Args:
        sweep: the sweep.
    """
    data = None if sweep.data is None else ""
    return Inputs(data, dict.fromkeys(sweep.evaluate, ""), dict.fromkeys(sweep.questions, ""))


def _inputs(sweep: Sweep) -> Inputs:
    """Check the data if all exist."""
    folders = [sweep.data, *sweep.evaluate.values(), *(Path(folder.data) for folder in sweep.questions.values())]
    if all(folder is None or folder.is_dir() for folder in folders):
        return load_inputs(sweep, dry=True)
    return presumed_inputs(sweep)


def run(args: argparse.Namespace) -> None:
    """Run ``plan``."""
    from fairseq_rpe.sweeps.cost_model import estimate_runs, sum_runs

    hardware = _hardware(args)
    sweep = planned_sweep(args)
    if args.rpe_module is not None:
        from fairseq_rpe.encodings import load_module

        load_module(args.rpe_module)
    kind = sweep_kind(sweep.kind)
    runs = kind.build_runs(sweep, _inputs(sweep))
    kind.check_lengths(sweep, runs)
    estimates = estimate_runs(sweep, runs, hardware, args.vocabulary)
    devices = args.devices or sweep.base_config.world_size
    totals = sum_runs(estimates, devices)
    if args.json:
        for estimate in estimates:
            print(json.dumps(estimate.to_json()))
        print(json.dumps({"total": vars(totals)}))
        return
    print(runs_table(estimates).to_markdown())
    if args.explain:
        for estimate in estimates:
            print(explain_table(estimate).to_markdown())
    print("\n".join([*_warnings(estimates), *total_lines(estimates, totals, hardware, devices)]))


def runs_table(estimates: Sequence[RunEstimate]) -> Table:
    """Return a table with a row for each model.

    Args:
        estimates: estimates of all runs.
    """
    shows_time = all(e.device_seconds is not None for e in estimates)
    shows_rows = all(e.most_rows is not None for e in estimates)
    header = ["run", "parameters", "of the encoding", "tokens", "training FLOPs", "GiB per device"]
    header += ["most rows"] * shows_rows + ["device hours"] * shows_time
    rows = []
    for e in estimates:
        cells = [f"{e.parameters.total:,}", f"{e.parameters.encoding:,}", f"{e.tokens:,}", f"{e.training_flops:.2e}"]
        cells += [f"{e.memory.peak / _GIB:.2f} for {e.load.rows} rows"]
        cells += [str(e.most_rows) if e.most_rows else "none fits"] if shows_rows else []
        cells += [f"{e.device_seconds / 3600:,.2f}"] if shows_time and e.device_seconds is not None else []
        name = e.name if e.seeds == 1 else f"{e.name} and {e.seeds - 1} more seeds"
        rows.append(TableRow(name, list(map(Cell, cells))))
    return Table("Estimated costs", header, rows)


def explain_table(estimate: RunEstimate) -> Table:
    """Return a table with every quantity of a model and its formula.

    Args:
        estimate: estimate of a run.
    """
    e, p, m = estimate, estimate.parameters, estimate.memory
    values = {
        "parameters": f"{p.total:,} = {p.embedding:,} + {p.layers:,} + {p.output:,} + {p.encoding:,}",
        "FLOPs of a row, forward": f"{e.flops.forward:.3e} = {e.flops.linear:.3e} + {e.flops.attention:.3e} + "
        f"{e.flops.output:.3e}",
        "FLOPs of a row, training": f"{e.flops.training(e.decoder.checkpoint_activations):.3e}",
        "weights": _gib(m.weights),
        "gradients": _gib(m.gradients),
        "optimiser": _gib(m.optimizer),
        "activations": _gib(m.activations) + (f" and {_gib(m.recomputed)} of one layer" if m.recomputed else ""),
        "loss": _gib(m.loss),
        "biases": _gib(m.biases),
        "peak": f"{_gib(m.peak)} for {e.load.rows} rows of {e.load.tokens} tokens",
        "most rows": "" if e.most_rows is None else str(e.most_rows),
        "checkpoint": _gib(e.checkpoint),
        "time": "" if e.device_seconds is None else f"{e.device_seconds / 3600:,.2f} device hours",
    }
    rows = [TableRow(name, [Cell(text), Cell(FORMULAS[name])]) for name, text in values.items() if text]
    for cost in e.evaluations:
        tokens = "an unknown number of tokens" if cost.tokens is None else f"{cost.tokens:,.0f} tokens"
        text = f"{cost.flops_per_token:.3e} FLOPs per token, {tokens}"
        rows.append(TableRow(f"evaluation at {cost.length} tokens", [Cell(text), Cell("forward pass of a row / n")]))
    return Table(e.name, [e.name, "value", "formula"], rows, is_text=True)


def _gib(value: float) -> str:
    return f"{value / _GIB:.3f} GiB"


def _warnings(estimates: Sequence[RunEstimate]) -> Iterator[str]:
    """Yield a line for each batch that does not fit a device, with the first model of which that is true."""
    first: dict[tuple[int, int], RunEstimate] = {}
    for e in estimates:
        if e.most_rows is not None and e.most_rows < e.load.rows:
            first.setdefault((e.load.rows, e.load.tokens), e)
    for (rows, tokens), e in first.items():
        if not e.most_rows:
            yield (
                f"{e.name}: not even one row of {tokens} tokens fits: use shorter rows, a smaller model, "
                "--checkpoint-activations after --, or a device with more memory"
            )
        else:
            yield (
                f"{e.name}: {rows} rows of {tokens} tokens do not fit, {e.most_rows} do: divide the batch by "
                "--update-freq or --nproc, or give --checkpoint-activations after --"
            )


def total_lines(
    estimates: Sequence[RunEstimate], totals: SweepTotals, hardware: Hardware, devices: int
) -> Iterator[str]:
    """Yield lines about all runs together.

    Args:
        estimates: estimates of all runs.
        totals: their sums.
        hardware: devices of the estimate.
        devices: number of devices of all runs together.
    """
    from fairseq_rpe.sweeps.cost_model import CHECKPOINTS

    count = "1 run" if totals.runs == 1 else f"{totals.runs} runs"
    weights = " and kept weights" if any(e.kept_weights for e in estimates) else ""
    yield (
        f"total of {count}: {totals.tokens:.3g} tokens, {totals.training_flops:.3g} FLOPs of training, checkpoints"
        f"{weights} of at most {totals.checkpoints / _GIB:.1f} GiB ({CHECKPOINTS} checkpoints in each run)"
    )
    if totals.evaluation_flops is not None:
        yield f"evaluation: {totals.evaluation_flops:.3g} FLOPs"
    else:
        missing = {str(c.data) for e in estimates for c in e.evaluations if c.tokens is None}
        yield f"evaluation: not counted, as {', '.join(sorted(missing))} does not exist yet"
    if totals.device_hours is None or totals.hours is None:
        yield "time: not estimated, give --device NAME, --tflops X or --tokens-per-second X"
        return
    basis = f"{hardware.utilisation:g} of the peak"
    if hardware.tokens_per_second is not None:
        basis = f"{hardware.tokens_per_second:g} tokens per second"
    yield (
        f"time (estimate): {totals.device_hours:,.1f} {hardware.name} hours at {basis}; {totals.hours:,.1f} hours on "
        f"{devices}"
    )

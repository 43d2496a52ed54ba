"""Estimated costs of the runs of a sweep: parameters, FLOPs, memory, checkpoints and time, without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.costs import ParameterCounts, RowFlops, attention_options_by_layer, count_parameters, row_flops
from fairseq_rpe.runs.memory import (
    ANSWER_TOKENS,
    MemoryEstimate,
    Workload,
    checkpoint_bytes,
    estimate_memory,
    largest_batch,
)
from fairseq_rpe.runs.model_check import check_model, model_encodings
from fairseq_rpe.runs.model_config import trained_decoder
from fairseq_rpe.sweeps.device_kinds import Hardware
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.resolve import Sweep

CHECKPOINTS = 3  # files that a finished run keeps at most: of its last update, the last and the best one


@dataclass(frozen=True)
class EvaluationCost:
    """Cost of an evaluation at one length.

    Attributes:
        data: folder of the data, None for a generated task.
        length: length of the context in tokens.
        flops_per_token: FLOPs of a forward pass for a token.
        tokens: tokens that are read; None if the data do not exist yet.
    """

    data: Path | None
    length: int
    flops_per_token: float
    tokens: float | None

    @property
    def flops(self) -> float | None:
        """FLOPs of the evaluation."""
        return None if self.tokens is None else self.flops_per_token * self.tokens


@dataclass(frozen=True)
class RunEstimate:
    """Costs of a run, the same for all seeds.

    Attributes:
        name: name of the run with the first seed.
        seeds: number of runs with these costs.
        rpe: spec of the encoding.
        decoder: sizes and blocks of the model.
        parameters: parameters of the model.
        load: batch of one device.
        updates: updates of the training.
        flops: FLOPs of a forward pass of one row.
        evaluations: costs of the evaluations.
        memory: memory of one device.
        hardware: devices of the estimate.
        most_rows: largest batch of one device in rows, 0 if one row does not fit; None if its memory is unknown.
        continues: name of the run, with the first seed, that this one continues; None for a training from the start.
        kept_weights: files of weights that the training keeps for evaluations along it.
    """

    name: str
    seeds: int
    rpe: str
    decoder: DecoderConfig
    parameters: ParameterCounts
    load: Workload
    updates: int
    flops: RowFlops
    evaluations: tuple[EvaluationCost, ...]
    memory: MemoryEstimate
    hardware: Hardware
    most_rows: int | None
    continues: str | None = None
    kept_weights: int = 0

    @property
    def rows(self) -> int:
        """Rows of all updates."""
        return self.updates * self.load.rows * self.load.processes * self.load.update_freq

    @property
    def tokens(self) -> int:
        """Tokens of all updates, padding included."""
        return self.rows * self.load.tokens

    @property
    def training_flops(self) -> int:
        """FLOPs of the training."""
        return self.rows * self.flops.training(self.decoder.checkpoint_activations)

    @property
    def evaluation_flops(self) -> float | None:
        """FLOPs of all evaluations; None if a text is missing, whose number of tokens is not known."""
        values = [evaluation.flops for evaluation in self.evaluations]
        return None if None in values else sum(filter(None, values))

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint."""
        return checkpoint_bytes(self.parameters)

    @property
    def stored_bytes(self) -> int:
        """Most bytes of the checkpoints of a run, and of the weights that it keeps."""
        return CHECKPOINTS * self.checkpoint + self.kept_weights * 4 * self.parameters.total

    @property
    def device_seconds(self) -> float | None:
        """Seconds of the run, summed over its devices: the training, and the evaluations whose texts exist."""
        speed = self._flops_per_second()
        return None if speed is None else (self.training_flops + self._known_evaluation_flops()) / speed

    def _known_evaluation_flops(self) -> float:
        return sum(evaluation.flops or 0.0 for evaluation in self.evaluations)

    def _flops_per_second(self) -> float | None:
        """Return the FLOPs of one device in a second."""
        hardware = self.hardware
        if hardware.tokens_per_second is not None:
            return hardware.tokens_per_second * self.training_flops / self.tokens
        peak = hardware.peak(self.decoder.compute_dtype)
        return None if peak is None else peak * hardware.utilisation

    def to_json(self) -> dict[str, object]:
        """Return the numbers for ``--json``."""
        return {
            "run": self.name,
            "seeds": self.seeds,
            "rpe": self.rpe,
            "parameters": {**vars(self.parameters), "total": self.parameters.total},
            "tokens": self.tokens,
            "training_flops": self.training_flops,
            "evaluation_flops": self.evaluation_flops,
            "evaluations": [
                {**vars(e), "data": None if e.data is None else str(e.data), "flops": e.flops} for e in self.evaluations
            ],
            "rows": self.load.rows,
            "memory": vars(self.memory),
            "most_rows": self.most_rows,
            "checkpoint": self.checkpoint,
            "device_hours": None if self.device_seconds is None else self.device_seconds / 3600,
        }


@dataclass(frozen=True)
class SweepTotals:
    """Sums over all runs of a sweep.

    Attributes:
        runs: number of trainings.
        tokens, training_flops: sums of the trainings.
        evaluation_flops: sum of the evaluations; None if a text is missing.
        checkpoints: bytes of all checkpoints and kept weights.
        device_hours: hours of all devices together; None if their speed is unknown.
        hours: hours on the given number of devices, if all are always busy.
    """

    runs: int
    tokens: int
    training_flops: int
    evaluation_flops: float | None
    checkpoints: int
    device_hours: float | None
    hours: float | None


def estimate_runs(
    sweep: Sweep, runs: Iterable[SweepRun], hardware: Hardware, vocabulary: int | None = None
) -> list[RunEstimate]:
    """Estimate the costs of the runs of a sweep; runs that differ in the seed alone are one estimate.

    Args:
        sweep: the sweep.
        runs: all its runs.
        hardware: devices of the estimate.
        vocabulary: number of token ids of a text that does not exist yet; None: as the recipe states.

    Returns:
        The estimates, in the order of the runs.

    Raises:
        UserError: the vocabulary is unknown, or a training cannot be estimated.
    """
    groups: dict[object, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault((_without_seed(run), run.parent and _without_seed(run.parent)), []).append(run)
    return [_estimate(sweep, group, hardware, vocabulary) for group in groups.values()]


def _without_seed(run: SweepRun) -> object:
    """Return what determines the costs of a run."""
    return replace(run.config, seed=1, out=Path(), tensorboard=None, finetune_from=None)


def _estimate(sweep: Sweep, group: Sequence[SweepRun], hardware: Hardware, vocabulary: int | None) -> RunEstimate:
    run = group[0]
    config, s = run.config, run.plan.settings
    decoder = trained_decoder(config, run.plan, _vocabulary(sweep, run, vocabulary))
    check_model(config, run.plan)
    encodings = model_encodings(config, run.plan, all_layers=True)
    parameters, options = count_parameters(decoder, encodings), attention_options_by_layer(decoder, encodings)
    answers = None
    if config.algorithm is not None:
        answers = s.tokens
    elif run.parent is not None and sweep.questions:
        answers = min(ANSWER_TOKENS, s.tokens)
    is_on_gpu = config.device != "cpu"
    load = Workload(s.batch_sentences, s.tokens, s.nproc, s.update_freq, answers, is_on_gpu)
    evaluations = []
    for evaluation in run.evaluations:
        exists = evaluation.data is None or evaluation.data.is_dir()
        works: list[tuple[float | None, int]] = [(None, key.length) for key in evaluation.keys]
        if exists:
            works = [(work.tokens, work.context) for work in evaluation.passes()]
        for tokens, length in works:
            of_row = row_flops(decoder, options, length)
            evaluations.append(EvaluationCost(evaluation.data, length, of_row.forward / length, tokens))
    memory = hardware.device_memory
    return RunEstimate(
        name=run.name,
        seeds=len(group),
        rpe=config.rpe,
        decoder=decoder,
        parameters=parameters,
        load=load,
        updates=run.plan.updates,
        flops=row_flops(decoder, options, s.tokens, output_tokens=answers),
        evaluations=tuple(evaluations),
        memory=estimate_memory(decoder, encodings, parameters, load),
        hardware=hardware,
        most_rows=None if memory is None else largest_batch(decoder, encodings, parameters, load, memory),
        continues=None if run.parent is None else run.parent.name,
        kept_weights=len(config.keep_at or ()),
    )


def vocabulary_is_known(sweep: Sweep) -> bool:
    """Return whether costs can be estimated without a stated vocabulary.

    Args:
        sweep: the sweep.
    """
    has_size = sweep.preset is not None and sweep.preset.vocabulary is not None
    return sweep.data is None or has_size or (sweep.data / "dict.txt").is_file()


def _vocabulary(sweep: Sweep, run: SweepRun, stated: int | None) -> int:
    """Return the number of token ids: of the task, of the folder, as stated, or as the recipe has it."""
    if run.config.algorithm is not None:
        return len(corpus.FAIRSEQ_SPECIALS) + len(build(run.config.algorithm).vocabulary())
    data = sweep.data
    if data is not None and (data / "dict.txt").is_file():
        size = len(corpus.read_dictionary(data / "dict.txt"))
        if stated not in (None, size):
            raise UserError(f"--vocabulary {stated:,}: {data} has {size:,} token ids: drop the option")
        return size
    of_recipe = sweep.preset.vocabulary if sweep.preset is not None else None
    expected = stated or of_recipe
    if expected is None:
        raise UserError(
            f"the vocabulary is not known before {data} exists: give --vocabulary N, the number of its token ids"
        )
    return expected


def sum_runs(estimates: Sequence[RunEstimate], devices: int) -> SweepTotals:
    """Add up the costs of all runs.

    A sweep of many runs keeps its devices busy, if each run has its ``--nproc`` devices; the time is at least that of
    the longest run, together with the runs that it continues.

    Args:
        estimates: estimates of all runs.
        devices: number of devices of all runs together.

    Returns:
        The sums.

    Raises:
        UserError: a run needs more devices.
    """
    processes = max(estimate.load.processes for estimate in estimates)
    if devices < processes:
        raise UserError(f"--devices {devices}: a run uses {processes}, its --nproc × --nodes: raise --devices")
    device_seconds = [e.device_seconds for e in estimates]
    device_hours = hours = None
    if None not in device_seconds:
        device_hours = sum(e.seeds * (e.device_seconds or 0.0) for e in estimates) / 3600
        by_name = {e.name: e for e in estimates}
        hours = max(device_hours / devices, *(_sequential_seconds(e, by_name) / 3600 for e in estimates))
    evaluation = [e.evaluation_flops for e in estimates]
    return SweepTotals(
        runs=sum(e.seeds for e in estimates),
        tokens=sum(e.seeds * e.tokens for e in estimates),
        training_flops=sum(e.seeds * e.training_flops for e in estimates),
        evaluation_flops=None
        if any(value is None for value in evaluation)
        else sum(e.seeds * (value or 0.0) for e, value in zip(estimates, evaluation, strict=True)),
        checkpoints=sum(e.seeds * e.stored_bytes for e in estimates),
        device_hours=device_hours,
        hours=hours,
    )


def _sequential_seconds(estimate: RunEstimate, by_name: Mapping[str, RunEstimate]) -> float:
    """Return the seconds of a run and of all runs that it continues, each of which starts after the one before."""
    before = by_name.get(estimate.continues or "")
    seconds = (estimate.device_seconds or 0.0) / estimate.load.processes
    return seconds if before is None else seconds + _sequential_seconds(before, by_name)

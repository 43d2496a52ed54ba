"""Times attention with each encoding and backend on this machine, relative to attention without a bias."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe import encodings
from fairseq_rpe.attention import BACKENDS, Backend
from fairseq_rpe.attention.forward import build_plan, compute_token_features, run_attention
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import refuse_pattern
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.absolute import NoPE
from fairseq_rpe.utils.table import Cell, Table, TableRow

BASELINE = "no bias"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_REPEATED_SECONDS = 20.0  # a call that takes longer than this is not repeated
DENSE_COPIES = 6  # n × n tensors of the reference: scores, bias, mask, weights and those saved for the backward pass
TimedCall = Callable[[], None]


@dataclass(frozen=True)
class BenchSetting:
    """What is timed: each encoding with each backend at each length.

    Attributes:
        device: device that runs the attention, ``cpu`` or ``cuda``.
        encodings: specs; each adds a bias or is nope.
        backends: names of backends, or "all".
        lengths: numbers of tokens of the sequences, each timed separately.
        batch: number of sequences in a call.
        heads: number of attention heads.
        width: width D of each head.
        dtype: key of :data:`DTYPES`.
        passes: forward, training or both.
        repeats: number of rounds, of which the median is reported.
    """

    device: str
    encodings: Sequence[str] = ("nope", "alibi", "kerple_log", "fire")
    backends: Sequence[str] = ("all",)
    lengths: Sequence[int] = (512, 1024, 2048)
    batch: int = 1
    heads: int = 8
    width: int = 64
    dtype: str = "fp32"
    passes: str = "both"
    repeats: int = 5

    def check(self) -> None:
        """Raise UserError for an unknown backend, or if there are no encodings or no backends."""
        check_backends(self.backends, self.encodings, BACKENDS)
        for spec in self.encodings:
            refuse_pattern(spec, "bench")

    def measurements(self) -> list[Callable[[], tuple[list["Timing"], list[str]]]]:
        """Return a function for each length and pass, which returns its timings and lines on what is left out."""
        steps = ("forward", "training") if self.passes == "both" else (self.passes,)
        return [partial(measure, self, step, length) for length in self.lengths for step in steps]

    def __str__(self) -> str:
        """Describe machine and setting in one line."""
        shape = f"batch {self.batch}, {self.heads} heads of {self.width}, {self.dtype}"
        return describe_machine(self.device, f"{shape}, medians of {self.repeats}")


def check_backends(backends: Sequence[str], encodings: Sequence[str], registered: Collection[str]) -> None:
    """Raise UserError for a backend that is not ``registered``, or if there are no encodings or no backends."""
    for name in backends:
        if name not in registered and tuple(backends) != ("all",):
            raise UserError(f"--backends: unknown '{name}'; known: {', '.join(registered)}")
    if not encodings or not backends:
        raise UserError("--encodings and --backends name at least one each")


def free_memory(device: str) -> int:
    """Return the free memory of the device in bytes."""
    on_cpu = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return torch.cuda.mem_get_info()[0] if device == "cuda" else on_cpu


def describe_machine(device: str, setting: str) -> str:
    """Describe the machine in one line, with the ``setting`` in its middle."""
    on_cpu = device == "cpu"
    name = platform.processor() or platform.machine() if on_cpu else torch.cuda.get_device_name()
    cores = f", {os.cpu_count()} cores, {torch.get_num_threads()} threads" if on_cpu else ""
    load = f", load {os.getloadavg()[0]:.1f}" if on_cpu else ""
    return f"{name}{cores}, torch {torch.__version__}, {setting}{load}"


@dataclass(frozen=True)
class Timing:
    """Time of one encoding with one backend.

    Attributes:
        encoding: spec of the encoding.
        backend: name of the backend.
        step: forward or training of attention, or inference of a model.
        length: number of tokens.
        milliseconds: median of all runs; the mean for models.
        ratio: time relative to attention without a bias; for models, to the first encoding.
        least: fastest run in milliseconds.
        most: slowest run in milliseconds.
    """

    encoding: str
    backend: str
    step: str
    length: int
    milliseconds: float
    ratio: float
    least: float
    most: float


def measure(setting: BenchSetting, step: str, length: int) -> tuple[list[Timing], list[str]]:
    """Time every encoding with every backend, interleaved.

    Args:
        setting: encodings, backends and shapes that are timed.
        step: ``forward``, or ``training`` for forward and backward pass.
        length: number of tokens of each sequence.

    Returns:
        The timings, and a line on each combination that is left out.
    """
    calls, left_out = _timed_calls(setting, step == "training", length)
    times = time_interleaved(calls, setting.repeats, setting.device)
    baseline = statistics.median(times[BASELINE, "sdpa"])
    timings = []
    for key, seconds in times.items():
        median, least, most = (round(1000 * reduce(seconds), 3) for reduce in (statistics.median, min, max))
        ratio = round(statistics.median(seconds) / baseline, 3)
        timings.append(Timing(*key, step, length, median, ratio, least, most))
    return timings, left_out


def _timed_calls(setting: BenchSetting, training: bool, n: int) -> tuple[dict[tuple[str, str], TimedCall], list[str]]:
    """Return a function per encoding and backend, each called once already, and lines on what is left out."""
    torch.manual_seed(0)
    device, batch, heads = setting.device, setting.batch, setting.heads
    tensor_options = {"device": device, "dtype": DTYPES[setting.dtype]}
    q, k, v = (torch.randn(batch, heads, n, setting.width, **tensor_options, requires_grad=training) for _ in range(3))
    grad = torch.randn(q.shape, **tensor_options)
    inputs = torch.randn(batch, n, heads * setting.width, **tensor_options)
    positions = Positions.arange(n, device=device)

    def call(encoding: Encoding | None, backend: Backend | None, parameters: list[Tensor]) -> None:
        with torch.set_grad_enabled(training):
            if encoding is None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                plan = build_plan(encoding, positions, None, backend)
                out = run_attention(q, k, v, plan, 0.0, compute_token_features(inputs, plan))
            if training:
                torch.autograd.grad(out, [q, k, v, *parameters], grad, allow_unused=True)

    free = free_memory(device)
    needed = DENSE_COPIES * 4 * batch * heads * n * n  # bytes of the reference in float32
    calls = {(BASELINE, "sdpa"): partial(call, None, None, [])}
    calls[BASELINE, "sdpa"]()
    left_out = []
    for spec in setting.encodings:
        encoding = encodings.build(spec, heads, heads * setting.width, length=n).to(device)
        if not (encoding.adds_bias or encoding.is_content_dependent) and not isinstance(encoding, NoPE):
            raise UserError(f"'{spec}' has no bias, and the time of a bias is what is measured: leave it out")
        parameters = [p for p in encoding.parameters() if p.requires_grad]
        for name in BACKENDS if tuple(setting.backends) == ("all",) else setting.backends:
            if name == "reference" and needed > free:
                left_out.append(f"left out, reference at {n} tokens: needs about {needed / 2**30:.0f} GiB of memory")
                continue
            candidate = partial(call, encoding, BACKENDS[name], parameters)
            reason = failure_reason(
                candidate, f"{name}{' in training' * training}", f"{name} at {n} tokens", f" for {spec}"
            )
            if reason:
                left_out.append(reason)
            else:
                calls[spec, name] = candidate
    return calls, left_out


def failure_reason(call: TimedCall, refused_name: str, memory_name: str, of: str = "") -> str:
    """Call a function once, and return the reason if it cannot be timed.

    Args:
        call: function that will be timed.
        refused_name: name of the call in the message of a refusal.
        memory_name: name of the call in the message of an out-of-memory error.
        of: end of the message of an out-of-memory error.

    Returns:
        A line with the reason, "" if the call can be timed.

    Raises:
        RuntimeError: an error that is no lack of memory.
    """
    try:
        call()
    except (UserError, NotImplementedError) as error:
        return f"left out, {refused_name}: {error}"
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        return f"left out, {memory_name}: not enough memory{of}"
    return ""


def time_interleaved(calls: dict[Any, TimedCall], repeats: int, device: str) -> dict[Any, list[float]]:
    """Time functions in rounds of one call each, so that a change of the machine's load affects all of them.

    Args:
        calls: key -> function.
        repeats: number of rounds, and so of calls of each function.
        device: cpu or cuda, which is synchronised before and after each call.

    Returns:
        key -> seconds of each call.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[Any, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            if not times[key] or times[key][0] < MAX_REPEATED_SECONDS:
                wait()
                start = time.perf_counter()
                call()
                wait()
                times[key].append(time.perf_counter() - start)
    return times


def tables(timings: Sequence[Timing]) -> list[Table]:
    """Return a table per step: milliseconds without a bias, then ratios to it, with the fastest and slowest run."""

    def cell(timing: Timing | None, value: str) -> Cell:  # value: milliseconds or ratio
        if timing is None:
            return Cell("")
        middle = getattr(timing, value)
        least, most = (middle * end / timing.milliseconds for end in (timing.least, timing.most))
        return Cell(f"{middle:.2f} ({least:.2f} to {most:.2f})", middle)

    result = []
    for step in dict.fromkeys(t.step for t in timings):
        cells = {(t.encoding, t.backend, t.length): t for t in timings if t.step == step}
        lengths = list(dict.fromkeys(length for _, _, length in cells))
        rows = []
        for encoding, backend in dict.fromkeys(key[:2] for key in cells):
            row = [cells.get((encoding, backend, length)) for length in lengths]
            value, unit = ("milliseconds",) * 2 if encoding == BASELINE else ("ratio", backend)
            rows.append(TableRow(f"{encoding}, {unit}", [cell(t, value) for t in row]))
        result.append(Table("", [step, *map(str, lengths)], rows))
    return result

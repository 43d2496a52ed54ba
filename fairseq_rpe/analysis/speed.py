"""How fast attention is with each encoding and backend on this machine, against attention without a bias."""

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
from fairseq_rpe.attention.forward import carry_out, noted, plan_of
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.utils.table import Cell, Row, Table

LIMIT = "no bias"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOW = 20.0  # a first call of so many seconds is the only one of its kind
DENSE_COPIES = 6  # scores, bias, mask and weights of the reference, and what its backward keeps
Way = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """What takes turns, and at which size: ``encodings``, each adds a bias or is nope, with each of ``backends``.

    ``lengths`` in tokens; ``width`` is a head's, ``dtype`` a key of :data:`DTYPES`, ``device`` cpu or cuda; ``passes``:
    forward, training or both; of ``repeats`` turns the median counts.
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
        """Raises UserError: no such backend, or nothing is named."""
        check_backends(self.backends, self.encodings, BACKENDS)

    def measurements(self) -> list[Callable[[], tuple[list["Timing"], list[str]]]]:
        """What to call for the timings of each length and pass."""
        steps = ("forward", "training") if self.passes == "both" else (self.passes,)
        return [partial(measure, self, step, length) for length in self.lengths for step in steps]

    def __str__(self) -> str:
        """Machine and setting in one line."""
        shape = f"batch {self.batch}, {self.heads} heads of {self.width}, {self.dtype}"
        return machine(self.device, f"{shape}, medians of {self.repeats}")


def check_backends(backends: Sequence[str], encodings: Sequence[str], known: Collection[str]) -> None:
    """Raises UserError: a backend is not ``known`` nor the word all, or no encoding or no backend is named."""
    for name in backends:
        if name not in known and tuple(backends) != ("all",):
            raise UserError(f"--backends: unknown '{name}'; known: {', '.join(known)}")
    if not encodings or not backends:
        raise UserError("--encodings and --backends name at least one each")


def free_memory(device: str) -> int:
    """Bytes."""
    on_cpu = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return torch.cuda.mem_get_info()[0] if device == "cuda" else on_cpu


def machine(device: str, setting: str) -> str:
    """What something was timed on, in one line, with the ``setting`` in its middle."""
    on_cpu = device == "cpu"
    name = platform.processor() or platform.machine() if on_cpu else torch.cuda.get_device_name()
    cores = f", {os.cpu_count()} cores, {torch.get_num_threads()} threads" if on_cpu else ""
    busy = f", load {os.getloadavg()[0]:.1f}" if on_cpu else ""
    return f"{name}{cores}, torch {torch.__version__}, {setting}{busy}"


@dataclass(frozen=True)
class Timing:
    """One measurement, the median of several; ``step`` is forward or training, or inference of a model: then the mean.

    ``ratio``: the time over that without a bias, of a model over that of the first encoding; ``least`` and ``most``: of
    the runs, in milliseconds.
    """

    encoding: str
    backend: str
    step: str
    length: int
    milliseconds: float
    ratio: float
    least: float
    most: float


def measure(setting: Setting, step: str, length: int) -> tuple[list[Timing], list[str]]:
    """Every encoding with every backend in turns, and a line on each that is left out."""
    ways, left_out = _ways(setting, step == "training", length)
    times = in_turns(ways, setting.repeats, setting.device)
    limit = statistics.median(times[LIMIT, "sdpa"])
    timings = []
    for key, found in times.items():
        median, least, most = (round(1000 * of(found), 3) for of in (statistics.median, min, max))
        timings.append(Timing(*key, step, length, median, round(statistics.median(found) / limit, 3), least, most))
    return timings, left_out


def _ways(setting: Setting, training: bool, n: int) -> tuple[dict[tuple[str, str], Way], list[str]]:
    """One function per encoding and backend, called once already, and lines on what is left out."""
    torch.manual_seed(0)
    device, batch, heads = setting.device, setting.batch, setting.heads
    kind = {"device": device, "dtype": DTYPES[setting.dtype]}
    q, k, v = (torch.randn(batch, heads, n, setting.width, **kind, requires_grad=training) for _ in range(3))
    grad = torch.randn(q.shape, **kind)
    inputs = torch.randn(batch, n, heads * setting.width, **kind)
    positions = Positions.arange(n, device=device)

    def way(encoding: Encoding | None, backend: Backend | None, parameters: list[Tensor]) -> None:
        with torch.set_grad_enabled(training):
            if encoding is None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                plan = plan_of(encoding, positions, None, backend)
                out = carry_out(q, k, v, plan, 0.0, noted(inputs, plan))
            if training:
                torch.autograd.grad(out, [q, k, v, *parameters], grad, allow_unused=True)

    free = free_memory(device)
    needed = DENSE_COPIES * 4 * batch * heads * n * n
    found = {(LIMIT, "sdpa"): partial(way, None, None, [])}
    found[LIMIT, "sdpa"]()
    left_out = []
    for spec in setting.encodings:
        encoding = encodings.build(spec, heads, heads * setting.width, length=n).to(device)
        if not (encoding.adds_bias or encoding.is_content_dependent) and spec.partition(":")[0] != "nope":
            raise UserError(f"'{spec}' has no bias, and the time of a bias is what is measured: leave it out")
        parameters = [p for p in encoding.parameters() if p.requires_grad]
        for name in BACKENDS if tuple(setting.backends) == ("all",) else setting.backends:
            if name == "reference" and needed > free:
                left_out.append(f"left out, reference at {n} tokens: needs about {needed / 2**30:.0f} GiB of memory")
                continue
            tried = partial(way, encoding, BACKENDS[name], parameters)
            why = refusal(tried, f"{name}{' in training' * training}", f"{name} at {n} tokens", f" for {spec}")
            if why:
                left_out.append(why)
            else:
                found[spec, name] = tried
    return found, left_out


def refusal(way: Way, name: str, short: str, of: str = "") -> str:
    """Calls ``way`` once; a line on why it cannot be timed, nothing if it can. ``short``: its name where memory is."""
    try:
        way()
    except (UserError, NotImplementedError) as error:
        return f"left out, {name}: {error}"
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        return f"left out, {short}: not enough memory{of}"
    return ""


def in_turns(ways: dict[Any, Way], repeats: int, device: str) -> dict[Any, list[float]]:
    """Seconds of each, all of them once in every turn."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[Any, list[float]] = {key: [] for key in ways}
    for _ in range(repeats):
        for key, way in ways.items():
            if not times[key] or times[key][0] < SLOW:
                wait()
                start = time.perf_counter()
                way()
                wait()
                times[key].append(time.perf_counter() - start)
    return times


def tables(timings: Sequence[Timing]) -> list[Table]:
    """One per step: milliseconds without a bias, then ratios to it; each with the least and most of its runs."""

    def cell(timing: Timing | None, value: str) -> Cell:
        if timing is None:
            return Cell("")
        middle = getattr(timing, value)
        least, most = (middle * end / timing.milliseconds for end in (timing.least, timing.most))
        return Cell(f"{middle:.2f} ({least:.2f} to {most:.2f})", middle)

    found = []
    for step in dict.fromkeys(t.step for t in timings):
        cells = {(t.encoding, t.backend, t.length): t for t in timings if t.step == step}
        lengths = list(dict.fromkeys(length for _, _, length in cells))
        rows = []
        for encoding, backend in dict.fromkeys(key[:2] for key in cells):
            own = [cells.get((encoding, backend, length)) for length in lengths]
            value, unit = ("milliseconds",) * 2 if encoding == LIMIT else ("ratio", backend)
            rows.append(Row(f"{encoding}, {unit}", [cell(t, value) for t in own]))
        found.append(Table("", [step, *map(str, lengths)], rows))
    return found

"""Whether every backend computes every encoding rightly on this machine, against the reference in float64."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe import encodings
from fairseq_rpe.analysis.speed import DTYPES, check_backends
from fairseq_rpe.attention import BACKENDS, Backend, calibration_cache, calibration_inputs
from fairseq_rpe.attention.forward import carry_out, counted, noted, plan_of
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.contract import ContractError, is_shipped
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import parse
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.utils.table import Cell as Shown
from fairseq_rpe.utils.table import Row, Table

CASES = ("forward", "backward", "padded", "cached", "warped")
PASSED, FAILED, REFUSED, NONE = "passed", "failed", "refused", "does not apply"
BATCH, HEADS, SEED = 2, 2, 0
PADS, STEPS = 7, 3  # tokens on the left of a padded row; of decoding
FAR = 3  # times the tokens: positions that tables have to hold, of warped rows
SYMBOLS = (".", "</s>", *"abcdef")  # a dictionary for encodings that read tokens
REPEATS, LONG = 3, 0.02  # timed calls; seconds after which no more are made


@dataclass(frozen=True)
class Setting:
    """What is tested: each of ``encodings`` (none: all that are registered) with each of ``backends`` and ``dtypes``.

    ``device`` is cpu or cuda, ``dtypes`` are keys of :data:`~fairseq_rpe.analysis.speed.DTYPES`.
    """

    device: str
    encodings: Sequence[str] = ()
    backends: Sequence[str] = ("all",)
    dtypes: Sequence[str] = ("fp32", "bf16")

    def check(self) -> None:
        """Raises UserError: no such encoding, backend or dtype, or an encoding of the user's own with a mistake."""
        check_backends(self.backends, self.names(), BACKENDS)
        for spec in self.names():
            encodings.normalise(spec)
            _check_own(spec)
        for name in self.dtypes:
            if name not in DTYPES:
                raise UserError(f"--dtype: unknown '{name}'; known: {', '.join(DTYPES)}")
        if not self.dtypes:
            raise UserError("--dtype names at least one")

    def names(self) -> Sequence[str]:
        """The encodings."""
        return self.encodings or encodings.names()

    def tests(self) -> list[Callable[[], list["Cell"]]]:
        """What to call for the cells of each backend, dtype and encoding."""
        backends = tuple(BACKENDS) if tuple(self.backends) == ("all",) else self.backends
        names = self.names()
        return [partial(tested, self.device, *at, at[2] == names[0]) for at in product(backends, self.dtypes, names)]


@dataclass(frozen=True)
class Cell:
    """One test. ``case`` is one of :data:`CASES`; ``state`` passed, failed, refused or does not apply.

    forward; backward: with all gradients; padded: with padding on the left; cached: one query against all keys, for the
    last three tokens; warped: unevenly spaced positions, fractions where the encoding takes them. padded and warped
    have gradients too where the backend has any.

    ``error``: the largest one of outputs and gradients, as a multiple of ``tolerance`` times the largest value or 1;
    ``seconds``: of a call, the least of a few; ``reason``: of a failure or a refusal.
    """

    encoding: str
    backend: str
    dtype: str
    case: str
    state: str
    tolerance: float
    error: float | None = None
    seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Size:
    """Tokens, and the width of a head."""

    tokens: int
    width: int


def _check_own(spec: str) -> None:
    """Raise the ContractError of a user's encoding; any other refusal is a result of the test."""
    try:
        if not is_shipped(registry.get(parse(spec)[0])):
            encodings.build(spec, HEADS, HEADS * 32, FAR * calibration_inputs.SIZE, SYMBOLS)
    except ContractError:
        raise
    except UserError:
        pass


def size_for(device: str, backend: str) -> Size:
    """Odd, several blocks of every kernel; small where Triton's interpreter runs them."""
    if device == "cuda":
        return Size(calibration_inputs.SIZE, 64)
    return Size(37 if backend == "triton" else calibration_inputs.SIZE, 32)


def tested(device: str, backend: str, dtype: str, spec: str, first: bool) -> list[Cell]:
    """The cells of an encoding; whatever goes wrong is a failed one. ``first``: of its backend and dtype."""
    if backend == "flex" and first:
        torch._dynamo.reset()  # torch keeps so many compiled functions and then refuses more
    size, tolerance, cells = size_for(device, backend), calibration_inputs.TOLERANCE[DTYPES[dtype]], []
    for case in CASES:
        about = (spec, backend, dtype, case)
        torch.manual_seed(SEED)
        try:
            encoding = encodings.build(spec, HEADS, HEADS * size.width, FAR * size.tokens, SYMBOLS).to(device)
            if case == "warped" and encoding.position_type == "none":
                cells.append(Cell(*about, NONE, tolerance))
                continue
            error, seconds = _compared(encoding, BACKENDS[backend], case, DTYPES[dtype], size, device)
            state = PASSED if error <= 1 else FAILED
            reason = "" if state == PASSED else "not a number" if error != error else "deviates from the reference"
            finite = error if math.isfinite(error) else None
            cells.append(Cell(*about, state, tolerance, finite, seconds, reason))
        except UserError as refusal:
            cells.append(Cell(*about, REFUSED, tolerance, reason=str(refusal)))
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            cells.append(Cell(*about, FAILED, tolerance, reason=f"{type(error).__name__}: {said}"))
    return cells


def _compared(
    encoding: Encoding, backend: Backend, case: str, dtype: torch.dtype, size: Size, device: str
) -> tuple[float, float]:
    """The error as a multiple of the tolerance, and seconds of a call."""
    n, shape = size.tokens, (BATCH, HEADS, size.tokens, size.width)
    exact = [torch.randn(shape).to(device, dtype).double() for _ in range(3)]
    cotangent = torch.randn(shape).to(device, dtype)
    inputs = torch.randn(BATCH, n, HEADS * size.width).to(device, dtype).double()
    positions, padding = _positions(encoding, case, n, device)
    if encoding.needs_token_ids:
        ids = torch.randint(len(SYMBOLS), (BATCH, n)).to(device)
        positions = replace(positions, tokens=ids if padding is None else ids.masked_fill(padding, -1))
    if padding is not None:
        cotangent = cotangent.masked_fill(padding[:, None, :, None], 0.0)
    grads = case in ("backward", "padded", "warped")

    def calls(given: Sequence[Tensor], chosen: Backend, grads: bool) -> Iterator[Tensor]:
        """The output and, with ``grads``, the gradients of q, k, v and the parameters."""
        q, k, v = (x.detach().requires_grad_(grads) for x in given)
        with torch.set_grad_enabled(grads):
            for m in range(n - STEPS + 1, n + 1) if case == "cached" else (n,):
                own = _last(positions, m) if case == "cached" else positions
                new = q[:, :, m - 1 : m] if case == "cached" else q
                plan = plan_of(encoding, own, padding, chosen)
                notes = noted(inputs[:, :m].to(q.dtype), plan)
                out = carry_out(new, k[:, :, :m], v[:, :, :m], plan, 0.0, notes)
                yield out
            if grads:
                leaves = [q, k, v, *(p for p in encoding.parameters() if p.requires_grad)]
                found = torch.autograd.grad(out, leaves, cotangent.to(out.dtype), allow_unused=True)
                yield from (torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))

    given = [x.to(dtype) for x in exact]
    start = time.perf_counter()
    try:
        found = list(calls(given, backend, grads))
    except UserError:
        if not grads or case == "backward":
            raise
        grads = False  # a backend that has no gradients here is still tested on the rest
        found = list(calls(given, backend, grads))
    first = time.perf_counter() - start
    expected = list(calls(exact, BACKENDS["reference"], grads))
    plan = plan_of(encoding, positions, padding, backend)
    error = calibration_inputs.deviation(found, expected, calibration_inputs.TOLERANCE[dtype], plan, given[2])
    interpreted = device == "cpu" and backend is BACKENDS["triton"]  # which takes seconds, and compiles nothing
    seconds = first if interpreted else _seconds(lambda: list(calls(given, backend, grads)), device)
    return error, seconds / (STEPS if case == "cached" else 1)


def _positions(encoding: Encoding, case: str, n: int, device: str) -> tuple[Positions, Tensor | None]:
    if case == "padded":
        padding = torch.zeros(BATCH, n, dtype=torch.bool, device=device)
        padding[0, :PADS] = True
        return counted(padding, n, encoding.length_dependent)
    if case == "warped":
        at = torch.rand(BATCH, n).mul(2).cumsum(1)
        if encoding.position_type == "whole":
            at = at.round() + torch.arange(n)
        at = at.to(device)
        return Positions(at, at, 1.0 if encoding.position_type == "whole" else None, contiguous=False), None
    return Positions.arange(n, device=device), None


def _last(pos: Positions, m: int) -> Positions:
    """Of the last of m tokens."""
    return Positions(pos.k[:, m - 1 : m], pos.k[:, :m], tokens=None if pos.tokens is None else pos.tokens[:, :m])


def _seconds(work: Callable[[], Any], device: str) -> float:
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < LONG:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def tables(cells: Sequence[Cell]) -> list[Table]:
    """One for each backend and dtype that has not refused all: encodings × cases, errors with milliseconds."""
    found = []
    for backend, dtype in dict.fromkeys((c.backend, c.dtype) for c in cells):
        own = {(c.encoding, c.case): c for c in cells if (c.backend, c.dtype) == (backend, dtype)}
        if any(c.state in (PASSED, FAILED) for c in own.values()):
            names = dict.fromkeys(encoding for encoding, _ in own)
            rows = [Row(name, [Shown(_shown(own[name, case])) for case in CASES]) for name in names]
            found.append(Table("", [f"{backend}, {dtype}", *CASES], rows))
    return found


def _shown(cell: Cell) -> str:
    if cell.state == NONE:
        return "–"
    if cell.error is None or cell.seconds is None:
        return cell.state
    text = f"{cell.error:.3f}, {1000 * cell.seconds:.2f} ms"
    return text if cell.state == PASSED else f"{cell.state}: {text}"


def reasons(cells: Sequence[Cell]) -> list[str]:
    """A line on each refusal and each failure, with what it holds for."""
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        if cell.reason:
            found.setdefault((cell.state, cell.backend, cell.reason), []).append(cell)
    lines = []
    for (state, backend, reason), own in found.items():
        where = []
        for name in ("encoding", "case", "dtype"):
            here, there = ({getattr(c, name): None for c in some} for some in (own, cells))
            where += [", ".join(here)] if len(here) < len(there) else []
        lines.append(f"{state}: {backend}: {reason} ({'; '.join(where) or 'everything'})")
    return lines


def summary(cells: Sequence[Cell]) -> str:
    """How many of each state, and the largest error of those that passed."""
    counts = {state: sum(c.state == state for c in cells) for state in (PASSED, FAILED, REFUSED)}
    worst = max((c.error for c in cells if c.state == PASSED and c.error is not None), default=0.0)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) + f"; largest error passed: {worst:.3f}"


def document(setting: Setting, cells: Sequence[Cell], about: dict[str, Any], complete: bool) -> dict[str, Any]:
    """What is written as JSON, to attach to a report; ``about``: the version and commit of this package."""
    return {
        **about,
        "machine": calibration_cache.machine(torch.device(setting.device)),
        "setting": {**asdict(setting), "batch": BATCH, "heads": HEADS},
        "complete": complete,
        "summary": summary(cells),
        "cells": [asdict(cell) for cell in cells],
    }

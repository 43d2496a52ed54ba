"""Self-test: compares every backend with the float64 reference on this machine, for every encoding."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fairseq_rpe import encodings
from fairseq_rpe.analysis.speed import DTYPES, check_backends
from fairseq_rpe.attention import BACKENDS, Backend, autotune_cache, autotune_inputs
from fairseq_rpe.attention.forward import build_plan, compute_token_features, positions_from_padding, run_attention
from fairseq_rpe.core.contract import ContractError, is_shipped
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import parse_pattern
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import parse
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.utils.table import Cell, Table, TableRow

CASES = ("forward", "backward", "padded", "cached", "warped", "grouped")
WITH_GRADS = ("backward", "padded", "warped", "grouped")  # cases with gradients
# attention options, which any encoding can have: one spec for each kind of code that computes them
OPTION_SPECS = (
    "rope:local=12",
    "kerple_log:local=12,softcap=2,null_logit=learned",
    "alibi:block=12",
    "nope:query_scale=ssmax,null_logit=zero",
)
PASSED, FAILED, REFUSED, NOT_APPLICABLE = "passed", "failed", "refused", "does not apply"
BATCH, HEADS, SEED = 2, 2, 0
PAD_TOKENS, DECODE_STEPS = 7, 3  # padding on the left of a padded row; decoded tokens
POSITION_FACTOR = 3  # largest position / tokens, in warped rows
SYMBOLS = (".", "</s>", *"abcdef+=123")  # dictionary for encodings that need token ids
# activations whose slope jumps at 0, and the largest input that float32 may not tell from 0, in units of its eps times
# the largest input of all; in 24 draws of dape, inputs of its LeakyReLU deviated from float64 by at most 2.1 units
KINKED_ACTIVATIONS = (F.leaky_relu, F.relu, torch.relu, Tensor.relu)
KINK_MARGIN, MAX_DRAWS = 16, 10
REPEATS, MAX_TIMING_SECONDS = 3, 0.02  # timed calls; total seconds after which timing ends


@dataclass(frozen=True)
class SelftestSetting:
    """What is tested: each encoding with each backend and dtype.

    Attributes:
        device: device that the tests run on, ``cpu`` or ``cuda``.
        encodings: specs, or patterns of layers; an empty sequence means all registered encodings and
            :data:`OPTION_SPECS`.
        backends: names of backends, or "all".
        dtypes: keys of :data:`~fairseq_rpe.analysis.speed.DTYPES`.
    """

    device: str
    encodings: Sequence[str] = ()
    backends: Sequence[str] = ("all",)
    dtypes: Sequence[str] = ("fp32", "bf16")

    def check(self) -> None:
        """Raise UserError for an unknown encoding, backend or dtype, or a user-defined encoding with a mistake."""
        check_backends(self.backends, self.names(), BACKENDS)
        for spec in self.names():
            encodings.normalise(spec)
            _check_contract(spec)
        for name in self.dtypes:
            if name not in DTYPES:
                raise UserError(f"--dtype: unknown '{name}'; known: {', '.join(DTYPES)}")
        if not self.dtypes:
            raise UserError("--dtype names at least one")

    def names(self) -> Sequence[str]:
        """Return the specs of all tested encodings; a pattern of layers is tested by its distinct encodings."""
        specs = [name for spec in self.encodings for name in parse_pattern(spec).specs]
        return list(dict.fromkeys(specs)) or (*encodings.names(), *OPTION_SPECS)

    def tests(self) -> list[Callable[[], list["TestResult"]]]:
        """Return a function for each backend, dtype and encoding, which returns its results."""
        backends = tuple(BACKENDS) if tuple(self.backends) == ("all",) else self.backends
        names = self.names()
        combinations = product(backends, self.dtypes, names)
        return [partial(run_tests, self.device, *values, values[2] == names[0]) for values in combinations]


@dataclass(frozen=True)
class TestResult:
    """Result of one test.

    Attributes:
        encoding: spec of the encoding.
        backend: name of the backend.
        dtype: key of :data:`~fairseq_rpe.analysis.speed.DTYPES`.
        case: one of :data:`CASES`. forward: the output; backward: all gradients too; padded: with padding on the left;
            cached: one query against all keys, for the last three tokens; warped: unevenly spaced positions, fractional
            ones if the encoding takes them; grouped: with one key head for all query heads. padded, warped and grouped
            have gradients too if the backend has any.
        state: passed, failed, refused or does not apply.
        tolerance: tolerance of the dtype, for outputs and gradients.
        error: largest error of outputs and gradients, as a multiple of ``tolerance`` · max(1, largest value).
        seconds: seconds of a call, the least of a few.
        reason: reason of a failure or a refusal.
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
    """Number of tokens, and head width."""

    tokens: int
    width: int


def _check_contract(spec: str) -> None:
    """Raise the ContractError of a user-defined encoding; other refusals are results of the test."""
    try:
        if not is_shipped(registry.get(parse(spec)[0])):
            encodings.build(spec, HEADS, HEADS * 32, POSITION_FACTOR * autotune_inputs.SIZE, SYMBOLS)
    except ContractError:
        raise
    except UserError:
        pass


def problem_size(device: str, backend: str) -> Size:
    """Return an odd number of tokens that spans several blocks of every kernel; small for Triton's interpreter."""
    if device == "cuda":
        return Size(autotune_inputs.SIZE, 64)
    return Size(37 if backend == "triton" else autotune_inputs.SIZE, 32)


def run_tests(device: str, backend: str, dtype: str, spec: str, first: bool) -> list[TestResult]:
    """Run all cases of an encoding; any exception is a failed test.

    Args:
        device: device that the tests run on, ``cpu`` or ``cuda``.
        backend: name of a registered backend.
        dtype: key of :data:`~fairseq_rpe.analysis.speed.DTYPES`.
        spec: spec of the encoding.
        first: whether it is the first encoding of this backend and dtype.

    Returns:
        One result for each of :data:`CASES`.
    """
    if backend == "flex" and first:
        torch._dynamo.reset()  # torch limits the number of compiled functions and refuses further ones
    size, tolerance, cells = problem_size(device, backend), autotune_inputs.TOLERANCE[DTYPES[dtype]], []
    for case in CASES:
        about = (spec, backend, dtype, case)
        torch.manual_seed(SEED)
        try:
            encoding = encodings.build(spec, HEADS, HEADS * size.width, POSITION_FACTOR * size.tokens, SYMBOLS).to(
                device
            )
            if not _applies(encoding, case, size, device):
                cells.append(TestResult(*about, NOT_APPLICABLE, tolerance))
                continue
            error, seconds = _compare(encoding, BACKENDS[backend], case, DTYPES[dtype], size, device)
            state = PASSED if error <= 1 else FAILED
            reason = "" if state == PASSED else "not a number" if error != error else "deviates from the reference"
            finite = error if math.isfinite(error) else None
            cells.append(TestResult(*about, state, tolerance, finite, seconds, reason))
        except UserError as refusal:
            cells.append(TestResult(*about, REFUSED, tolerance, reason=str(refusal)))
        except Exception as error:
            message = " ".join(str(error).split())[:300]
            cells.append(TestResult(*about, FAILED, tolerance, reason=f"{type(error).__name__}: {message}"))
    return cells


def _applies(encoding: Encoding, case: str, size: Size, device: str) -> bool:
    """Return whether a case is possible: an encoding may read no positions, or need one key head per query head."""
    if case == "warped":
        return encoding.position_type != "none"
    if case == "grouped":
        inputs = _draw_inputs(encoding, case, torch.float32, Size(2, size.width), device)
        try:
            inputs.run(inputs.qkv, encoding, BACKENDS["reference"], with_grads=False)
        except UserError:
            return False
    return True


@dataclass(frozen=True)
class _Inputs:
    """Inputs of one case, in float64 but rounded to the tested dtype, so that the reference gets the same numbers.

    Attributes:
        qkv: q (B, H, n, D), and k and v, (B, H, n, D) or (B, 1, n, D) each.
        cotangent: (B, H, n, D) gradient of the output in the tested dtype; 0 at padding.
        x: (B, n, C) a layer's input, for token features.
        positions: positions of the n tokens.
        padding: (B, n) bool, or None.
        is_cached: whether each of the last queries is computed alone, with the keys up to it.
    """

    qkv: Sequence[Tensor]
    cotangent: Tensor
    x: Tensor
    positions: Positions
    padding: Tensor | None
    is_cached: bool

    def run(self, qkv: Sequence[Tensor], encoding: Encoding, backend: Backend, with_grads: bool) -> list[Tensor]:
        """Return the output of each call and, ``with_grads``, the gradients of q, k, v and the parameters.

        Args:
            qkv: q, k and v of these inputs, in the dtype of the computation.
            encoding: tested encoding.
            backend: backend that computes attention.
            with_grads: whether gradients are computed.
        """
        q, k, v = (x.detach().requires_grad_(with_grads) for x in qkv)
        with torch.set_grad_enabled(with_grads):
            results = self.attend(q, k, v, encoding, backend)
            if with_grads:
                leaves = [q, k, v, *(p for p in encoding.parameters() if p.requires_grad)]
                out = results[-1]
                grads = torch.autograd.grad(out, leaves, self.cotangent.to(out.dtype), allow_unused=True)
                results += [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
        return results

    def attend(self, q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, backend: Backend) -> list[Tensor]:
        """Return the output of each call: (B, H, n, D), or (B, H, 1, D) of each of the last queries."""
        n, outputs = q.shape[2], []
        states: list[Tensor | None] = [None]  # of the keys, for an encoding whose queries change one
        if self.is_cached and encoding.has_key_state:
            m = n - DECODE_STEPS
            first = q[:, :, :m], k[:, :, :m], v[:, :, :m]
            positions = Positions(self.positions.k[:, :m], self.positions.k[:, :m])
            plan = build_plan(encoding, positions, self.padding, BACKENDS["reference"])
            features = compute_token_features(self.x[:, :m].to(q.dtype), plan)
            run_attention(*first, replace(plan, store_key_state=states.append), 0.0, features)
        for m in range(n - DECODE_STEPS + 1, n + 1) if self.is_cached else (n,):
            positions = _last(self.positions, m) if self.is_cached else self.positions
            query = q[:, :, m - 1 : m] if self.is_cached else q
            plan = build_plan(encoding, positions, self.padding, backend)
            plan = replace(plan, key_state=states[-1], store_key_state=states.append)
            features = compute_token_features(self.x[:, :m].to(q.dtype), plan)
            outputs.append(run_attention(query, k[:, :, :m], v[:, :, :m], plan, 0.0, features))
        return outputs


def _draw_inputs(encoding: Encoding, case: str, dtype: torch.dtype, size: Size, device: str) -> _Inputs:
    """Draw the inputs of a case."""
    n, shape = size.tokens, (BATCH, HEADS, size.tokens, size.width)
    qkv = [torch.randn(shape).to(device, dtype).double() for _ in range(3)]
    if case == "grouped":
        qkv[1:] = [x[:, :1] for x in qkv[1:]]
    cotangent = torch.randn(shape).to(device, dtype)
    x = torch.randn(BATCH, n, HEADS * size.width).to(device, dtype).double()
    positions, padding = _positions(encoding, case, n, device)
    if encoding.needs_token_ids:
        ids = torch.randint(len(SYMBOLS), (BATCH, n)).to(device)
        positions = replace(positions, tokens=ids if padding is None else ids.masked_fill(padding, -1))
    if padding is not None:
        cotangent = cotangent.masked_fill(padding[:, None, :, None], 0.0)
    return _Inputs(qkv, cotangent, x, positions, padding, is_cached=case == "cached")


class _KinkRecorder(TorchFunctionMode):
    """Records the inputs of activations that float32 cannot tell from 0.

    Attributes:
        inputs: one tensor (N,) for each call of an activation, with its graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KINKED_ACTIVATIONS:
            x = args[0] if args else kwargs["input"]
            margin = KINK_MARGIN * torch.finfo(torch.float32).eps * x.detach().abs().max()
            self.inputs.append(x[x.detach().abs() <= margin])
        return func(*args, **(kwargs or {}))


def _avoid_kinks(inputs: _Inputs, encoding: Encoding, dtype: torch.dtype) -> _Inputs:
    """Return inputs at which the gradient is continuous, as far as activations of ``KINKED_ACTIVATIONS`` decide.

    ReLU and LeakyReLU have two slopes at 0. Where rounding alone decides the sign of an input, a right gradient may be
    as far from the reference's as the slopes are. So queries with such an input are drawn again, ``MAX_DRAWS`` times at
    most.

    Args:
        inputs: inputs of a case with gradients.
        encoding: tested encoding.
        dtype: tested dtype, to which queries are rounded.
    """
    if not encoding.is_content_dependent:  # no activation depends on queries
        return inputs
    for _ in range(MAX_DRAWS):
        q, k, v = (x.detach() for x in inputs.qkv)
        q.requires_grad_()
        with torch.enable_grad(), _KinkRecorder() as recorder:
            inputs.attend(q, k, v, encoding, BACKENDS["reference"])
        near = [x.sum() for x in recorder.inputs if x.requires_grad]
        (grad,) = torch.autograd.grad(sum(near), q, allow_unused=True) if near else (None,)
        # hidden pairs have no gradient
        rows = None if grad is None else grad.ne(0).any(3).any(1)[:, None, :, None]  # (B, 1, n, 1)
        if rows is None or not rows.any():
            break
        q = torch.where(rows, torch.randn(q.shape).to(q.device, dtype).to(q.dtype), q.detach())
        inputs = replace(inputs, qkv=(q, k, v))
    return inputs


def _compare(
    encoding: Encoding, backend: Backend, case: str, dtype: torch.dtype, size: Size, device: str
) -> tuple[float, float]:
    """Return the error as a multiple of the tolerance, and the seconds of a call."""
    inputs = _draw_inputs(encoding, case, dtype, size, device)
    with_grads = case in WITH_GRADS
    if with_grads:
        inputs = _avoid_kinks(inputs, encoding, dtype)
    rounded = [x.to(dtype) for x in inputs.qkv]
    start = time.perf_counter()
    try:
        actual = inputs.run(rounded, encoding, backend, with_grads)
    except UserError:
        if not with_grads or case == "backward":
            raise
        with_grads = False  # a backend without gradients for this case is still tested on its output
        actual = inputs.run(rounded, encoding, backend, with_grads)
    first_seconds = time.perf_counter() - start
    expected = inputs.run(inputs.qkv, encoding, BACKENDS["reference"], with_grads)
    plan = build_plan(encoding, inputs.positions, inputs.padding, backend)
    _, _, v = inputs.qkv
    error = autotune_inputs.deviation(actual, expected, autotune_inputs.TOLERANCE[dtype], plan, v)
    is_interpreted = device == "cpu" and backend is BACKENDS["triton"]  # slow, and without compilation to warm up
    seconds = first_seconds
    if not is_interpreted:
        seconds = _seconds(lambda: inputs.run(rounded, encoding, backend, with_grads), device)
    return error, seconds / (DECODE_STEPS if case == "cached" else 1)


def _positions(encoding: Encoding, case: str, n: int, device: str) -> tuple[Positions, Tensor | None]:
    """Return positions and padding mask of a case."""
    if case == "padded":
        padding = torch.zeros(BATCH, n, dtype=torch.bool, device=device)
        padding[0, :PAD_TOKENS] = True
        return positions_from_padding(padding, n, encoding.length_dependent)
    if case == "warped":
        pos = torch.rand(BATCH, n).mul(2).cumsum(1)  # (B, n)
        if encoding.position_type == "whole":
            # Few gaps: the vectors of floater grow exponentially. At positions up to 2n they make scores of 190, and
            # rounding queries and keys to bfloat16 alone exceeds the tolerance.
            pos = (pos / 4).round() + torch.arange(n)
        pos = pos.to(device)
        return Positions(pos, pos, 1.0 if encoding.position_type == "whole" else None, contiguous=False), None
    return Positions.arange(n, device=device), None


def _last(pos: Positions, m: int) -> Positions:
    """Return the positions of one query, the last of m tokens, and its keys."""
    return Positions(pos.k[:, m - 1 : m], pos.k[:, :m], tokens=None if pos.tokens is None else pos.tokens[:, :m])


def _seconds(work: Callable[[], Any], device: str) -> float:
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < MAX_TIMING_SECONDS:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def tables(cells: Sequence[TestResult]) -> list[Table]:
    """Return tables of errors and milliseconds (encodings × cases), one for each backend and dtype that ran at all."""
    result = []
    for backend, dtype in dict.fromkeys((c.backend, c.dtype) for c in cells):
        by_case = {(c.encoding, c.case): c for c in cells if (c.backend, c.dtype) == (backend, dtype)}
        if any(c.state in (PASSED, FAILED) for c in by_case.values()):
            names = dict.fromkeys(encoding for encoding, _ in by_case)
            rows = [TableRow(name, [Cell(_format(by_case[name, case])) for case in CASES]) for name in names]
            result.append(Table("", [f"{backend}, {dtype}", *CASES], rows))
    return result


def _format(cell: TestResult) -> str:
    if cell.state == NOT_APPLICABLE:
        return "–"
    if cell.error is None or cell.seconds is None:
        return cell.state
    text = f"{cell.error:.3f}, {1000 * cell.seconds:.2f} ms"
    return text if cell.state == PASSED else f"{cell.state}: {text}"


def reasons(cells: Sequence[TestResult]) -> list[str]:
    """Return a line on each distinct refusal and failure, with the encodings, cases and dtypes it applies to."""
    groups: dict[tuple[str, str, str], list[TestResult]] = {}
    for cell in cells:
        if cell.reason:
            groups.setdefault((cell.state, cell.backend, cell.reason), []).append(cell)
    lines = []
    for (state, backend, reason), group in groups.items():
        where = []
        for name in ("encoding", "case", "dtype"):
            in_group, tested = ({getattr(c, name): None for c in results} for results in (group, cells))
            where += [", ".join(in_group)] if len(in_group) < len(tested) else []
        lines.append(f"{state}: {backend}: {reason} ({'; '.join(where) or 'everything'})")
    return lines


def summary(cells: Sequence[TestResult]) -> str:
    """Return the number of results in each state, and the largest error of those that passed."""
    counts = {state: sum(c.state == state for c in cells) for state in (PASSED, FAILED, REFUSED)}
    worst = max((c.error for c in cells if c.state == PASSED and c.error is not None), default=0.0)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) + f"; largest error passed: {worst:.3f}"


def as_document(
    setting: SelftestSetting, cells: Sequence[TestResult], about: dict[str, Any], complete: bool
) -> dict[str, Any]:
    """Return the content of the JSON file, to attach to a bug report.

    Args:
        setting: encodings, backends and dtypes that are tested.
        cells: results of the tests that have run so far.
        about: version and commit of this package.
        complete: whether all tests have run.
    """
    return {
        **about,
        "machine": autotune_cache.describe_machine(torch.device(setting.device)),
        "setting": {**asdict(setting), "batch": BATCH, "heads": HEADS},
        "complete": complete,
        "summary": summary(cells),
        "cells": [asdict(cell) for cell in cells],
    }

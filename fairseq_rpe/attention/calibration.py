"""``auto`` earns its trust: every backend that takes a kind of call is checked, then the fastest is chosen.

For each :class:`~fairseq_rpe.attention.call_signature.Kind` of call, once: candidates are compared with the reference
in float64, outputs and all gradients, on a small sample of the same kind; those that agree are timed on the call's own
shape, forward and, where gradients are wanted, backward; the fastest is taken, named in the log and remembered
(:mod:`~fairseq_rpe.attention.calibration_cache`). One that raises, deviates, gives NaN or runs out of memory is dropped
with a warning, and training goes on. In deterministic mode nothing is timed: the first of a fixed order that agrees is
taken.
The gradients are those of q, k, v and of a form's tables, numbers and pieces; what a function of positions reads is
reached by plain autograd, whichever backend calls it.

All of this happens on copies, in a thread of its own: the caller's graph, its hooks for saved tensors, gradients,
autocast and generators of random numbers are as they were. The thread also bounds the time, within what Python and CUDA
allow. A candidate that is still compiling after the limit is left behind, as a thread cannot be killed, and not asked
again in this process; if it ever ends, nobody listens, and while it does not, it may keep a lock of torch's compiler. A
kernel that never ends, or an illegal access to memory, spoils the whole CUDA context, whoever started it: against these
only another process would help, which would need the GPU's memory a second time, so they are not guarded against.

Inside torch.compile, the capture of a CUDA graph or a backward pass (reentrant checkpoints run layers there) nothing is
measured: what is known is used, otherwise ``sdpa``.
"""

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairseq_rpe.attention import calibration_cache, calibration_inputs
from fairseq_rpe.attention.calibration_cache import Choice
from fairseq_rpe.attention.call_signature import Kind, kind_of
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.rank_consensus import agreed, store_of_ranks
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.core.errors import UserError

logger = logging.getLogger(__name__)
LIMIT = 120.0  # seconds for a candidate's check, and again for its timing; NCCL gives up after 600
WARM_UPS, REPEATS, LONG = 2, 5, 2.0  # calls; calls; seconds of calls after which no more are made
SEED = 1234
Attend = Callable[..., Tensor]
Result = TypeVar("Result")


class Hangs(Exception):
    """A candidate was not done in time."""


def stopwatch(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that ``work`` takes on ``device``: the median of a few calls after a warm-up."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UPS):
        once()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < LONG:
        times.append(once())
    return statistics.median(times)


def on_gpu(q: Tensor) -> bool:
    """On the CPU there is nothing to choose: sdpa is measured there, in docs/attention.md."""
    return q.is_cuda


class Calibrator:
    """Chooses among ``candidates``, functions of (q, k, v, plan, dropout), for each kind of call.

    Args:
        candidates: by name, in the order in which deterministic mode takes them.
        plain: the one of them that is taken where nothing can be measured.
        applies: whether there is anything to choose, of q.
        seconds: of (work, device), as :func:`stopwatch`.
        limit: seconds for each check and each timing.
        machine: of q's device: what choices are remembered for.
        store: that ranks agree in, or None; asked at each new kind.
    """

    def __init__(
        self,
        candidates: Mapping[str, Attend],
        plain: str = "sdpa",
        *,
        applies: Callable[[Tensor], bool] = on_gpu,
        seconds: Callable[[Callable[[], Any], torch.device], float] = stopwatch,
        limit: float = LIMIT,
        machine: Callable[[torch.device], dict[str, str]] = calibration_cache.machine,
        store: Callable[[], Any] = store_of_ranks,
    ) -> None:
        self.candidates, self.plain, self.applies = dict(candidates), plain, applies
        self.seconds, self.limit, self.machine, self.store = seconds, limit, machine, store
        self._known: dict[tuple[torch.device, Kind], str | None] = {}
        self._hung: set[str] = set()
        self._lock = threading.Lock()

    def choice(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> str | None:
        """The name of the backend for this call; None: nothing is known, and it is not the time to measure."""
        if torch.compiler.is_compiling() or plan.only_sdpa or not self.applies(q):
            return None
        kind = kind_of(q, k, v, plan, dropout)
        key = q.device, kind
        if key not in self._known:
            if not _quiet(q):
                return None
            with self._lock:
                if key not in self._known:
                    self._known[key] = self._settled(kind, q, k, v, plan, dropout)
        return self._known[key]

    def drop(self, name: str, error: Exception, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> None:
        """No longer take ``name`` for the kind of this call, in which it has raised ``error``."""
        kind = kind_of(q, k, v, plan, dropout)
        self._known[q.device, kind] = self.plain
        _warn(name, kind, _said(error))

    def _settled(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> str | None:
        """By memory, by another rank or by trial; never an error."""
        try:
            machine = self.machine(q.device)
            key = f"{calibration_cache.name_of(machine)}/{kind}"
            decide = partial(self._decided, machine, kind, q, k, v, plan, dropout)
            found = agreed(key, decide, (2 * len(self.candidates) + 1) * self.limit, self.store())
        except Exception as error:
            logger.warning("attention backend: nothing could be measured for %s: %s", kind, _said(error))
            return None
        return found if found in self.candidates or found == "reference" else None

    def _decided(
        self, machine: dict[str, str], kind: Kind, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float
    ) -> str | None:
        known = calibration_cache.recall(machine, str(kind))
        if known is not None and known.backend in self.candidates:
            logger.info("attention backend: %s for %s%s", known.backend, kind, _ratios(known, "remembered"))
            return known.backend
        devices = [q.device] if q.is_cuda else []
        with torch.random.fork_rng(devices):
            choice, lasting = self._tried(kind, q, k, v, plan, dropout)
        if choice is None:
            return None
        logger.info("attention backend: %s for %s%s", choice.backend, kind, _ratios(choice, "measured"))
        if lasting:
            calibration_cache.keep(machine, str(kind), choice)
        return choice.backend

    def _tried(
        self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float
    ) -> tuple[Choice | None, bool]:
        """The choice, and whether it is one for other processes too; no choice where all refuse the call."""
        dropped: dict[str, str] = {}
        lasting = not self._hung

        def carried_out(name: str, work: Callable[[], Result]) -> Result | None:
            """What ``work`` gives; None: the candidate is out."""
            nonlocal lasting
            try:
                return self._within(work, q.device, kind.training)
            except UserError:  # what it does not do is no fault of its
                return None
            except Exception as error:
                dropped[name] = _said(error)
                lasting = lasting and not isinstance(error, (torch.OutOfMemoryError, Hangs))
                if isinstance(error, Hangs):
                    self._hung.add(name)
            _warn(name, kind, dropped[name])
            if q.is_cuda:
                torch.cuda.empty_cache()
            return None

        def prepared() -> tuple[calibration_inputs.Call, list[Tensor]]:
            call = calibration_inputs.small(q, k, v, plan, dropout)
            return call, _repeatably(call.wide(), reference)

        call, expected = self._within(prepared, q.device, kind.training)
        good = []
        for name, attend in self.candidates.items():
            if name not in self._hung and carried_out(name, partial(_checked, call, attend, expected, kind)):
                good.append(name)
        if len(good) > 1 and not kind.deterministic:
            copy = calibration_inputs.whole(q, k, v, plan, dropout)
            times = {}
            for name in good:
                work = partial(copy.carried_out, self.candidates[name])
                found = carried_out(name, partial(self.seconds, work, q.device))
                if found is not None:
                    times[name] = found
            good = sorted(times, key=lambda name: times[name])
            ratios = {name: round(times[name] / max(times[good[0]], 1e-9), 3) for name in good}
        else:
            ratios = dict.fromkeys(good[:1], 1.0)
        if good:
            return Choice(good[0], ratios, dropped), lasting
        # the plain one refuses the call, and says so to the user when it is called; or it is wrong itself
        wrong = self.plain in dropped and not plan.prune
        return (Choice("reference", {}, dropped) if wrong else None), False

    def _within(self, work: Callable[[], Result], device: torch.device, training: bool) -> Result:
        """What ``work`` gives in a thread of its own. Raises what it raises, or Hangs where the limit is over."""
        found: list[Result] = []
        raised: list[Exception] = []

        def carry_out() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                with torch.set_grad_enabled(training):
                    found.append(work())
            except Exception as error:
                # frames hold tensors, and this may be for want of memory
                raised.append(error.with_traceback(None))

        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the thread's stream need not be the caller's
        thread = threading.Thread(target=carry_out, name="attention calibration", daemon=True)
        thread.start()
        thread.join(self.limit)
        if thread.is_alive():
            raise Hangs(f"is not done after {self.limit:g} s")
        if raised:
            raise raised[0]
        return found[0]


def _checked(call: calibration_inputs.Call, attend: Attend, expected: Sequence[Tensor], kind: Kind) -> bool:
    """True. Raises ArithmeticError: the candidate is wrong."""
    inputs = call.q, call.k, call.v
    before = [x.detach().clone() for x in inputs]
    found = _repeatably(call, attend)
    tolerance = calibration_inputs.TOLERANCE[torch.bfloat16 if kind.rounded else call.q.dtype]
    if not all(torch.equal(x, y) for x, y in zip(before, inputs, strict=True)):
        for x, y in zip(inputs, before, strict=True):
            x.data.copy_(y)  # for those that come after
        raise ArithmeticError("writes into its inputs")
    worst = calibration_inputs.deviation(found, list(expected), tolerance, call.plan, call.v)
    if not worst <= 1:
        off = f"deviates from the reference by {worst:.3g} times the tolerance"
        raise ArithmeticError("gives NaN" if math.isnan(worst) else off)
    return True


def _repeatably(call: calibration_inputs.Call, attend: Attend) -> list[Tensor]:
    """With the same seed for dropout, whose mask all backends draw alike."""
    torch.default_generator.manual_seed(SEED)
    return call.carried_out(attend)


def _quiet(q: Tensor) -> bool:
    """Whether this is a moment to measure: an ordinary tensor, no capture of a graph and no backward pass."""
    if type(q) not in (Tensor, torch.nn.Parameter) or torch._C._functorch.maybe_current_level() is not None:
        return False
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    # there the thread that serves the device waits for us, and a backward pass of ours would wait for it
    return bool(torch._C._current_graph_task_id() == -1)


def _said(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "runs out of memory"
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, (ArithmeticError, Hangs)) else f"{type(error).__name__}: {text}"


def _warn(name: str, kind: Kind, why: str) -> None:
    logger.warning("attention backend '%s' is not used for %s: %s", name, kind, why)


def _ratios(choice: Choice, how: str) -> str:
    """The times as multiples of the least."""
    times = ", ".join(f"{name} {ratio:.2f}" for name, ratio in choice.ratios.items())
    return f" ({how}: {times})" if len(choice.ratios) > 1 else f" ({how})"

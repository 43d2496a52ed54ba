"""Backend autotuning: verify each candidate against the reference, then pick the fastest.

This happens once for each :class:`CallSignature`. The outputs and all gradients of each candidate are compared with
those of the reference in float64, on a small sample of the same signature. Candidates that agree are timed on the
call's own shape: forward and, where gradients are needed, backward. The fastest is logged, cached
(:mod:`~fairseq_rpe.attention.autotune_cache`) and used from then on. A candidate that raises, deviates, returns NaN or
runs out of memory is dropped with a warning. In deterministic mode nothing is timed: the first candidate of a fixed
order that agrees is used. The gradients are those of q, k, v and of a bias's tables, parameters and pieces. A bias that
is a function of positions may use other tensors; plain autograd computes their gradients, whichever backend runs.

All of this runs on copies, in a thread of its own: the caller's graph, saved-tensor hooks, gradients, autocast and
random number generators do not change. The thread also bounds the time as far as Python and CUDA allow. A thread cannot
be killed, so a candidate that is still compiling at the time limit keeps running, possibly with a lock of torch's
compiler, and is not tried again in this process. A kernel that never ends or an illegal memory access breaks the whole
CUDA context. Only another process could guard against these, which would need the GPU's memory a second time.

During the capture of a CUDA graph or a backward pass (reentrant checkpoints run layers there) nothing is measured: an
earlier choice of this process is used if there is one, otherwise ``sdpa``. Code that torch.compile traces always uses
``sdpa``, also after an earlier choice.

Processes of a distributed training agree without a collective. A collective would wait for every rank, and ranks need
not see the same signatures: the last batch of one rank may have padding where that of another has none, and a single
rank may evaluate. So the first rank that meets a signature decides, and puts its choice into the key-value store of the
process group. Later ranks read the choice, or wait for it as long as a decision may take.
"""

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fairseq_rpe.attention import autotune_cache, autotune_inputs
from fairseq_rpe.attention.autotune_cache import BackendChoice
from fairseq_rpe.attention.plan import AttentionPlan, is_evenly_spaced
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.core.bias import (
    Bias,
    DenseBias,
    KeyTableBias,
    PairBias,
    PointwiseBias,
    QueryKeyTableBias,
    QueryTableBias,
    ScaledDistanceBias,
    SumBias,
    ToeplitzBias,
    TokenBias,
)
from fairseq_rpe.core.errors import UserError

logger = logging.getLogger(__name__)
TIMEOUT = 120.0  # seconds for a candidate's check, and again for its timing; NCCL gives up after 600
WARM_UPS, REPEATS = 2, 5  # calls of a candidate before its timing, and calls that are timed
MAX_TIMING_SECONDS = 2.0  # no further call of a candidate is timed after this total time
SEED = 1234  # seed of the dropout mask while candidates are compared; any number would do
# keys, and window, of the shortest class of lengths; each further class is four times as long
MIN_KEYS, MIN_WINDOW = 128, 32
STORE_PREFIX = "fairseq_rpe/attention/"
NO_BACKEND = "-"  # in the store: the deciding rank has chosen none
Attend = Callable[..., Tensor]
Result = TypeVar("Result")


class _Call(NamedTuple):
    """Arguments of the attention call that a backend is chosen for; k and v may have fewer heads than q."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: AttentionPlan
    dropout: float


@dataclass(frozen=True)
class CallSignature:
    """What decides which backends support a call and, except for the batch size, how long they take.

    Attributes:
        dtype: dtype of q, k and v, joined by "/" if they differ.
        head_width: number of elements of a head of q and k.
        bias: none, table, curve, pointwise, pair, dense or tokens; products of queries or keys with vectors of up to a
            number of distances; terms of a sum are joined by "+".
        learned: whether the bias may need a gradient.
        spacing: spacing of the positions: even, if indices determine a pair's distance; steps, if all distances are
            multiples of one step; or any.
        padded: whether padding is hidden.
        queries: all tokens are queries, one is, or some are.
        keys: upper bound of the number of keys: 128, 512, 2048, …
        training: whether gradients are needed.
        dropout: whether weights are dropped.
        pruned: whether keys that provably do not matter may be skipped.
        deterministic: whether torch uses deterministic algorithms.
        rounded: whether products of float32 matrices may be rounded to TF32.
        documents: whether several documents or blocks share a row, and each query sees only its own.
        window: upper bound of the number of keys that a query sees in its window: 32, 128, 512, …; 0 without one.
        softcap: whether content logits are capped.
        null_logit: whether a query may attend to nothing.
        query_groups: query heads that share a key head.
        value_width: number of elements of a head of v, if it is another one than that of q and k; 0 otherwise.
    """

    dtype: str
    head_width: int
    bias: str
    learned: bool
    spacing: str
    padded: bool
    queries: str
    keys: int
    training: bool
    dropout: bool
    pruned: bool
    deterministic: bool
    rounded: bool
    documents: bool = False
    window: int = 0
    softcap: bool = False
    null_logit: bool = False
    query_groups: int = 1
    value_width: int = 0

    def __str__(self) -> str:
        """Describe the signature in words; different signatures have different words."""
        flags = ("learned", "padded", "training", "dropout", "pruned", "deterministic", "rounded", "documents")
        words = [self.dtype, f"head width {self.head_width}", f"bias: {self.bias}", f"spacing: {self.spacing}"]
        words += [f"queries: {self.queries}", f"up to {self.keys} keys"]
        words += [f"a window of up to {self.window}"] * (self.window > 0) + ["softcap"] * self.softcap
        words += ["null logit"] * self.null_logit
        words += [f"{self.query_groups} query heads per key head"] * (self.query_groups > 1)
        words += [f"values of width {self.value_width}"] * (self.value_width > 0)
        return ", ".join([*words, *(flag for flag in flags if getattr(self, flag))])


def call_signature(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> CallSignature:
    """Return the signature of the call ``backend(q, k, v, plan, dropout)``, without reading the values of tensors."""
    n, m, bias, pos = q.shape[2], k.shape[2], plan.bias, plan.positions
    grads = torch.is_grad_enabled()
    learned = grads and plan.bias_may_need_grad
    is_even = is_evenly_spaced(bias, pos) if isinstance(bias, ToeplitzBias) else pos.contiguous and pos.step is not None
    has_window = plan.window is not None and plan.window < m
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, k, v)]
    return CallSignature(
        dtype=dtypes[0] if len({*dtypes}) == 1 else "/".join(dtypes),
        head_width=q.shape[3],
        bias=_bias_name(bias, m),
        learned=learned,
        spacing="even" if is_even else "any" if pos.step is None else "steps",
        padded=plan.padding is not None,
        queries="all" if n == m else "one" if n == 1 else "some",
        keys=_length_class(m, MIN_KEYS),
        training=grads and (learned or any(x.requires_grad for x in (q, k, v))),
        dropout=dropout > 0,
        pruned=plan.prune > 0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        rounded=q.dtype == torch.float32 and _allows_tf32(),
        documents=plan.last_query is not None,
        window=_length_class(plan.window, MIN_WINDOW) if has_window and plan.window is not None else 0,
        softcap=plan.softcap > 0,
        null_logit=plan.null_logit is not None,
        query_groups=q.shape[1] // k.shape[1],
        value_width=v.shape[3] if v.shape[3] != q.shape[3] else 0,
    )


def _length_class(tokens: int, least: int) -> int:
    """Return the upper bound of the class of a number of tokens: ``least``, 4·least, 16·least, …."""
    bound = least
    while bound < tokens:
        bound *= 4
    return bound


def _bias_name(bias: Bias | None, m: int) -> str:
    """Return the name of a bias with m keys in a signature."""
    if isinstance(bias, SumBias):
        return " + ".join(_bias_name(term, m) for term in bias.terms)
    names = {
        ToeplitzBias: "table",
        ScaledDistanceBias: "curve",
        PointwiseBias: "pointwise",
        PairBias: "pair",
        DenseBias: "dense",
        TokenBias: "tokens",
        QueryTableBias: "queries",
        KeyTableBias: "keys",
        QueryKeyTableBias: "queries and keys",
    }
    name = next((x for kind, x in names.items() if isinstance(bias, kind)), "none" if bias is None else "gates")
    if not isinstance(bias, QueryTableBias | KeyTableBias | QueryKeyTableBias):
        return name
    return f"{name} by up to {_length_class(min(m, bias.num_columns), MIN_WINDOW)} vectors"


def _allows_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by torch's newer settings, which this older function cannot express
        return True


class CandidateTimeout(Exception):
    """A candidate did not finish in time."""


def median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that ``work`` takes on ``device``: the median of a few calls after a warm-up."""

    def time_call() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UPS):
        time_call()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < MAX_TIMING_SECONDS:
        times.append(time_call())
    return statistics.median(times)


def on_gpu(q: Tensor) -> bool:
    """Return whether q is on a GPU, where tuning pays; on a CPU sdpa is the fastest backend, see docs/attention.md."""
    return q.is_cuda


def rank_store() -> Any | None:
    """Return the key-value store of this training's processes, or None for one process or without a store."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if torch.distributed.get_world_size() < 2:
        return None
    try:
        return torch.distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError):
        return None


def agree_on_backend(key: str, decide: Callable[[], str | None], seconds: float, store: Any | None) -> str | None:
    """Return what the first rank that calls this function with ``key`` decides; None is a decision too.

    Args:
        key: name of the decision; ranks that should agree use the same key.
        decide: function that chooses a backend or None; only the first rank calls it.
        seconds: time that another rank waits for the decision; then it logs a warning and returns None.
        store: the ranks' key-value store, as :func:`rank_store` returns it; None: this process decides for itself.

    Returns:
        The name of a backend, or None if the deciding rank chose none or did not decide in time.
    """
    if store is None:
        return decide()
    key = STORE_PREFIX + key
    if store.add(f"{key}/asked", 1) == 1:
        choice: str | None = None
        try:
            choice = decide()
        finally:  # also after an error, so that no rank waits in vain
            store.set(key, choice or NO_BACKEND)
        return choice
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        logger.warning("no rank has chosen an attention backend within %.0f s: this one measures nothing", seconds)
        return None
    stored = store.get(key).decode()
    return None if stored == NO_BACKEND else stored


@dataclass
class _Failures:
    """Candidates that were dropped, with the reasons.

    Attributes:
        reasons: reason in words, by name of the candidate.
        transient: whether some candidate may succeed in another process: memory or time ran out in this one.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    transient: bool = False


class Autotuner:
    """Chooses among backends for each signature of a call.

    Args:
        candidates: functions of (q, k, v, plan, dropout) by name, in the order of preference of deterministic mode.
        fallback: name of the candidate that is used where nothing can be measured.
        applies: function of q that returns whether several candidates are worth comparing.
        timer: function of (work, device) that returns the seconds of ``work``, as :func:`median_seconds` does.
        timeout: seconds that each check and each timing of a candidate may take.
        machine: function of q's device that describes hardware and versions; choices are cached for this description.
        store: function that returns the ranks' key-value store, or None; called for each new signature.
    """

    def __init__(
        self,
        candidates: Mapping[str, Attend],
        fallback: str = "sdpa",
        *,
        applies: Callable[[Tensor], bool] = on_gpu,
        timer: Callable[[Callable[[], Any], torch.device], float] = median_seconds,
        timeout: float = TIMEOUT,
        machine: Callable[[torch.device], dict[str, str]] = autotune_cache.describe_machine,
        store: Callable[[], Any] = rank_store,
    ) -> None:
        self.candidates, self.fallback, self.applies = dict(candidates), fallback, applies
        self.timer, self.timeout, self.machine, self.store = timer, timeout, machine, store
        self._choices: dict[tuple[torch.device, CallSignature], str | None] = {}
        self._timed_out: set[str] = set()
        self._lock = threading.Lock()

    def choose(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> str | None:
        """Return the name of the backend for this call, or None if no choice is known and none can be measured now."""
        if torch.compiler.is_compiling() or plan.requires_sdpa or not self.applies(q):
            return None
        signature = call_signature(q, k, v, plan, dropout)
        key = q.device, signature
        if key not in self._choices:
            if not _can_measure(q):
                return None
            with self._lock:
                if key not in self._choices:
                    self._choices[key] = self._agree_on_backend(signature, _Call(q, k, v, plan, dropout))
        return self._choices[key]

    def drop_candidate(
        self, name: str, error: Exception, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float
    ) -> None:
        """Use the fallback for calls of this signature from now on, because the candidate raised an error.

        Args:
            name: name of the candidate.
            error: error that it raised.
            q: (B, H, n, D) of the call in which it did.
            k: (B, H, m, D), likewise.
            v: (B, H, m, D), likewise.
            plan: plan of that call.
            dropout: dropout probability of that call.
        """
        signature = call_signature(q, k, v, plan, dropout)
        self._choices[q.device, signature] = self.fallback
        _warn_dropped(name, signature, _error_reason(error))

    def _agree_on_backend(self, signature: CallSignature, call: _Call) -> str | None:
        """Return the choice from the cache, of another rank or by measurement; never raises."""
        try:
            machine = self.machine(call.q.device)
            key = f"{autotune_cache.machine_name(machine)}/{signature}"
            decide = partial(self._load_or_benchmark, machine, signature, call)
            # the deciding rank computes the reference, and checks and times each candidate
            seconds = (2 * len(self.candidates) + 1) * self.timeout
            choice = agree_on_backend(key, decide, seconds, self.store())
        except Exception as error:
            logger.warning("attention backend: nothing could be measured for %s: %s", signature, _error_reason(error))
            return None
        # the deciding process may have other candidates than this one
        return choice if choice in self.candidates or choice == "reference" else None

    def _load_or_benchmark(self, machine: dict[str, str], signature: CallSignature, call: _Call) -> str | None:
        """Return the choice cached on this machine, or benchmark the candidates and cache the choice."""
        cached = autotune_cache.load_choice(machine, str(signature))
        if cached is not None and cached.backend in self.candidates:
            ratios = _format_ratios(cached, "remembered")
            logger.info("attention backend: %s for %s%s", cached.backend, signature, ratios)
            return cached.backend
        devices = [call.q.device] if call.q.is_cuda else []
        with torch.random.fork_rng(devices):
            choice, cacheable = self._benchmark_candidates(signature, call)
        if choice is None:
            return None
        logger.info("attention backend: %s for %s%s", choice.backend, signature, _format_ratios(choice, "measured"))
        if cacheable:
            autotune_cache.save_choice(machine, str(signature), choice)
        return choice.backend

    def _benchmark_candidates(self, signature: CallSignature, call: _Call) -> tuple[BackendChoice | None, bool]:
        """Return the choice, None if all candidates refuse the call, and whether other processes may use it."""
        failures = _Failures(transient=bool(self._timed_out))
        verified = self._verify_candidates(signature, call, failures)
        if len(verified) > 1 and not signature.deterministic:
            times = self._time_candidates(verified, signature, call, failures)
            fastest_first = sorted(times, key=lambda name: times[name])
            ratios = {name: round(times[name] / max(times[fastest_first[0]], 1e-9), 3) for name in fastest_first}
        else:
            ratios = dict.fromkeys(verified[:1], 1.0)
        if not ratios:
            return self._choose_reference(failures, call.plan), False
        return BackendChoice(next(iter(ratios)), ratios, failures.reasons), not failures.transient

    def _verify_candidates(self, signature: CallSignature, call: _Call, failures: _Failures) -> list[str]:
        """Return the candidates that agree with the reference on a small sample of the call."""

        def compute_expected() -> tuple[autotune_inputs.RecordedCall, list[Tensor]]:
            sample = autotune_inputs.sample_call(*call)
            return sample, _run_with_seed(sample.in_float64(), reference)

        device = call.q.device
        sample, expected = self._with_timeout(compute_expected, device, signature.training)
        verified = []
        for name, attend in self.candidates.items():
            check = partial(_verify, sample, attend, expected, signature)
            if name not in self._timed_out and self._attempt(name, check, device, signature, failures):
                verified.append(name)
        return verified

    def _time_candidates(
        self, names: Sequence[str], signature: CallSignature, call: _Call, failures: _Failures
    ) -> dict[str, float]:
        """Return the seconds that candidates take for the whole call; those that fail are left out."""
        copy, device = autotune_inputs.copy_call(*call), call.q.device
        times: dict[str, float] = {}
        for name in names:
            measure = partial(self.timer, partial(copy.run, self.candidates[name]), device)
            seconds = self._attempt(name, measure, device, signature, failures)
            if seconds is not None:
                times[name] = seconds
        return times

    def _choose_reference(self, failures: _Failures, plan: AttentionPlan) -> BackendChoice | None:
        """Return the reference if the fallback failed; None if it refused the call, so that users see its error."""
        is_wrong = self.fallback in failures.reasons and not plan.prune
        return BackendChoice("reference", {}, failures.reasons) if is_wrong else None

    def _attempt(
        self, name: str, work: Callable[[], Result], device: torch.device, signature: CallSignature, failures: _Failures
    ) -> Result | None:
        """Return the result of ``work``, or None if the candidate fails, which is recorded, or refuses the call."""
        try:
            return self._with_timeout(work, device, signature.training)
        except UserError:  # unsupported call: skip without a warning
            return None
        except Exception as error:
            failures.reasons[name] = _error_reason(error)
            failures.transient |= isinstance(error, (torch.OutOfMemoryError, CandidateTimeout))
            if isinstance(error, CandidateTimeout):
                self._timed_out.add(name)
        # outside of the handler: the error's frames, and the tensors that they hold, are released here
        _warn_dropped(name, signature, failures.reasons[name])
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _with_timeout(self, work: Callable[[], Result], device: torch.device, training: bool) -> Result:
        """Run ``work`` in a thread of its own; raises what it raises, or CandidateTimeout."""
        results: list[Result] = []
        errors: list[Exception] = []

        def target() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                with torch.set_grad_enabled(training):
                    results.append(work())
            except Exception as error:
                # frames hold tensors, and the error may be for lack of memory
                errors.append(error.with_traceback(None))

        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the thread's stream need not be the caller's
        thread = threading.Thread(target=target, name="attention autotuning", daemon=True)
        thread.start()
        thread.join(self.timeout)
        if thread.is_alive():
            raise CandidateTimeout(f"is not done after {self.timeout:g} s")
        if errors:
            raise errors[0]
        return results[0]


def _verify(
    call: autotune_inputs.RecordedCall, attend: Attend, expected: Sequence[Tensor], signature: CallSignature
) -> bool:
    """Return True, or raise ArithmeticError if the candidate is wrong."""
    inputs = call.q, call.k, call.v
    before = [x.detach().clone() for x in inputs]
    actual = _run_with_seed(call, attend)
    tolerance = autotune_inputs.TOLERANCE[torch.bfloat16 if signature.rounded else call.q.dtype]
    if not all(torch.equal(x, y) for x, y in zip(before, inputs, strict=True)):
        for x, y in zip(inputs, before, strict=True):
            x.data.copy_(y)  # restored for the next candidates
        raise ArithmeticError("writes into its inputs")
    worst = autotune_inputs.deviation(actual, list(expected), tolerance, call.plan, call.v)
    if not worst <= 1:
        too_far = f"deviates from the reference by {worst:.3g} times the tolerance"
        raise ArithmeticError("gives NaN" if math.isnan(worst) else too_far)
    return True


def _run_with_seed(call: autotune_inputs.RecordedCall, attend: Attend) -> list[Tensor]:
    """Run a call with a fixed seed of the dropout mask, which all backends draw alike."""
    torch.default_generator.manual_seed(SEED)
    return call.run(attend)


def _can_measure(q: Tensor) -> bool:
    """Return whether measuring is possible now: an ordinary tensor, no capture of a graph and no backward pass."""
    if type(q) not in (Tensor, torch.nn.Parameter) or torch._C._functorch.maybe_current_level() is not None:
        return False
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    # in a backward pass the device's autograd thread waits for us, and a backward pass of ours would wait for it
    return bool(torch._C._current_graph_task_id() == -1)


def _error_reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "runs out of memory"
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, (ArithmeticError, CandidateTimeout)) else f"{type(error).__name__}: {text}"


def _warn_dropped(name: str, signature: CallSignature, reason: str) -> None:
    logger.warning("attention backend '%s' is not used for %s: %s", name, signature, reason)


def _format_ratios(choice: BackendChoice, source: str) -> str:
    """Format the times as multiples of the least."""
    times = ", ".join(f"{name} {ratio:.2f}" for name, ratio in choice.ratios.items())
    return f" ({source}: {times})" if len(choice.ratios) > 1 else f" ({source})"

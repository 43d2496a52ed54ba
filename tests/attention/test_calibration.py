"""``auto`` with stand-ins in place of a GPU's backends: what is checked, timed, dropped, remembered and agreed upon."""

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, make_model

from fairseq_rpe.attention import (
    BACKENDS,
    AttentionPlan,
    autotune,
    autotune_cache,
    autotune_inputs,
    backends,
    reference,
    sdpa,
)
from fairseq_rpe.attention.autotune import Autotuner, agree_on_backend, call_signature, rank_store
from fairseq_rpe.core import DenseBias, Positions, ToeplitzBias, UserError
from fairseq_rpe.encodings import build

H, D, N = 2, 8, 33
ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"device": "Stand-in 3000", "torch": "1"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv(autotune_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Wrong(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def stand_in(name, before=lambda *inputs: inputs, after=lambda out: out):
    """sdpa with inputs or an output that are not what they should be."""

    def attend(q, k, v, plan, dropout=0.0):
        return after(sdpa(*before(q, k, v, plan), dropout))

    attend.__name__ = name
    return attend


def failing(name, error, only_from=0):
    """sdpa but for calls of so many queries."""

    def fail(q, k, v, plan):
        if q.shape[2] >= only_from:
            raise error
        return q, k, v, plan

    return stand_in(name, fail)


def with_table(plan, change):
    form = replace(plan.bias, table=change(plan.bias.table))
    return AttentionPlan(plan.positions, form, plan.padding)


def zero_keys(q, k, v, plan, dropout=0.0):
    out = sdpa(q, k, v, plan, dropout)
    k.data.zero_()
    return out


def hangs(q, k, v, plan, dropout=0.0):
    threading.Event().wait(20)


good = stand_in("good")
nan = stand_in("nan", after=lambda out: out * float("nan"))
raises = failing("raises", RuntimeError("no such instruction\non this chip"))
refuses = failing("refuses", UserError("this stand-in takes nothing: use 'sdpa'"))
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
NO_GOOD = [
    (stand_in("output", after=lambda out: 1.01 * out), "deviates from the reference by"),
    (stand_in("table", lambda q, k, v, plan: (q, k, v, with_table(plan, Wrong.apply))), "deviates from the reference"),
    (stand_in("keys", lambda q, k, v, plan: (q, Wrong.apply(k), v, plan)), "deviates from the reference by"),
    (nan, "gives NaN"),
    (raises, "RuntimeError: no such instruction on this chip"),
    (failing("memory", NO_MEMORY), "runs out of memory"),
    (failing("only small", NO_MEMORY, only_from=N), "runs out of memory"),
    (zero_keys, "writes into its inputs"),
]


def clock(**seconds):
    """Times by name of the function, carried out once; 1 for others."""

    def measured(work, device):
        work()
        return seconds.get(getattr(work.args[0], "__name__", ""), 1.0)

    return measured


def calibrator(fast=good, *, others=None, timer=None, **settings):
    candidates = {"fast": fast, **(others or {}), "sdpa": sdpa}
    settings = {"machine": lambda device: MACHINE, "store": lambda: None, "timeout": 30.0, **settings}
    fallback = clock(**{fast.__name__: 0.5}) if timer is None else timer
    return Autotuner(candidates, applies=lambda q: True, timer=fallback, **settings)


def call(spec="kerple_log", n=N, m=None, *, padded=False, dtype=torch.float32, grads=True, form=None):
    """q, k, v and a plan, with gradients on all that can have one."""
    generator = torch.Generator().manual_seed(0)
    m = m or n
    sizes = (n, m, m)
    q, k, v = (torch.randn(3, H, x, D, generator=generator).to(dtype).requires_grad_(grads) for x in sizes)
    pos, padding = Positions.arange(n, m), None
    if padded:
        padding = torch.zeros(3, m, dtype=torch.bool)
        padding[0, :4] = True
    form = build(spec, H, H * D, 64).position_bias(pos) if form is None else form
    return q, k, v, AttentionPlan(pos, form, padding)


def test_the_fastest_that_agrees_is_taken_and_named(caplog):
    caplog.set_level(logging.INFO)
    asked = calibrator(good, others={"slow": reference}, timer=clock(good=0.5, reference=4.0))
    assert asked.choose(*call()) == "fast"
    [line] = [r.message for r in caplog.records if r.name == autotune.__name__]
    assert line.startswith("attention backend: fast for float32, head width 8, bias: table, spacing: even")
    assert line.endswith("(measured: fast 1.00, sdpa 2.00, slow 8.00)") and "learned" in line and "\n" not in line
    asked.timer = None  # it is not asked again
    assert asked.choose(*call()) == "fast" and len(caplog.records) == 1
    assert calibrator(good, timer=clock(good=2.0)).choose(*call("alibi")) == "sdpa"


@pytest.mark.parametrize(("fast", "why"), NO_GOOD)
def test_one_that_is_no_good_is_dropped_with_one_warning(fast, why, caplog, cache):
    asked = calibrator(fast, timer=clock(sdpa=9.0))
    for _ in range(2):
        assert asked.choose(*call()) == "sdpa"
    [line] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith("attention backend 'fast' is not used for float32") and why in line and "\n" not in line
    # how much memory is free says nothing of the next process
    assert any(cache.glob("*.json")) == ("memory" not in why)


def test_one_that_hangs_is_left_behind_for_good(caplog, cache):
    sdpa(*call()).sum().backward()  # torch's own first call takes long
    asked = calibrator(hangs, timeout=2.0)
    assert asked.choose(*call()) == "sdpa"
    assert "'fast' is not used" in caplog.text and "is not done after 2 s" in caplog.text
    asked.timeout = 30.0
    caplog.clear()
    assert asked.choose(*call("alibi")) == "sdpa" and caplog.text == ""  # another kind: not tried again
    assert not cache.exists()  # the next process may have more luck


def test_what_refuses_is_no_candidate_and_no_warning(caplog):
    assert calibrator(refuses).choose(*call()) == "sdpa" and caplog.text == ""


def test_where_even_the_plain_one_is_wrong_the_reference_is_taken(caplog):
    settings = {"applies": lambda q: True, "machine": lambda device: MACHINE, "store": lambda: None}
    assert Autotuner({"sdpa": nan}, **settings).choose(*call()) == "reference"
    assert Autotuner({"sdpa": refuses}, **settings).choose(*call()) is None  # and refuses when it is called


@pytest.mark.parametrize("spec", ["nope", "window:window=5", "t5_bias", "fire", "fire:exact=true"])
@pytest.mark.parametrize("padded", [False, True])
def test_right_ones_agree_whatever_the_form(spec, padded, caplog):
    for n, m in ((64, 64), (1, 40), (7, 40)):
        for dtype in (torch.float32, torch.bfloat16):
            assert calibrator(good).choose(*call(spec, n, m, padded=padded, dtype=dtype)) == "fast"
    with torch.inference_mode():
        assert calibrator(good).choose(*call(spec, padded=padded, grads=False)) == "fast"
    dense = DenseBias(torch.randn(3, H, N, N, requires_grad=True))
    assert calibrator(good).choose(*call(form=dense, padded=padded)) == "fast"
    assert calibrator(good).choose(*call(spec, padded=padded), 0.3) == "fast"
    assert caplog.text == ""


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for machines without a GPU")
def test_the_kernels_themselves_pass_the_check(monkeypatch, caplog):
    """In Triton's interpreter; flex gives no gradients on a CPU and refuses."""
    pytest.importorskip("triton", reason="needs the package triton")
    monkeypatch.setattr(sys.modules[__name__], "D", 32)
    asked = Autotuner(
        {name: BACKENDS[name] for name in ("triton", "sdpa", "flex")},
        applies=lambda q: True,
        timer=lambda work, device: 1.0,
        machine=lambda device: MACHINE,
        store=lambda: None,
    )
    assert asked.choose(*call("fire", n=11, padded=True)) == "triton" and caplog.text == ""
    [kept] = [autotune_cache.load_choice(MACHINE, str(kind)) for _, kind in asked._choices]
    assert kept.ratios == {"triton": 1.0, "sdpa": 1.0} and kept.dropped == {}


def test_pruning_may_be_off_by_its_bound_alone(caplog, monkeypatch):
    monkeypatch.setattr(autotune_inputs, "PRUNED_SIZE", 701)

    def near(table):
        return table.index_fill(1, torch.arange(128, table.shape[1]), float("-inf"))

    too_near = stand_in("too near", lambda q, k, v, plan: (q, k, v, with_table(plan, near)))
    q, k, v, plan = call(form=ToeplitzBias(-0.001 * torch.arange(720.0).expand(H, -1)), n=720, grads=False)
    plan = AttentionPlan(plan.positions, plan.bias, prune=1e-3)
    assert calibrator(good).choose(q, k, v, plan) == "fast" and caplog.text == ""
    assert calibrator(too_near, machine=lambda device: {}).choose(q, k, v, plan) == "sdpa"
    assert "deviates" in caplog.text


def test_kinds_are_told_apart(monkeypatch):
    def kind(*args, **kwargs):
        return call_signature(*call(*args, **kwargs))

    base = kind()
    assert base == kind(n=N + 1) and base.keys == 128 and kind(n=129).keys == 512
    others = [
        *(kind("alibi"), kind("nope"), kind("fire"), kind("fire:exact=true"), kind(padded=True), kind(n=1, m=N)),
        *(kind(n=2, m=N), kind(n=300), kind(dtype=torch.bfloat16), call_signature(*call(), 0.1)),
    ]
    with torch.no_grad():
        others.append(kind())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    others.append(kind())
    assert len({base, *others}) == len({str(one) for one in (base, *others)}) == 1 + len(others)


def test_a_choice_is_remembered_by_machine(caplog, cache, monkeypatch):
    caplog.set_level(logging.INFO)
    assert calibrator(good).choose(*call()) == "fast"
    [path] = cache.glob("*.json")
    assert path.name.startswith("attention-Stand-in-3000-") and json.loads(path.read_text())["machine"] == MACHINE
    again = calibrator(raises)  # would be dropped, were it tried
    assert again.choose(*call()) == "fast" and "(remembered: fast 1.00, sdpa 2.00)" in caplog.text
    newer = calibrator(raises, machine=lambda device: {**MACHINE, "torch": "2"})
    assert newer.choose(*call()) == "sdpa"
    assert len(list(cache.glob("*.json"))) == 2
    monkeypatch.setenv(autotune_cache.CACHE_VARIABLE, "off")
    assert calibrator(raises).choose(*call()) == "sdpa"
    monkeypatch.delenv(autotune_cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "xdg"))
    assert autotune_cache.cache_folder() == cache / "xdg/fairseq_rpe"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(cache))
    assert autotune_cache.cache_folder() == cache / ".cache/fairseq_rpe"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"machine": 3, "choices": {}}', '{"machine": {"device": "x"}, "choices": {"a": {"backend": 1}}}'],
)
def test_a_damaged_file_is_measured_again(text, cache):
    assert calibrator(good).choose(*call()) == "fast"
    [path] = cache.glob("*.json")
    path.write_text(text)
    assert calibrator(raises).choose(*call()) == "sdpa"
    assert {one["backend"] for one in json.loads(path.read_text())["choices"].values()} == {"sdpa"}
    known = json.loads(path.read_text())
    known["choices"] = {key: {"backend": "of another version"} for key in known["choices"]}
    path.write_text(json.dumps(known))
    assert calibrator(good).choose(*call()) == "fast"


def test_a_folder_that_cannot_be_written_does_not_matter(cache):
    cache.write_text("a file")
    assert calibrator(good).choose(*call()) == "fast"


def test_deterministic_mode_takes_the_first_that_agrees_without_a_clock(monkeypatch):
    def never(work, device):
        raise AssertionError("timed")

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # to set it imports much
    assert calibrator(good, timer=never).choose(*call()) == "fast"
    assert calibrator(nan, others={"second": good}, timer=never).choose(*call("alibi")) == "second"


def test_it_leaves_no_trace():
    """Generators, gradients, the caller's graph and its hooks for saved tensors are as they were."""
    q, k, v, plan = call("kerple_log")
    encoding = build("kerple_log", H, H * D)
    plan = AttentionPlan(plan.positions, encoding.position_bias(plan.positions))
    packed = []
    before = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        assert calibrator(good, timer=autotune.median_seconds).choose(q, k, v, plan, 0.2) in ("fast", "sdpa")
    assert packed == [] and torch.equal(torch.get_rng_state(), before)
    assert all(x.grad is None for x in (q, k, v, *encoding.parameters()))
    reference(q, k, v, plan).sum().backward()  # the graph of the table is whole
    assert all(x.grad is not None for x in (q, k, v, *encoding.parameters()))


def test_nothing_is_measured_in_a_backward_pass_or_while_compiling(monkeypatch):
    asked, seen = calibrator(good), []
    q, k, v, plan = call()
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    @torch.enable_grad()
    def ask(grad):
        seen.append(asked.choose(q, k, v, plan))

    y.register_hook(ask)
    y.backward()
    assert seen == [None] and asked.choose(q, k, v, plan) == "fast"
    z = x * 2
    z.register_hook(ask)
    z.backward()
    assert seen == [None, "fast"]  # what is known is used
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert asked.choose(q, k, v, plan) is None


def test_auto_measures_nothing_on_a_cpu(monkeypatch):
    monkeypatch.setattr(backends.autotuner, "_agree_on_backend", lambda *args: pytest.fail("measured"))
    given = call("alibi")
    torch.testing.assert_close(backends.auto(*given), sdpa(*given))


@pytest.mark.parametrize("rpe", ["alibi", "fire"])
def test_a_model_gives_the_same_loss_and_gradients(rpe, task, monkeypatch):
    """With stand-ins in place of a GPU's backends: chosen, dropped, and one that fails later, in a real call."""
    used = []

    def fails_later(q, k, v, plan, dropout=0.0):
        if threading.current_thread() is threading.main_thread():
            used.append("failed")
            raise RuntimeError("only when it matters")
        return sdpa(q, k, v, plan, dropout)

    def counted(q, k, v, plan, dropout=0.0):
        used.append("fast")
        return sdpa(q, k, v, plan, dropout)

    tokens = torch.randint(4, 60, (2, 21), generator=torch.Generator().manual_seed(0))
    tokens[0, :5] = 1

    def losses(backend):
        model = make_model(task, rpe, attention_backend=backend).train()
        loss = model(tokens)[0].float().log_softmax(-1).gather(2, tokens[..., None])[tokens.ne(1)].mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = losses("reference")
    for fast, wanted in ((counted, {"fast"}), (nan, set()), (fails_later, {"failed"})):
        used.clear()
        made = calibrator(fast, machine=lambda device, name=fast.__name__: {"device": name})
        monkeypatch.setattr(backends, "autotuner", made)
        monkeypatch.setitem(BACKENDS, "fast", BACKENDS["sdpa"].__class__(fast))
        for a, b in zip(expected, losses("auto"), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert set(used) == wanted
        assert used.count("failed") <= 1  # per kind


def test_ranks_agree_through_a_store():
    """The first decides; another one that would have chosen otherwise waits for it."""
    store, found = torch.distributed.HashStore(), {}
    clocks = {"a": clock(good=0.5), "b": clock(good=2.0)}

    def rank(name):
        os_free = {"machine": lambda device: MACHINE, "store": lambda: store, "timer": clocks[name]}
        found[name] = calibrator(good, **os_free).choose(*call())

    threads = [threading.Thread(target=rank, args=(name,)) for name in clocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["a"] == found["b"]
    assert calibrator(good, store=lambda: store, timer=clocks["b"]).choose(*call()) == found["a"]
    # one that decides nothing, and one whose decider is gone
    assert (
        agree_on_backend("nothing", lambda: None, 1.0, store)
        is agree_on_backend("nothing", lambda: "fast", 1.0, store)
        is None
    )
    with pytest.raises(KeyError):
        agree_on_backend("fails", lambda: {}["x"], 1.0, store)
    assert agree_on_backend("fails", lambda: "fast", 1.0, store) is None
    store.add("fairseq_rpe/attention/gone/asked", 1)
    assert agree_on_backend("gone", lambda: "fast", 0.05, store) is None


PROCESS = """
import sys, torch
sys.path.insert(0, "tests/attention")
rank, place = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
from test_calibration import call, calibrator, clock, good
from fairseq_rpe.attention.autotune import rank_store
settings = {"store": rank_store, "timer": clock(good=(0.5, 2.0)[rank])}
made = calibrator(good, **settings)
both = made.choose(*call(grads=False))
alone = calibrator(good, **{**settings, "store": lambda: None})
alone.choose(*call(("alibi", "nope")[rank]))  # other kinds on each rank, into one file
if rank:
    made.choose(*call("t5_bias", padded=True))  # which the other rank never meets
print(both)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_ranks_meet_in_the_store_of_their_training(monkeypatch):
    store, ranks = torch.distributed.HashStore(), 2
    assert rank_store() is None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    assert rank_store() is store
    ranks = 1
    assert rank_store() is None


@pytest.mark.release
def test_two_processes_agree_and_write_one_file(tmp_path, cache):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
    commands = ([sys.executable, "-c", PROCESS, str(rank), tmp_path / "meet"] for rank in range(2))
    started = [subprocess.Popen(command, **options) for command in commands]
    printed = [process.communicate(timeout=120)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert printed[0] == printed[1] and printed[0][0] in ("fast", "sdpa")
    [path] = cache.glob("*.json")
    assert len(json.loads(path.read_text())["choices"]) == 4


def test_what_cannot_be_measured_is_said_once_and_the_plain_backend_taken(caplog):
    def machine(device):
        raise OSError("no such device")

    asked = calibrator(machine=machine)
    assert [asked.choose(*call()) for _ in range(2)] == [None, None]
    [line] = [r.message for r in caplog.records if r.name == autotune.__name__]
    assert "nothing could be measured for " in line and "no such device" in line

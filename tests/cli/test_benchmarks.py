"""benchmarks/attention_biases.py at tiny lengths: it times correct results, reports what it leaves out, and resumes."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.release
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    torch.set_num_threads(1)


@pytest.fixture
def biases(load, monkeypatch):
    """attention_biases.py, with no processes for the memory and no compiler."""
    module = load("attention_biases")
    monkeypatch.setattr(module, "measure_peaks", lambda case, threads: (2.0, 1.0))
    monkeypatch.setenv("CXX", "no-such-compiler")
    return module


def read(path):
    head, *lines = path.read_text().splitlines()
    return head, list(csv.DictReader(lines))


def flags(folder, bias, *lengths):
    files = ["--csv", str(folder / "biases.csv"), "--figure", str(folder / "biases.png")]
    return [*files, "--threads", "1", "--biases", bias, "--lengths", *lengths]


def call(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["attention_biases.py", *arguments])
    return module.main()


def test_the_script_measures_and_goes_on_where_it_was_killed(tmp_path):
    def run(*more):
        command = [sys.executable, str(FOLDER / "attention_biases.py"), *flags(tmp_path, "Pair", "96"), *more]
        environment = {**os.environ, "CXX": "no-such-compiler", "PYTHONPATH": str(FOLDER.parent)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    first = run()
    assert first.returncode == 0, first.stderr
    assert "left out, Pair, FlexAttention, forward: FlexAttention compiles C++ on the CPU" in first.stderr
    path = tmp_path / "biases.csv"
    head, rows = read(path)
    assert "1 threads, 8 heads of 64, fp32, biases Pair, backends sdpa, limit 60 s, load" in head
    assert f"torch {torch.__version__}" in head
    assert {(r["bias"], r["implementation"]) for r in rows} == {
        ("none", "torch, causal"),
        ("Pair", "sdpa"),
        ("Pair", "dense bias"),
    }
    assert list(dict.fromkeys((r["length"], r["pass"]) for r in rows)) == [
        ("96", "forward"),
        ("96", "forward+backward"),
    ]
    for row in rows:
        baseline = next(r for r in rows if (r["length"], r["pass"]) == (row["length"], row["pass"]))
        assert baseline["bias"] == "none" and float(baseline["ratio"]) == 1 == float(baseline["peak_ratio"])
        assert float(row["ms"]) > 0 and int(row["runs"]) >= 1
        assert float(row["ratio"]) == pytest.approx(float(row["ms"]) / float(baseline["ms"]), rel=0.1)
        inputs = 4 * 4 * 512 * int(row["length"]) / 2**20  # q, k, v, and the gradient of the output
        assert float(row["peak_mib"]) > 0.8 * inputs and float(row["setup_mib"]) > 0
    assert (tmp_path / "biases.png").read_bytes().startswith(b"\x89PNG")

    lines = path.read_text().splitlines()
    kept = [line for line in lines if not line.startswith("96,forward+backward")]
    path.write_text("\n".join(kept) + "\n")
    second = run()
    assert second.returncode == 0 and second.stdout.count("done;") == 1, second.stderr
    again = path.read_text().splitlines()
    assert again[: len(kept)] == kept and len(again) == len(lines)
    other = run("--dtype", "bf16")
    assert other.returncode == 2 and "--fresh starts over" in other.stderr and len(other.stderr.splitlines()) == 1


@pytest.mark.parametrize("backward", [False, True])
def test_every_implementation_agrees_with_the_reference(biases, backward, monkeypatch):
    checked = set()
    monkeypatch.delenv("CXX")
    for bias, name in biases.implementations.list_pairs(["sdpa", "flex"]):
        case = biases.Case(bias, name, 64, backward, "cpu", torch.float32)
        if name == "FlexAttention" and bias != "Pair":
            continue  # seconds each to compile; the benchmark checks all
        reason = biases.wrong_or_refused(case)
        assert reason is None or not reason.startswith(("WRONG", "FAILED")), (bias, name, reason)
        if reason is None:
            checked.add((bias, name))
    added = [bias for bias in biases.BIASES if bias != "none"]
    assert {(bias, name) for bias in added for name in ("sdpa", "dense bias")} <= checked
    assert backward or ("none", "flex") in checked


def test_a_wrong_implementation_is_not_timed(biases, tmp_path, monkeypatch, capsys):
    def unbiased(x):
        return lambda: torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)

    def fails(x):
        raise TypeError("another version")

    for name, make_step in {"dense bias": unbiased, "x-transformers": fails}.items():
        implementation = biases.implementations.Implementation(make_step, ("fixed Toeplitz",))
        monkeypatch.setitem(biases.implementations.IMPLEMENTATIONS, name, implementation)
    assert call(biases, monkeypatch, *flags(tmp_path, "fixed Toeplitz", "64")) == 1
    said = capsys.readouterr().err
    assert "left out, fixed Toeplitz, dense bias, forward: WRONG: " in said
    assert "left out, fixed Toeplitz, x-transformers, forward: FAILED: TypeError: another version" in said
    assert "left out, fixed Toeplitz, flash-attn, forward: flash-attn runs on a GPU" in said
    assert {r["implementation"] for r in read(tmp_path / "biases.csv")[1]} == {"torch, causal", "sdpa"}


def test_what_would_take_too_long_or_too_much_is_left_out(biases, tmp_path, monkeypatch, capsys):
    assert call(biases, monkeypatch, *flags(tmp_path, "Pair", "64")) == 0
    path = tmp_path / "biases.csv"
    lines = path.read_text().splitlines()
    columns = lines[1].split(",")
    for at, cells in enumerate(csv.reader(lines)):
        if cells[1:3] == ["forward", "Pair"]:
            name, value = {"sdpa": ("ms", "40000"), "dense bias": ("setup_mib", "1e12")}[cells[4]]
            cells[columns.index(name)] = value
            lines[at] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert call(biases, monkeypatch, *flags(tmp_path, "Pair", "128")) == 0
    said = capsys.readouterr().err
    assert "left out, Pair, sdpa, forward, 128 tokens: a run would take about 160 s" in said
    assert "left out, Pair, dense bias, forward, 128 tokens: it would need about" in said
    got = {(r["bias"], r["implementation"]) for r in read(path)[1] if r["length"] == "128" and r["pass"] == "forward"}
    assert got == {("none", "torch, causal")}


def test_what_does_not_fit_into_memory_is_left_out(biases, tmp_path, monkeypatch, capsys):
    def full(case, threads):
        if case.implementation == "sdpa":
            raise biases.BrokenProcessPool("killed")
        if case.implementation == "dense bias":
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 byte")
        return 2.0, 1.0

    monkeypatch.setattr(biases, "measure_peaks", full)
    assert call(biases, monkeypatch, *flags(tmp_path, "Pair", "64")) == 0
    said = capsys.readouterr().err
    assert "left out, Pair, sdpa, forward, 64 tokens: its process was killed" in said
    assert "left out, Pair, dense bias, forward+backward, 64 tokens: not enough memory" in said
    assert {r["implementation"] for r in read(tmp_path / "biases.csv")[1]} == {"torch, causal"}


def test_the_table_has_what_the_csv_has(biases, tmp_path, monkeypatch, capsys):
    path = tmp_path / "biases.csv"
    path.write_text(
        "# a machine, load 0.1\nlength,pass,bias,encoding,implementation,ms,ratio,peak_mib,peak_ratio,setup_mib,runs\n"
        '512,forward,none,nope,"torch, causal",4.00,1.000,5.0,1.000,4.0,7\n'
        "512,forward,Pair,kerple_log at warped positions,sdpa,9.00,2.250,15.0,3.000,4.0,7\n"
        '1024,forward,none,nope,"torch, causal",16.00,1.000,10.0,1.000,8.0,7\n'
    )
    assert call(biases, monkeypatch, "--table", "--csv", str(path), "--figure", str(tmp_path / "f.png")) == 0
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert ["none", "torch, causal, milliseconds", "4.00", "16.00"] in cells
    for ratio in ("2.25", "3.00"):
        assert ["Pair, kerple_log at warped positions", "here: sdpa", ratio, ""] in cells
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert call(biases, monkeypatch, "--table", "--csv", str(tmp_path / "none.csv")) == 2
    assert "run benchmarks/attention_biases.py first" in capsys.readouterr().err


def test_short_runs_are_timed_more_often(biases):
    assert [biases.run_count(seconds) for seconds in (0.4, 0.5, 9.9, 10.0, 29.0, 30.0)] == [7, 3, 3, 2, 2, 1]


def test_decoding_is_timed_beside_what_it_is_compared_with(load, tmp_path, monkeypatch):
    """Every side goes on from its prompt as a pass over the whole text would, and rows are written as asked."""
    module, path = load("decode"), tmp_path / "decode.csv"
    small = "--keys 20 --rpe rope fire --repeats 2 --layers 2 --threads 1 --models rope --others fairseq".split()
    small += "--prompt 9 --tokens 6 --turn 3".split()
    sides, begun = [], module.Fairseq.__init__

    def watched(self, *given):
        begun(self, *given)
        sides.append(self)

    monkeypatch.setattr(module.Fairseq, "__init__", watched)
    call(module, monkeypatch, *small, "--csv", str(path))
    for side in sides:
        assert side.rows.shape == (1, 15)
        with torch.no_grad():
            best = side.decoder(side.rows)[0].argmax(-1)
        assert torch.equal(best[:, 8:14], side.rows[:, 9:])
    head, rows = read(path)
    assert "2 layers of 8 heads of 64, float32" in head
    assert [(r["part"], r["tokens"], r["what"]) for r in rows] == [
        *(("attention", "20", name) for name in ("rope", "fire")),
        *(("generate", "9+6", name) for name in ("here, rope", "fairseq, sinusoidal")),
    ]
    assert all(float(r["ms"]) > 0 for r in rows)


def test_whole_models_are_multiples_of_the_first(load):
    measured = [("nope", "inference", [1.0, 3.0], 7.0), ("nope", "training", [8.0], 20.0)]
    measured += [
        ("fire", "inference", [4.0], 5.0),
        ("fire", "inference", [6.0], 9.0),
        ("fire", "training", [4.0], 30.0),
    ]
    found = [dict(zip(("encoding", "kind", "seconds", "MiB"), one, strict=True)) for one in measured]
    nope, fire = load("model").rows(found, "nope", tokens=100)
    assert (nope["inference_time"], nope["inference_tokens_per_s"], nope["training_time"]) == (1.0, 50, 1.0)
    assert (fire["inference_time"], fire["inference_MiB"], fire["training_time"]) == (2.5, 9, 0.5)

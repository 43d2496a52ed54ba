"""``selftest`` and scripts/gpu_report.sh: what is right, wrong and refused, in a table, a file and an exit code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import error_of, run, run_here

from fairseq_rpe import encodings
from fairseq_rpe.analysis import selftest
from fairseq_rpe.attention import BACKENDS, Backend, sdpa
from fairseq_rpe.core import UserError

ROOT = Path(__file__).resolve().parents[2]
SPECS = (*encodings.names(), *selftest.OPTION_SPECS)
SCRIPT = ROOT / "scripts/gpu_report.sh"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(selftest, "problem_size", lambda device, backend: selftest.Size(19, 16))


def run_selftest(*words, ok=True):
    return run_here("selftest", "--device", "cpu", "--dtype", "fp32", *words, ok=ok)


@pytest.mark.parametrize(
    "specs",
    [
        # without and with a bias, a rotation, scores of the tokens, a curve, no key heads in common
        ("nope", "alibi", "rope", "deberta", "fire", "floater", *selftest.OPTION_SPECS),
        pytest.param(SPECS, marks=pytest.mark.release),
    ],
    ids=["some", "all"],
)
def test_encodings_are_right_and_told(specs, tmp_path):
    """Other tests compare the backend itself on all encodings: tests/attention/test_sdpa.py."""
    asked = ("--encodings", " ".join(specs)) if len(specs) < len(SPECS) else ()
    done = run_selftest("--backends", "sdpa", *asked, "--out", tmp_path)
    told = json.loads((tmp_path / "selftest.json").read_text())
    cells = told["cells"]
    assert told["complete"] and told["machine"]["torch"] == torch.__version__
    assert told["fairseq_rpe"] and "commit" in told and {one["encoding"] for one in cells} == set(specs)
    assert [cell["case"] for cell in cells[:6]] == list(selftest.CASES)
    states = {cell["case"]: {c["state"] for c in cells if c["case"] == cell["case"]} for cell in cells}
    partly = {case: {"passed", "does not apply"} for case in ("warped", "grouped")}
    assert states == {case: {"passed"} for case in selftest.CASES} | partly
    assert all(cell["error"] <= 1 and cell["seconds"] > 0 for cell in cells if cell["state"] == "passed")
    head, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert head.split("|")[1].strip() == "sdpa, fp32" and len(rows) == 1 + len(specs)
    [nope] = [row for row in rows if row.startswith("| nope ")]
    assert nope.count(" ms") == 5 and "–" in nope  # it reads no positions
    assert re.search(r"\d+ passed, 0 failed, 0 refused; largest error passed: 0\.\d+", done.stdout)


def failing(how: str) -> Backend:
    def attend(q, k, v, plan, dropout=0.0):
        if how == "refuses" or (how == "refuses training" and q.requires_grad):
            raise UserError("this stand-in takes nothing: use 'sdpa'")
        if how == "raises":
            raise RuntimeError("no such\ninstruction")
        return sdpa(q, k, v, plan, dropout) * {"nan": float("nan"), "wrong": 1.001}.get(how, 1.0)

    return Backend(attend)


def test_what_is_refused_is_no_failure(monkeypatch):
    monkeypatch.setitem(BACKENDS, "stand-in", failing("refuses training"))
    done = run_selftest("--backends", "stand-in", "--encodings", "alibi")
    assert re.search(r"\| alibi .*\| +refused \|", done.stdout)
    assert "refused: stand-in: this stand-in takes nothing" in done.stdout
    assert "5 passed, 0 failed, 1 refused" in done.stdout


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("wrong", "failed: stand-in: deviates from the reference (everything)"),
        ("nan", "failed: stand-in: not a number (everything)"),
        ("raises", "failed: stand-in: RuntimeError: no such instruction (everything)"),
        ("refuses", "refused: stand-in: this stand-in takes nothing: use 'sdpa' (everything)"),
    ],
)
def test_one_wrong_backend_is_named_and_the_exit_code_tells(how, said, monkeypatch, tmp_path):
    monkeypatch.setitem(BACKENDS, "stand-in", failing(how))
    done = run_selftest("--backends", "stand-in", "--encodings", "alibi", "--out", tmp_path, ok=False)
    assert said in done.stdout.splitlines()
    bad = how != "refuses"
    assert done.returncode == int(bad) and ("error: some backends" in done.stderr) == bad
    assert f"0 passed, {6 * bad} failed, {6 * (not bad)} refused" in done.stdout
    json.loads((tmp_path / "selftest.json").read_text(), parse_constant=pytest.fail)  # no NaN


def test_a_wrong_gradient_fails(monkeypatch):
    def attend(q, k, v, plan, dropout=0.0):
        out = sdpa(q, k, v, plan, dropout)
        return out + 1e-3 * (out - out.detach())

    monkeypatch.setitem(BACKENDS, "stand-in", Backend(attend))
    done = run_selftest("--backends", "stand-in", "--encodings", "dape", ok=False)
    assert (
        "failed: stand-in: deviates from the reference (backward, padded, warped, grouped)" in done.stdout.splitlines()
    )


def distance_from_kink(inputs: selftest._Inputs, encoding: encodings.Encoding) -> float:
    """Return the least input of dape's LeakyReLU, in float64, at pairs where the query sees the key."""
    (q, k, _), pos = inputs.qkv, inputs.positions
    scores = q @ k.mT / q.shape[3] ** 0.5
    bias = encoding.base.position_bias(pos).materialize(pos).to(scores.dtype).expand_as(scores)
    weight, offset = (x.detach().double() for x in (encoding.mix.weight, encoding.mix.bias))
    x = torch.einsum("wh,bhij->bijw", weight, torch.cat([scores, bias.detach()], 1)) + offset
    return float(x[:, torch.ones_like(x[0, :, :, 0], dtype=torch.bool).tril()].abs().min())


def test_gradients_are_compared_where_they_are_continuous(monkeypatch):
    size = selftest.Size(267, 32)
    torch.manual_seed(selftest.SEED)
    encoding = encodings.build("dape", selftest.HEADS, selftest.HEADS * size.width, 3 * size.tokens)
    drawn = selftest._draw_inputs(encoding, "backward", torch.float32, size, "cpu")
    inputs = selftest._avoid_kinks(drawn, encoding, torch.float32)
    # in float32, inputs of the LeakyReLU deviate by up to 1e-6
    assert distance_from_kink(drawn, encoding) < 1e-6 < distance_from_kink(inputs, encoding)
    changed = (drawn.qkv[0] != inputs.qkv[0]).any(3).any(1)  # (B, n)
    assert 0 < int(changed.sum()) < 0.1 * changed.numel()
    assert all(torch.equal(a, b) for a, b in zip(drawn.qkv[1:], inputs.qkv[1:], strict=True))
    assert all(torch.equal(x, x.float().double()) for x in inputs.qkv)
    monkeypatch.setattr(selftest, "problem_size", lambda device, backend: size)
    monkeypatch.setattr(selftest, "CASES", ("backward", "padded"))
    results = selftest.run_tests("cpu", "sdpa", "fp32", "dape", first=True)
    assert [x.state for x in results] == ["passed"] * 2 and max(x.error for x in results) < 0.5


def test_wrong_options_are_one_line(capsys):
    for words, said in (
        (("--dtype", "fp8"), "--dtype: unknown 'fp8'; known: fp32, bf16, fp16"),
        (("--backends", "sdap"), "--backends: unknown 'sdap'"),
        (("--encodings", "alibe"), "did you mean 'alibi'"),
    ):
        assert said in error_of(capsys, "selftest", "--device", "cpu", *words)


def report(*words, **environment):
    done = run("bash", SCRIPT, *words, ok=False, env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def python(tmp_path):
    """A stand-in for Python that notes its arguments; ``bench`` fails, ``selftest`` says what it found."""
    path = tmp_path / "python"
    path.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$*" >>"{tmp_path}/calls"\n'
        'case "$*" in *find_spec*fairseq*) exit "${NO_FAIRSEQ:-0}" ;; *find_spec*) exit 0 ;;\n'
        '*" bench "*) echo "error: no such thing" >&2; exit 2 ;;\n'
        '*selftest*) echo "12 passed, 0 failed, 3 refused"; echo "refused: flex: not here" ;;\n'
        "*) echo done ;; esac\n"
    )
    path.chmod(0o755)
    return path


def test_the_report_goes_on_after_a_failed_step(tmp_path, python):
    code, out, _ = report("--out", tmp_path / "found", PYTHON=str(python))
    summary = (tmp_path / "found/summary.txt").read_text()
    found = ("    12 passed, 0 failed, 3 refused", "    refused: flex: not here")
    assert code == 1 and re.sub(r"\d+ s\b", "N s", summary).splitlines() == [
        *("done", "tests: ok, N s", "    done", "selftest: ok, N s", *found, "flex: ok, N s", *found),
        *("bench: failed with exit code 2 after N s", "    error: no such thing", "models: ok, N s", "    done"),
    ]
    logs = {f"{name}.log" for name in ("tests", "selftest", "flex", "bench", "models")}
    assert out == summary and {path.name for path in (tmp_path / "found").iterdir()} == {"summary.txt", *logs}
    assert report("--out", tmp_path / "found", PYTHON=str(python), NO_FAIRSEQ="1")[0] == 1
    summary = (tmp_path / "found/summary.txt").read_text()
    assert "tests: skipped, they need pytest and fairseq" in summary and "models: skipped" in summary
    (tmp_path / "calls").unlink()
    assert report("--small", "--device", "cpu", "--out", tmp_path / "less", PYTHON=str(python))[0] == 1
    assert "--device cpu --encodings alibi kerple_log" in (tmp_path / "calls").read_text()


def test_the_report_says_what_it_would_do(tmp_path, python):
    code, out, _ = report("--dry-run", "--out", tmp_path / "found", PYTHON=str(python))
    limits = [int(line.split()[1]) for line in out.splitlines()]
    assert code == 0 and len(limits) == 5 and sum(limits) < 9 * 60 and not (tmp_path / "found").exists()
    for line in out.splitlines():
        assert all(Path(word).exists() for word in line.split() if word.startswith(str(ROOT)) and "runs" not in word)
    code, out, err = report("--help")
    assert code == 0 and out.startswith("usage: scripts/gpu_report.sh") and err == ""
    for words in (("--fast",), ("--device", "tpu"), ("--out", ""), ("--out",)):
        code, out, err = report(*words)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and out == ""

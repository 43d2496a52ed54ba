"""``fairseq-rpe bench``: what is timed, what is refused, what is written."""

from __future__ import annotations

import csv

import pytest
from conftest import error_of

from fairseq_rpe.analysis import speed
from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.cli.main import main
from fairseq_rpe.core import UserError
from fairseq_rpe.evaluation import model_benchmark
from fairseq_rpe.figures.timing import draw_model_timing

SMALL = ["--heads", "2", "--head-width", "32", "--repeats", "1", "--device", "cpu"]


def rows_of(folder):
    head, *table = (folder / "bench.csv").read_text().splitlines()
    rows = list(csv.DictReader(table))
    assert all(0 < float(r["least_ms"]) <= float(r["milliseconds"]) <= float(r["most_ms"]) for r in rows)
    return head, rows


def check_files(folder, said):
    assert (folder / "bench.md").read_text().strip() in said
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["bench.csv", "bench.md", "bench.pdf", "bench.png"]


def test_every_encoding_and_backend_at_every_length(tmp_path, capsys):
    names = ["--backends", "reference sdpa", "--encodings", "alibi, fire"]
    assert main(["bench", "--lengths", "17,32", *names, *SMALL, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    head, rows = rows_of(tmp_path)
    assert "2 heads of 32" in head and "medians of 1" in head
    cells = {(r["encoding"], r["backend"], r["pass"], r["length"]) for r in rows}
    expected = {(e, b) for e in ("alibi", "fire") for b in ("reference", "sdpa")} | {(speed.BASELINE, "sdpa")}
    assert cells == {(*key, kind, n) for key in expected for kind in ("forward", "training") for n in ("17", "32")}
    for row in rows:
        group = (row["pass"], row["length"], speed.BASELINE)
        [limit] = [r for r in rows if (r["pass"], r["length"], r["encoding"]) == group]
        assert float(row["ratio"]) == pytest.approx(float(row["milliseconds"]) / float(limit["milliseconds"]), rel=0.1)
    check_files(tmp_path, said)
    assert "no bias, milliseconds" in said


def test_turns_alternate():
    seen = []
    ways = {name: lambda name=name: seen.append(name) for name in ("a", "b")}
    times = speed.time_interleaved(ways, 3, "cpu")
    assert {name: len(of) for name, of in times.items()} == {"a": 3, "b": 3} and seen == ["a", "b"] * 3


def test_the_spread_stands_beside_the_median():
    limit = speed.Timing(speed.BASELINE, "sdpa", "forward", 64, milliseconds=2.0, ratio=1.0, least=1.5, most=4.0)
    alibi = speed.Timing("alibi", "sdpa", "forward", 64, milliseconds=3.0, ratio=1.5, least=2.0, most=5.0)
    [table] = speed.tables([limit, alibi])
    assert [row.cells[0].text for row in table.rows] == ["2.00 (1.50 to 4.00)", "1.50 (1.00 to 2.50)"]


def test_what_does_not_fit_is_named_and_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "DENSE_COPIES", 1 << 50)
    names = ["--backends", "reference sdpa", "--encodings", "alibi", "--passes", "forward"]
    assert main(["bench", "--lengths", "16", *names, *SMALL, "--out", str(tmp_path)]) == 0
    assert "left out, reference at 16 tokens: needs about" in capsys.readouterr().err
    assert [r["backend"] for r in rows_of(tmp_path)[1]] == ["sdpa", "sdpa"]


def refuses(*_):
    raise UserError("not today: use sdpa")


def test_what_a_backend_refuses_is_named_and_left_out(capsys, monkeypatch):
    monkeypatch.setitem(BACKENDS, "sometimes", refuses)
    names = ["--encodings", "alibi kerple_log", "--passes", "forward", "--backends", "sdpa sometimes reference"]
    assert main(["bench", "--lengths", "16,17", *names, *SMALL]) == 0
    said = capsys.readouterr()
    assert said.err.count("left out, sometimes: not today: use sdpa") == 1 and "alibi, sdpa" in said.out
    assert "sometimes" not in said.out and "kerple_log, reference" in said.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backends", "sdpb"], "unknown 'sdpb'; known: reference, sdpa, flex, triton"),
        (["--encodings", "rope"], "'rope' has no bias"),
        (["--encodings", ""], "at least one"),
        (["--model", "tiny", "--heads", "2"], "--heads goes not with --model: leave it out"),
        (["--model", "tiny", "--head-width", "2"], "--head-width goes not with --model"),
        (["--model", "tiny", "--passes", "both"], "--passes goes not with --model"),
        (["--shared", "fire"], "--shared goes only with --model"),
        (["--vocabulary", "9"], "--vocabulary goes only with --model"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--model", "tiny", "--backends", "sdpb"], "unknown 'sdpb'; known: auto, reference, sdpa"),
        (["--model", "tiny", "--encodings", "alibbi"], "did you mean 'alibi'"),
        (["--model", "tiny", "--encodings", ""], "at least one"),
        (["--model", "tiny", "--encodings", "rope", "--shared", "t5_bias:buckets=1"], "buckets"),
    ],
)
def test_bad_input(flags, words, capsys):
    assert words in error_of(capsys, "bench", "--lengths", "16", "--device", "cpu", *flags)


def models(tmp_path, *argv):
    argv = ["bench", "--model", "tiny", "--device", "cpu", "--vocabulary", "50", "--repeats", "2", *argv]
    return main([*argv, "--out", str(tmp_path)])


def test_whole_models_are_timed_and_fire_shared_is_among_them(tmp_path, capsys):
    assert models(tmp_path, "--lengths", "9,16", "--encodings", "alibi fire") == 0
    said = capsys.readouterr().out
    head, rows = rows_of(tmp_path)
    assert "tiny: 2 layers of 128, 4 heads, vocabulary 50" in head and "means of 2" in head
    wanted = [(name, n) for n in ("9", "16") for name in ("alibi", "fire", "fire (shared)")]
    assert [(r["encoding"], r["length"]) for r in rows] == wanted
    assert {(r["backend"], r["pass"]) for r in rows} == {("auto", "inference")}
    for row in rows:
        first = next(r for r in rows if r["length"] == row["length"])
        # the mean, of two numbers the middle
        assert 2 * float(row["milliseconds"]) == pytest.approx(float(row["least_ms"]) + float(row["most_ms"]), abs=0.01)
        ratio = float(row["milliseconds"]) / float(first["milliseconds"])
        assert float(row["ratio"]) == pytest.approx(ratio, rel=0.01)  # the times are rounded to microseconds
    check_files(tmp_path, said)
    assert "| fire (shared), auto |" in said


def test_models_are_the_real_ones_with_one_set_of_weights(monkeypatch):
    """Each way reads with its own encoding, shared or one a layer, and the rest of the weights is in memory once."""
    seen, made = [], []
    build = model_benchmark._build_model
    monkeypatch.setattr(
        model_benchmark, "_forward", lambda model, tokens: seen.append((id(model), tuple(tokens.shape)))
    )
    monkeypatch.setattr(model_benchmark, "_build_model", lambda *args: made.append(build(*args)) or made[-1])
    setting = model_benchmark.ModelBenchmark(
        "cpu", "tiny", ["rope", "fire"], backends=["auto", "sdpa"], batch=3, vocabulary=20
    )
    found, left_out = model_benchmark.time_forward_passes(setting, 8)
    assert not left_out and [(t.encoding, t.backend) for t in found] == [
        (name, backend) for name in ("rope", "fire", "fire (shared)") for backend in ("auto", "sdpa")
    ]
    assert len(seen) == 6 * 11 and {shape for _, shape in seen} == {(3, 8)}
    assert seen[6:12] == seen[:6]  # in turns
    assert [type(m.decoder.encodings[0]).__name__ for m in made] == ["Rope"] * 2 + ["Fire"] * 4
    assert [len(m.decoder.encodings) for m in made] == [1, 1, 2, 2, 1, 1]
    assert len({m.decoder.embed_tokens.weight.data_ptr() for m in made}) == 1
    assert len({m.decoder.layers[1].fc1.weight.data_ptr() for m in made}) == 1
    one, other = (made[n].decoder.encodings[0].mlp[0].weight.data_ptr() for n in (2, 4))
    assert one != other


def test_a_model_that_a_backend_refuses_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(BACKENDS, "sometimes", refuses)
    assert models(tmp_path, "--lengths", "9", "--encodings", "alibi", "--backends", "auto sometimes") == 0
    assert "left out, alibi, sometimes: not today" in capsys.readouterr().err
    assert [r["backend"] for r in rows_of(tmp_path)[1]] == ["auto"]
    assert models(tmp_path, "--lengths", "9", "--encodings", "alibi", "--backends", "sometimes") == 2
    assert "nothing can be timed at 9 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "spec"), [("bf16", "rope"), ("fp16", "fire")])
def test_models_in_half_precision(tmp_path, dtype, spec):
    assert models(tmp_path, "--lengths", "9", "--encodings", spec, "--dtype", dtype) == 0
    assert f", {dtype}, " in rows_of(tmp_path)[0]


def test_bars_are_the_means():
    places = [(n, k, name) for n in (1, 2) for k, name in enumerate(("nope", "fire"))]
    rows = [speed.Timing(name, "auto", "inference", n, 10.0 * n + k, 1.0, 9.0 * n, 12.0 * n) for n, k, name in places]
    first, second = draw_model_timing(rows, "a machine").axes
    assert [bar.get_width() for bar in first.patches] == [10.0, 11.0]
    assert [bar.get_width() for bar in second.patches] == [20.0, 21.0]
    assert [line.get_xdata().tolist() for line in second.lines] == [[18.0, 24.0]] * 2
    assert [label.get_text() for label in first.get_yticklabels()] == ["nope", "fire"]

"""``fairseq-rpe eval``: the fast engine gives fairseq-eval-lm's numbers, counts every token and keeps no logits."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import checkpoint_with, make_model, run, with_documents
from torch.nn import functional as F

from fairseq_rpe.cli.main import main
from fairseq_rpe.core import UserError, records
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.data.folder import MADE_BY, describe_files
from fairseq_rpe.evaluation import loading, perplexity, results
from fairseq_rpe.evaluation.lengths import default_lengths
from fairseq_rpe.evaluation.perplexity import by_position, target_losses
from fairseq_rpe.evaluation.results import TextRequest
from fairseq_rpe.modules import cross_entropy
from fairseq_rpe.modules.decoder import RPEDecoder
from fairseq_rpe.runs import checkpoints


def rows_of(capsys, checkpoint: Path, corpus: Path, lengths: str, *flags: object) -> list[dict]:
    capsys.readouterr()
    argv = ["eval", checkpoint, corpus, "--lengths", lengths, "--device", "cpu", "--json", *flags]
    assert main([str(a) for a in argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def key_of(row: dict) -> results.TextKey:
    return records.read(results.TextResult, row, "test", "a row").key


def assert_same_numbers(fast: list[dict], slow: list[dict]) -> None:
    assert len(fast) == len(slow) > 0
    assert [key_of(row) for row in fast] == [key_of(row) for row in slow]
    for a, b in zip(fast, slow, strict=True):
        assert (a["engine"], b["engine"]) == ("fast", "fairseq")
        assert a["tokens"] == b["tokens"]
        assert a["loss_base2"] == pytest.approx(b["loss_base2"], rel=1e-6)
        # fairseq raises 2 to a loss in float32
        assert a["ppl"] == pytest.approx(b["ppl"], rel=1e-6 * b["loss_base2"])
        assert a["ppl"] == pytest.approx(2 ** a["loss_base2"], rel=1e-12)


@pytest.mark.parametrize("engine", ["fast", "fairseq"])
def test_data_of_another_vocabulary_are_refused(engine, state, corpus, tmp_path, capsys):
    """Of the same size, so that nothing but the numbers would be wrong."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    lines = (data / "dict.txt").read_text().splitlines()
    lines[0], lines[1] = lines[1], lines[0]
    (data / "dict.txt").write_text("\n".join(lines) + "\n")
    path = checkpoint_with(state, tmp_path)
    assert len(rows_of(capsys, path, corpus, "32", "--engine", engine)) == 1
    assert main(["eval", str(path), str(data), "--lengths", "32", "--device", "cpu", "--engine", engine]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "another vocabulary" in error and "--vocab-from" in error


def test_a_dictionary_that_its_corpus_was_not_made_with_is_refused(corpus, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    described = describe_files(data, ["dict.txt"])
    (data / "corpus.json").write_text(json.dumps({"made_by": MADE_BY, "files": described}))
    corpus_files.check_folder(data, "test")
    (data / "dict.txt").write_text((data / "dict.txt").read_text() + "added-afterwards 1\n")
    with pytest.raises(UserError, match="dict.txt is not the one"):
        corpus_files.check_folder(data, "test")


def test_corpora_that_know_their_text_give_bits_per_byte(state, corpus, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    path = checkpoint_with(state, tmp_path)
    assert "bits_per_byte" not in rows_of(capsys, path, data, "64")[0]
    tokens = corpus_files.count_tokens(data, "test")
    counts = {"tokens": tokens, "bytes": 5000, "words": 700, "documents": 3}
    (data / "corpus.json").write_text(json.dumps({"made_by": MADE_BY, "splits": {"test": counts}}))
    [row] = rows_of(capsys, path, data, "64")
    assert row["bits_per_byte"] == pytest.approx(row["loss_base2"] * tokens / 5000)
    assert math.log2(row["word_ppl"]) == pytest.approx(row["loss_base2"] * tokens / 700)
    (data / "corpus.json").write_text(
        json.dumps({"made_by": MADE_BY, "splits": {"test": {**counts, "tokens": tokens + 1}}})
    )
    assert main(["eval", str(path), str(data), "--lengths", "64", "--device", "cpu"]) == 2
    assert f"counts {tokens + 1} tokens in test where the data have {tokens}" in capsys.readouterr().err


# Odd ones, the last block short, more than half of the split.
LENGTHS = "7,37,64,901"
CASES = [
    ("sinusoidal", ()),
    ("alibi", ("--batch-size", "3")),
    ("rope", ("--max-tokens", "1000")),
    ("rope:scaling=yarn,factor=auto,original_length=32", ()),  # reads the row's length
    ("fire", ()),
    ("t5_bias:init_std=1", ()),
    ("window:window=5", ()),
    ("kerple_log", ("--positions", "interpolate")),
    ("rope", ("--positions", "randomized:max=2000")),  # draws for each block
    ("alibi", ("--rpe", "type1")),
    ("rope:base=500", ("--rpe", "self_extend:base=500,group=4")),
]


@pytest.mark.parametrize(("spec", "flags"), CASES, ids=[f"{spec} {' '.join(flags)}" for spec, flags in CASES])
def test_fast_equals_fairseq_eval_lm(state, corpus, tmp_path, capsys, spec, flags):
    checkpoint = checkpoint_with(state, tmp_path, spec)
    fast = rows_of(capsys, checkpoint, corpus, LENGTHS, *flags)
    assert_same_numbers(fast, rows_of(capsys, checkpoint, corpus, LENGTHS, *flags, "--engine", "fairseq"))
    assert len({row["loss_base2"] for row in fast}) == len(fast)


@pytest.mark.parametrize("engine", ["fast", "fairseq"])
def test_an_encoding_in_place_of_the_checkpoints_has_its_rotation(engine, state, corpus, tmp_path, capsys):
    """What a spec leaves open is the checkpoint's: these change nothing, and the results name what was evaluated."""
    rotation = "base=500,rotary_fraction=0.5"
    checkpoint = checkpoint_with(state, tmp_path, f"rope:{rotation}")
    [own] = rows_of(capsys, checkpoint, corpus, "37", "--engine", engine)
    for spec in ("longrope:factors=1+1", "rope:scaling=linear,factor=1", "rerope:window=99"):
        [row] = rows_of(capsys, checkpoint, corpus, "37", "--engine", engine, "--rpe", spec)
        assert row["ppl"] == pytest.approx(own["ppl"], rel=1e-6), spec
        assert row["rpe"] == f"{spec},{rotation}"


RANDOM = ("--positions", "randomized:max=2000")


def test_random_positions_are_drawn_for_each_block(state, corpus, tmp_path, capsys):
    """Which blocks share a batch does not matter, and other draws are others."""
    checkpoint = checkpoint_with(state, tmp_path, "rope")
    one = rows_of(capsys, checkpoint, corpus, "37", *RANDOM)
    two = rows_of(capsys, checkpoint, corpus, "37", *RANDOM, "--batch-size", "2")
    assert two[0]["loss_base2"] == pytest.approx(one[0]["loss_base2"], rel=1e-6)
    assert one[0]["draws"] == 1 and "draws" not in rows_of(capsys, checkpoint, corpus, "37")[0]
    request = TextRequest(checkpoint=checkpoint, data=corpus, lengths=[37], positions=RANDOM[1], device="cpu")
    model, task = loading.load(checkpoint, request, corpus)
    total, losses = corpus_files.count_tokens(corpus, "test"), []
    for model.decoder.moves.draw in range(3):
        nats, _ = by_position(model, perplexity.batches(request, task, 37, 2048), 37, 1, lambda scored: None)
        losses.append(float(nats.sum()) / total / math.log(2))
    assert losses[0] == pytest.approx(one[0]["loss_base2"], rel=1e-9) and len(set(losses)) == 3
    [mean] = rows_of(capsys, checkpoint, corpus, "37", *RANDOM, "--draws", "3")
    assert mean["loss_base2"] == pytest.approx(sum(losses) / 3, rel=1e-9)
    assert (mean["draws"], mean["tokens"]) == (3, total)
    assert mean["ppl"] == pytest.approx(2 ** mean["loss_base2"])


def test_draws_are_part_of_what_was_measured(state, corpus, tmp_path, capsys):
    checkpoint, out = checkpoint_with(state, tmp_path, "rope"), tmp_path / "rows.jsonl"
    for draws in ((), ("--draws", "2"), ("--draws", "1")):
        rows_of(capsys, checkpoint, corpus, "37", *RANDOM, *draws, "--out", str(out))
    assert [json.loads(line)["draws"] for line in out.read_text().splitlines()] == [1, 2]


def test_draws_of_what_is_not_random_are_refused(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path, "rope")
    for flags, words in (
        ((), "--draws 3: positions are not random in this evaluation: leave it out"),
        (("--positions", "interpolate"), "--draws 3: positions are not random"),
        ((*RANDOM, "--engine", "fairseq"), "--draws goes with --engine fast"),
    ):
        given = ["eval", checkpoint, corpus, "--lengths", "37", "--device", "cpu", "--draws", "3", *flags]
        assert main([str(word) for word in given]) == 2
        out, err = capsys.readouterr()
        assert words in err.splitlines()[-1] and out == ""


def test_half_precision_weights_are_read_as_fairseq_reads_them(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path, dtype=torch.float16)
    fast = rows_of(capsys, checkpoint, corpus, "37")
    assert_same_numbers(fast, rows_of(capsys, checkpoint, corpus, "37", "--engine", "fairseq"))


def test_adaptive_softmax(task):
    model = make_model(task, "alibi", adaptive_softmax_cutoff="20,40", decoder_output_dim=32)
    torch.manual_seed(0)
    inputs, targets = torch.randint(4, 60, (2, 3, 17))
    targets[0, -5:] = 1
    nats, count = by_position(model, [(inputs, targets)], 20, 1, lambda scored: None)
    with torch.no_grad():
        plain = model.get_normalized_probs(model(inputs), log_probs=True, sample={"target": targets})
    bits = -plain.gather(-1, targets[..., None])[..., 0][targets.ne(1)].double() / math.log(2)
    assert count.sum() == len(bits) == 46
    assert float(nats.sum() / 46) / math.log(2) == pytest.approx(float(bits.mean()), rel=1e-6)


def test_row_and_buckets(state, corpus, tmp_path, capsys):
    ids, _ = corpus_files.read_split(corpus, "test")
    total, counts = len(ids), Counter(ids.tolist())
    unigram = math.prod((total / n) ** (n / total) for n in counts.values())
    for row in rows_of(capsys, checkpoint_with(state, tmp_path), corpus, "1,2,37,901"):
        keys = ["encoding", "checkpoint", "data", "subset", "rpe", "positions", "length", "tokens", "loss_base2", "ppl"]
        keys += ["seconds", "engine", "peak_mb", "positions_loss", "unigram_ppl", "train_length", "context"]
        assert list(row) == keys
        assert row["unigram_ppl"] == pytest.approx(unigram, rel=1e-9)
        assert row["tokens"] == total and 50 < row["peak_mb"] < 50_000
        found, length = row["positions_loss"], row["length"]
        starts = [0, *(last + 1 for last in found["upto"][:-1])]
        assert found["upto"][-1] == length - 1 and starts == [0, *(2**k for k in range(len(starts) - 1))]
        blocks_of = [length] * (total // length) + [total % length]
        for first, last, tokens in zip(starts, found["upto"], found["tokens"], strict=True):
            assert tokens == sum(max(0, min(n, last + 1) - first) for n in blocks_of)
        mean = sum(n * v for n, v in zip(found["tokens"], found["loss_base2"], strict=True)) / total
        assert mean == pytest.approx(row["loss_base2"], rel=1e-12)


def test_buckets_hold_the_losses_of_their_positions(state, corpus, tmp_path, capsys):
    """Against one forward pass over the first two blocks, the second of them short."""
    checkpoint = checkpoint_with(state, tmp_path)
    total = corpus_files.count_tokens(corpus, "test")
    length = total // 2 + 5
    row = rows_of(capsys, checkpoint, corpus, str(length))[0]
    request = TextRequest(checkpoint=checkpoint, data=corpus, lengths=[8], device="cpu")
    model, task = loading.load(checkpoint, request, corpus)
    by_position = torch.zeros(length, dtype=torch.float64)
    for blocks, wanted in perplexity.batches(request, task, length, total):
        for inputs, targets in zip(blocks, wanted, strict=True):
            n = int(targets.ne(1).sum())
            with torch.no_grad():
                logits = model(inputs[None, :n])[0][0].double()
            by_position[:n] += F.cross_entropy(logits, targets[:n], reduction="none")
    start, found = 0, row["positions_loss"]
    for last, loss, tokens in zip(found["upto"], found["loss_base2"], found["tokens"], strict=True):
        assert loss == pytest.approx(float(by_position[start : last + 1].sum()) / tokens / math.log(2), rel=1e-5)
        start = last + 1


@pytest.mark.parametrize("tile", [(1, 1), (3, 7), (64, 90), (200, 1000)])
def test_tiles_equal_the_plain_loss(tile, monkeypatch):
    monkeypatch.setattr(cross_entropy, "TILES", {"cpu": tile})
    torch.manual_seed(0)
    x, weight, target = 5 * torch.randn(50, 16), torch.randn(90, 16), torch.randint(90, (50,))
    plain = F.cross_entropy((x.double() @ weight.double().T), target, reduction="none")
    torch.testing.assert_close(target_losses(x, weight, target).double(), plain, rtol=1e-5, atol=1e-5)


def test_logits_are_never_larger_than_a_tile(state, corpus, tmp_path, capsys, monkeypatch):
    checkpoint = checkpoint_with(state, tmp_path)
    types = len((corpus / "dict.txt").read_text().splitlines()) + 4
    wanted = rows_of(capsys, checkpoint, corpus, "901", "--engine", "fairseq")
    made: list[int] = []
    linear = F.linear

    def spy(x, weight, bias=None):
        out = linear(x, weight, bias)
        if bias is None:
            made.append(out.numel())
        return out

    def refuse(*_, **__):
        raise AssertionError("the logits of all tokens were made")

    monkeypatch.setattr(cross_entropy, "TILES", {"cpu": (16, 50)})
    monkeypatch.setattr(F, "linear", spy)
    monkeypatch.setattr(RPEDecoder, "output_layer", refuse)
    assert_same_numbers(rows_of(capsys, checkpoint, corpus, "901"), wanted)
    assert sum(made) >= wanted[0]["tokens"] * types
    assert max(made) <= 16 * torch.get_num_threads() * 50


def test_checkpoint_is_loaded_once_and_results_are_kept(state, corpus, tmp_path, capsys, monkeypatch):
    checkpoint, out = checkpoint_with(state, tmp_path), tmp_path / "eval.jsonl"
    loads = []
    load = loading.checkpoint_utils.load_model_ensemble_and_task

    def count(*args, **kwargs):
        loads.append(args)
        return load(*args, **kwargs)

    slow = rows_of(capsys, checkpoint, corpus, "37", "--out", out, "--engine", "fairseq")
    assert "positions_loss" not in slow[0]
    monkeypatch.setattr(loading.checkpoint_utils, "load_model_ensemble_and_task", count)
    both = rows_of(capsys, checkpoint, corpus, "64,37,16", "--out", out)
    assert [row["engine"] for row in both] == ["fast", "fairseq", "fast"] and both[1] == slow[0]
    assert len(loads) == 1
    older = [{k: v for k, v in row.items() if k not in ("engine", "peak_mb", "positions_loss")} for row in both]
    out.write_text("".join(json.dumps(row) + "\n" for row in older))
    assert rows_of(capsys, checkpoint, corpus, "37,16,64", "--out", out) == [older[1], older[2], older[0]]
    assert len(loads) == 1 and len(out.read_text().splitlines()) == 3


def test_known_results_are_printed_without_torch(state, corpus, tmp_path, capsys):
    checkpoint, out = checkpoint_with(state, tmp_path), tmp_path / "eval.jsonl"
    known = rows_of(capsys, checkpoint, corpus, "37,64", "--out", out)
    argv = [str(a) for a in ("eval", checkpoint, corpus, "--lengths", "64,37", "--out", out, "--json")]
    code = f"import sys; from fairseq_rpe.cli.main import main; assert main({argv}) == 0; "
    done = run(sys.executable, "-c", code + "assert not {'torch', 'fairseq'} & set(sys.modules)")
    assert [json.loads(line) for line in done.stdout.splitlines()] == known[::-1]


def table_of(capsys, *argv: object) -> list[list[str]]:
    """The cells of the table that ``eval`` prints, by line."""
    capsys.readouterr()
    assert main(["eval", *map(str, argv), "--device", "cpu"]) == 0
    return [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]


def test_a_table_is_printed_with_ratios_to_the_training_length(state, corpus, tmp_path, capsys):
    """Whatever the order: a ratio waits for the perplexity at the training length."""
    checkpoint = checkpoint_with(state, tmp_path)
    trained = checkpoints.load(checkpoint).train_length()
    rows = rows_of(capsys, checkpoint, corpus, f"16,{trained}")
    assert {row["train_length"] for row in rows} == {trained}
    head, *lines = table_of(capsys, checkpoint, corpus, "--lengths", f"16,{trained}")
    assert head == ["length", "perplexity", f"ratio to {trained}", "tokens", "seconds"]
    for line, row in zip(lines, rows, strict=True):
        ratio = row["ppl"] / rows[1]["ppl"]
        assert line[:4] == [str(row["length"]), f"{row['ppl']:,.2f}", f"{ratio:.3f}", f"{row['tokens']:,}"]
    head, line = table_of(capsys, checkpoint, corpus, "--lengths", "16")
    assert head == ["length", "perplexity", "tokens", "seconds"] and line[1] == f"{rows[0]['ppl']:,.2f}"


def test_rows_that_wait_are_printed_where_a_later_length_fails(state, corpus, tmp_path, capsys, monkeypatch):
    checkpoint = checkpoint_with(state, tmp_path)
    trained, whole = checkpoints.load(checkpoint).train_length(), perplexity.by_position

    def fails(model, batches, length, *rest):
        if length == trained:
            raise UserError("no more")
        return whole(model, batches, length, *rest)

    monkeypatch.setattr(perplexity, "by_position", fails)
    assert main(["eval", str(checkpoint), str(corpus), "--lengths", f"16,{trained}", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["length", "16"] and "no more" in said.err


def test_lengths_have_a_default(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path)
    trained = checkpoints.load(checkpoint).train_length()
    tokens = corpus_files.count_tokens(corpus, "test")
    expected = [n for n in (trained * 2**i for i in range(5)) if n <= tokens]
    _, *lines = table_of(capsys, checkpoint, corpus)
    assert [int(line[0]) for line in lines] == expected and lines[0][2] == "1.000"
    _, *lines = table_of(capsys, checkpoint, corpus, "--positions", f"randomized:max={2 * trained}")
    assert [int(line[0]) for line in lines] == expected[:2]


def test_a_checkpoint_without_a_training_length_needs_lengths(state, corpus, tmp_path, capsys, monkeypatch):
    checkpoint = checkpoint_with(state, tmp_path)
    monkeypatch.setattr(checkpoints.Checkpoint, "train_length", lambda _: None)
    assert main(["eval", str(checkpoint), str(corpus), "--device", "cpu"]) == 2
    assert f"--lengths is missing, and {checkpoint} does not record its training length" in capsys.readouterr().err


def test_default_lengths_stop_where_the_text_or_the_table_ends(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path)
    trained = checkpoints.load(checkpoint).train_length()
    assert default_lengths(checkpoint, corpus, "test", "learned", None) == [trained]
    assert f"'learned' has {trained} positions" in capsys.readouterr().err


def test_a_mistake_in_an_encoding_of_ones_own_is_told_with_its_place(state, corpus, tmp_path, capsys):
    file, checkpoint = tmp_path / "my_encoding.py", checkpoint_with(state, tmp_path)
    file.write_text(
        "from fairseq_rpe.encodings import DistanceBias, register\n\n\n@register('test_wrong')\n"
        "class Wrong(DistanceBias):\n    def bias(self, d):\n        return -d\n"
    )
    said = refusal(capsys, checkpoint, corpus, "--rpe", "test_wrong", "--rpe-module", str(file))
    assert "Wrong.bias returned (64,), expected (4, 64)" in said and f"{file}:6" in said


def test_tokens_that_were_not_scored_are_refused(state, corpus, tmp_path, capsys, monkeypatch):
    whole = perplexity.batches
    monkeypatch.setattr(perplexity, "batches", lambda *a: ((x[:, :-1], y[:, :-1]) for x, y in whole(*a)))
    out = tmp_path / "eval.jsonl"
    argv = ["eval", checkpoint_with(state, tmp_path), corpus, "--lengths", "37", "--device", "cpu", "--out", out]
    assert main([str(a) for a in argv]) == 2
    assert "tokens were scored, so the result is not kept" in capsys.readouterr().err and not out.exists()


def refusal(capsys, checkpoint: Path, corpus: Path, *flags: str) -> str:
    capsys.readouterr()
    assert main(["eval", str(checkpoint), str(corpus), "--lengths", "64", "--device", "cpu", *flags]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_other_checkpoints_are_refused_and_fairseq_named(state, corpus, tmp_path, capsys):
    strange = {**state, "cfg": {**state["cfg"], "model": {"_name": "transformer_lm", "arch": "transformer_lm"}}}
    torch.save(strange, tmp_path / "stock.pt")
    error = refusal(capsys, tmp_path / "stock.pt", corpus)
    assert "its model is 'transformer_lm'" in error and "or use --engine fairseq" in error
    error = refusal(capsys, checkpoint_with(state, tmp_path, task={"self_target": True}), corpus)
    assert "trained with --self-target" in error and "or use --engine fairseq" in error
    error = refusal(capsys, checkpoint_with(state, tmp_path, task={"algorithm": "copy"}), corpus)
    assert "algorithmic task" in error and "--engine" not in error


def test_failures_are_one_line(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path, "learned")
    for engine in ("fast", "fairseq"):
        assert "beyond the 32 positions" in refusal(capsys, checkpoint, corpus, "--engine", engine)
    assert "did you mean 'alibi'" in refusal(capsys, checkpoint, corpus, "--rpe", "alibbi")
    for engine in ("fast", "fairseq"):  # what reads rope beyond its length reads no other rotation than was trained
        checkpoint = checkpoint_with(state, tmp_path, "rope:base=500")
        for spec in ("rerope:base=10000", "longrope:base=10000"):
            assert "give base=500" in refusal(capsys, checkpoint, corpus, "--rpe", spec, "--engine", engine)
    assert "was with 'alibi'" in refusal(capsys, checkpoint_with(state, tmp_path), corpus, "--rpe", "dual_chunk")
    state = {**state, "model": {**state["model"]}}
    state["model"]["decoder.embed_tokens.weight"] = torch.full_like(
        state["model"]["decoder.embed_tokens.weight"], math.nan
    )
    checkpoint = checkpoint_with(state, tmp_path)
    for engine in ("fast", "fairseq"):
        assert "probability 0 or NaN" in refusal(capsys, checkpoint, corpus, "--engine", engine)


def test_a_perplexity_too_large_for_a_number_is_refused(state, corpus, tmp_path, capsys):
    name = "decoder.output_projection.weight"
    state = {**state, "model": {**state["model"], name: 3e4 * state["model"][name]}}
    checkpoint = checkpoint_with(state, tmp_path)
    assert "is too large for a number, with a loss of" in refusal(capsys, checkpoint, corpus)
    flags = ["--windows", "16", "--stride", "16", "--first-tokens", "64", "--out", str(tmp_path / "out")]
    assert main(["sliding", str(checkpoint), str(corpus), *flags]) == 2
    assert "is too large for a number, with a loss of" in capsys.readouterr().err
    assert not (tmp_path / "out" / "sliding.jsonl").exists()


def test_fairseq_engine_after_the_models_were_imported(state, corpus, tmp_path, capsys, monkeypatch):
    """The guard that counts tokens was put around fairseq-eval-lm only if that was imported first."""
    import fairseq_cli

    import fairseq_rpe.models  # noqa: F401

    monkeypatch.delitem(sys.modules, "fairseq_cli.eval_lm", raising=False)
    monkeypatch.delattr(fairseq_cli, "eval_lm", raising=False)
    row = rows_of(capsys, checkpoint_with(state, tmp_path), corpus, "64", "--engine", "fairseq")[0]
    assert row["tokens"] == corpus_files.count_tokens(corpus, "test")


def test_an_encoding_of_the_fairseq_engine_is_not_the_next_ones(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path)
    plain = rows_of(capsys, checkpoint, corpus, "64")[0]
    other = rows_of(capsys, checkpoint, corpus, "64", "--engine", "fairseq", "--rpe", "nope")[0]
    again = rows_of(capsys, checkpoint, corpus, "64")[0]
    assert again["loss_base2"] == plain["loss_base2"] != pytest.approx(other["loss_base2"], rel=1e-6)


def test_pruned_evaluation(state, corpus, tmp_path, capsys):
    """Close to the exact loss, a measurement of its own, and refused where nothing can be pruned."""
    path, out = checkpoint_with(state, tmp_path), tmp_path / "eval.jsonl"
    length = str(min(1200, corpus_files.count_tokens(corpus, "test") - 1))
    [exact] = rows_of(capsys, path, corpus, length, "--out", out)
    [row] = rows_of(capsys, path, corpus, length, "--out", out, "--attention-prune", "1e-4")
    assert row["attention_prune"] == 1e-4 and "attention_prune" not in exact
    assert (
        row["loss_base2"] == pytest.approx(exact["loss_base2"], rel=1e-3) and row["loss_base2"] != exact["loss_base2"]
    )
    assert rows_of(capsys, path, corpus, length, "--out", out) == [exact]
    for flags, message in (
        (("--attention-prune", "0"), "0 < EPS < 1"),
        (("--attention-prune", "1e-4", "--engine", "fairseq"), "goes with --engine fast"),
        (("--attention-backend", "sdpa", "--engine", "fairseq"), "--attention-backend goes with --engine fast"),
        (("--attention-backend", "sdap"), "did you mean 'sdpa'"),
        (("--attention-prune", "1e-4", "--attention-backend", "flex"), "prunes on the backends sdpa and triton"),
        (("--attention-prune", "1e-4", "--rpe", "nope"), "cannot be pruned"),
    ):
        argv = ["eval", path, corpus, "--lengths", "64", "--device", "cpu", *flags]
        assert main([str(a) for a in argv]) == 2
        assert message in capsys.readouterr().err


def test_the_backend_of_an_evaluation(state, corpus, tmp_path, capsys, monkeypatch):
    """Kernels in place of the checkpoint's backend, pruned as well; what they refuse is one line."""
    pytest.importorskip("triton", reason="needs the package triton")
    from fairseq_rpe.attention.triton import autograd, tuning

    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 128, "BLOCK_N": 128})
    decided, decide = [], autograd.left_out
    monkeypatch.setattr(autograd, "left_out", lambda *rest: decided.append(decide(*rest)) or decided[-1])
    path = checkpoint_with(state, tmp_path, decoder_attention_heads=1)
    length = str(min(600, corpus_files.count_tokens(corpus, "test") - 1))
    [plain] = rows_of(capsys, path, corpus, length)
    [kernels] = rows_of(capsys, path, corpus, length, "--attention-backend", "triton")
    assert kernels["loss_base2"] == pytest.approx(plain["loss_base2"], rel=1e-5) and not decided
    flags = ("--attention-backend", "triton", "--attention-prune", "1e-4")
    [pruned] = rows_of(capsys, path, corpus, length, *flags)
    assert pruned["loss_base2"] == pytest.approx(plain["loss_base2"], rel=1e-3) and decided
    narrow = checkpoint_with(state, tmp_path)
    assert main([str(a) for a in ["eval", narrow, corpus, "--lengths", "64", "--device", "cpu", *flags]]) == 2
    assert "head widths from 32" in capsys.readouterr().err


# Blocks within documents


def documents_of(data: Path) -> list[torch.Tensor]:
    """The tokens of each document of the test split, read without the code that is tested."""
    ids, sizes = corpus_files.read_split(data, "test")
    found, document = [], []
    for item in torch.from_numpy(ids.astype("i8")).split(sizes.tolist()):
        document.append(item)
        if item.tolist() == [2]:
            found.append(torch.cat(document))
            document = []
    return [*found, torch.cat(document)]


@torch.no_grad()
def losses_alone(model, document: torch.Tensor, length: int) -> float:
    """Nats of a document that is cut into blocks, each of which the model reads alone."""
    inputs, nats = torch.cat([torch.tensor([2]), document[:-1]]), 0.0
    for start in range(0, len(document), length):
        logits, _ = model(inputs[None, start : start + length])
        nats += float(F.cross_entropy(logits[0].double(), document[start : start + length], reduction="sum"))
    return nats


@pytest.mark.parametrize("length", [5, 37, 300])
def test_blocks_of_documents_score_every_token_as_each_document_alone(state, corpus, tmp_path, capsys, length):
    data = with_documents(corpus, tmp_path)
    checkpoint = checkpoint_with(state, tmp_path, "rope")
    [row] = rows_of(capsys, checkpoint, data, str(length), "--blocks", "document")
    documents = documents_of(data)
    assert len(documents) > 5
    assert row["tokens"] == sum(map(len, documents)) == corpus_files.count_tokens(data, "test")
    assert row["tokens"] == sum(row["positions_loss"]["tokens"])
    model, _ = loading.load(checkpoint, results.Overrides(device="cpu"), data)
    nats = sum(losses_alone(model, document, length) for document in documents)
    assert row["loss_base2"] == pytest.approx(nats / row["tokens"] / math.log(2), rel=1e-5)
    assert (row["blocks"], row["context"]) == ("document", "within documents")
    [stream] = rows_of(capsys, checkpoint, data, str(length))
    assert "blocks" not in stream and stream["context"] == "across documents"
    assert stream["loss_base2"] != pytest.approx(row["loss_base2"], rel=1e-4)


def test_both_engines_cut_documents_alike(state, corpus, tmp_path, capsys):
    data, checkpoint = with_documents(corpus, tmp_path), checkpoint_with(state, tmp_path)
    fast = rows_of(capsys, checkpoint, data, "5,64", "--blocks", "document")
    assert_same_numbers(fast, rows_of(capsys, checkpoint, data, "5,64", "--blocks", "document", "--engine", "fairseq"))


def test_blocks_are_those_of_the_training_unless_others_are_named(state, corpus, tmp_path, capsys):
    data, out = with_documents(corpus, tmp_path), tmp_path / "eval.jsonl"
    settings = {"_name": "rpe_language_modeling", "blocks": "document"}
    trained = checkpoint_with(state, tmp_path, task=settings)
    [default] = rows_of(capsys, trained, data, "37", "--out", out)
    [stream] = rows_of(capsys, trained, data, "37", "--blocks", "stream", "--out", out)
    [document] = rows_of(capsys, trained, data, "37", "--blocks", "document", "--out", out)
    assert [row["context"] for row in (default, stream)] == ["within documents", "across documents"]
    assert default["loss_base2"] == document["loss_base2"] != stream["loss_base2"]
    assert len({key_of(row) for row in (default, stream, document)}) == len(out.read_text().splitlines()) == 3


def test_an_unknown_kind_of_blocks_in_a_checkpoint_is_refused(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path, task={"blocks": "chapters"})
    assert main(["eval", str(checkpoint), str(corpus), "--lengths", "32", "--device", "cpu"]) == 2
    assert "blocks is 'chapters'" in capsys.readouterr().err


def test_documents_that_are_not_marked_are_refused(state, corpus, tmp_path, capsys):
    checkpoint = checkpoint_with(state, tmp_path)
    argv = ["eval", str(checkpoint), str(corpus), "--lengths", "32", "--device", "cpu", "--blocks", "document"]
    assert main(argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{corpus}/test has no document boundaries" in error and "--blocks stream" in error


def test_a_stock_model_does_not_separate_documents(state, corpus, tmp_path, capsys):
    data, checkpoint = with_documents(corpus, tmp_path), tmp_path / "stock.pt"
    model = {key: value for key, value in state["cfg"]["model"].items() if not key.startswith("rpe")}
    torch.save({**state, "cfg": {**state["cfg"], "model": {**model, "_name": "transformer_lm"}}}, checkpoint)
    argv = ["eval", checkpoint, data, "--lengths", "32", "--device", "cpu", "--engine", "fairseq"]
    assert main([str(a) for a in (*argv, "--separate-documents")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "is not of this plugin" in error and "drop --separate-documents" in error


def test_a_length_that_no_document_fills_is_refused(state, corpus, tmp_path, capsys):
    data, checkpoint = with_documents(corpus, tmp_path), checkpoint_with(state, tmp_path)
    longest = max(map(len, documents_of(data)))
    flags = ("--blocks", "document")
    assert len(rows_of(capsys, checkpoint, data, str(longest), *flags)) == 1
    argv = ["eval", str(checkpoint), str(data), "--lengths", str(longest + 1), "--device", "cpu", *flags]
    assert main(argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"has {longest} tokens" in error and f"one block of {longest + 1}" in error


def test_default_lengths_stop_at_the_longest_document_and_the_table_says_the_context(state, corpus, tmp_path, capsys):
    data, checkpoint = with_documents(corpus, tmp_path), checkpoint_with(state, tmp_path)
    longest = max(map(len, documents_of(data)))
    assert 256 <= longest < 512
    assert main(["eval", str(checkpoint), str(data), "--device", "cpu", "--blocks", "document"]) == 0
    out, err = capsys.readouterr()
    head, *rows = out.splitlines()
    assert head.split()[-1] == "context" and all(row.endswith("within documents") for row in rows)
    assert [row.split()[0] for row in rows] == ["32", "64", "128", "256"]
    assert f"the longest document of {data}/test has {longest} tokens" in err


# Separate documents in blocks of a stream


def parts_in_blocks(documents: list[torch.Tensor], length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of every part of a document that lies in one block of a stream, read independently."""
    text = torch.cat(documents)
    number = torch.cat([torch.full((len(one),), k) for k, one in enumerate(documents)])
    inputs, found = torch.cat([torch.tensor([2]), text[:-1]]), []
    for start in range(0, len(text), length):
        block = slice(start, start + length)
        for k in number[block].unique():
            own = number[block] == k
            found.append((inputs[block][own], text[block][own]))
    return found


@pytest.mark.parametrize("length", [37, 300])
def test_separate_documents_are_scored_as_each_part_of_one_alone(state, corpus, tmp_path, capsys, length):
    data, checkpoint = with_documents(corpus, tmp_path), checkpoint_with(state, tmp_path, "rope")
    [row] = rows_of(capsys, checkpoint, data, str(length), "--separate-documents")
    model, _ = loading.load(checkpoint, results.Overrides(device="cpu"), data)
    parts = parts_in_blocks(documents_of(data), length)
    with torch.no_grad():
        nats = [F.cross_entropy(model(x[None])[0][0].double(), y, reduction="sum") for x, y in parts]
    assert row["tokens"] == sum(len(y) for _, y in parts) == corpus_files.count_tokens(data, "test")
    assert row["loss_base2"] == pytest.approx(float(sum(nats)) / row["tokens"] / math.log(2), rel=1e-5)
    assert row["separate_documents"] is True and row["context"] == "separate documents in one row"
    # positions count the tokens of a document
    assert row["positions_loss"]["tokens"][0] == len(parts) and sum(row["positions_loss"]["tokens"]) == row["tokens"]
    assert row["positions_loss"]["upto"][-1] == max(len(y) for _, y in parts) - 1


def test_both_engines_separate_documents_alike(state, corpus, tmp_path, capsys):
    data, checkpoint = with_documents(corpus, tmp_path), checkpoint_with(state, tmp_path)
    fast = rows_of(capsys, checkpoint, data, "5,64", "--separate-documents")
    slow = rows_of(capsys, checkpoint, data, "5,64", "--separate-documents", "--engine", "fairseq")
    assert_same_numbers(fast, slow)


def test_documents_are_as_separate_as_in_the_training_unless_it_is_said(state, corpus, tmp_path, capsys):
    data, out = with_documents(corpus, tmp_path), tmp_path / "eval.jsonl"
    settings = {"_name": "rpe_language_modeling", "blocks": "stream", "separate_documents": True}
    trained = checkpoint_with(state, tmp_path, task=settings)
    flags = ([], ["--no-separate-documents"], ["--separate-documents"], ["--blocks", "document"])
    rows = [rows_of(capsys, trained, data, "37", *one, "--out", out)[0] for one in flags]
    contexts = ["separate documents in one row", "across documents", "separate documents in one row"]
    assert [row["context"] for row in rows] == [*contexts, "within documents"]
    assert rows[0]["loss_base2"] == rows[2]["loss_base2"]
    assert len({row["loss_base2"] for row in rows}) == 3 and len({key_of(row) for row in rows}) == 4


@pytest.mark.parametrize(
    ("spec", "flags", "words"),
    [
        ("alibi", ["--blocks", "document"], "--separate-documents is for --blocks stream"),
        ("alibi", ["--attention-prune", "0.1"], "--attention-prune does not go with --separate-documents"),
        ("alibi", ["--positions", "interpolate"], "--blocks document"),
        ("rope:scaling=dynamic_ntk,original_length=32", [], "--blocks document"),
    ],
)
def test_what_cannot_be_separated_is_refused(state, corpus, tmp_path, capsys, spec, flags, words):
    data, checkpoint = with_documents(corpus, tmp_path), checkpoint_with(state, tmp_path, spec)
    argv = ["eval", checkpoint, data, "--lengths", "32", "--device", "cpu", "--separate-documents", *flags]
    assert main([str(a) for a in argv]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]

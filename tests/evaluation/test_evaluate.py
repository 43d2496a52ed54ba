"""``fairseq-rpe eval``: the fast engine gives fairseq-eval-lm's numbers, counts every token and keeps no logits."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import checkpoint_with, make_model, run, run_here
from fairseq.data import TokenBlockDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import PAD, bits, make_sensitive, reference_losses, refusal, rows_of, sums_by_position, write_text
from torch.nn import functional as F

from fairseq_rpe import compat
from fairseq_rpe.core import UserError
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.data.folder import MADE_BY
from fairseq_rpe.evaluation import loading, perplexity, segment_losses
from fairseq_rpe.evaluation import records as results
from fairseq_rpe.evaluation.checkpoint_defaults import default_lengths
from fairseq_rpe.evaluation.loss_aggregation import SegmentSums, text_result
from fairseq_rpe.evaluation.perplexity import TokenBatch, losses_by_position, target_losses
from fairseq_rpe.evaluation.records import TextKey, TextRequest
from fairseq_rpe.modules import cross_entropy
from fairseq_rpe.modules.decoder import RPEDecoder
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.tasks.language_modeling import SeparateDocuments
from fairseq_rpe.utils import records

TRAINED = 32  # tokens of a block in the training of the checkpoints here
RANDOM = ("--positions-eval", "randomized:max_position=2000")


@pytest.fixture(scope="module")
def text(corpus, made_once) -> Path:
    """The first lines of the corpus's test split as documents of 1, 7, 2 and 3 lines."""

    def fill(folder: Path) -> None:
        ids, sizes = corpus_files.read_split(corpus, "test")
        lines = [line.tolist()[:-1] for line in torch.from_numpy(ids.astype("i8")).split(sizes.tolist())]
        write_text(folder / "text", corpus / "dict.txt", [lines[0:1], lines[1:8], lines[8:10], lines[10:13]])

    return made_once("short-text", fill) / "text"


def key_of(row: dict) -> results.TextKey:
    return records.read_record(results.TextResult, row, "test", "a row").key


def table_of(*words: object) -> list[list[str]]:
    """The cells of the table that ``eval`` prints, by line."""
    done = run_here("eval", "--device", "cpu", *map(str, words))
    return [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def sensitive(task):
    return make_sensitive(task, "rope", decoder_layers=1)


LINES = st.lists(st.lists(st.integers(4, 59), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    documents=st.lists(LINES, min_size=2, max_size=5),
    length=st.integers(1, 70),
    kind=st.sampled_from(["stream", "document", "separate"]),
    rows=st.none() | st.integers(1, 4),
)
def test_every_token_is_scored_once_at_its_position(sensitive, task, documents, length, kind, rows):
    """Whatever the text, its blocks and its batches: against a pass over each block, or part of one, alone."""
    lengths = [sum(len(line) + 1 for line in lines) + 1 for lines in documents]
    text = torch.tensor([token for lines in documents for line in (*lines, []) for token in (*line, 2)])
    begin = torch.tensor([sum(lengths[:k]) for k, n in enumerate(lengths) for _ in range(n)])
    place = torch.arange(len(text))
    first = {
        "stream": place - place % length,
        "document": place - (place - begin) % length,
        "separate": torch.maximum(place - place % length, begin),
    }[kind]
    with tempfile.TemporaryDirectory() as folder:
        task.source_dictionary.save(f"{folder}/dict.txt")
        data = write_text(Path(folder, "text"), Path(folder, "dict.txt"), documents)
        choice = {"blocks": "document"} if kind == "document" else {"separate_documents": kind == "separate"}
        request = TextRequest(checkpoint=data, data=data, lengths=[length], batch_size=rows, **choice)
        batches = list(perplexity.make_batches(request, task, length, 150))
        document_ends = corpus_files.document_ends_if_recorded(data, "test")
    assert all(len(inputs) <= (rows or 150) and inputs.numel() <= 150 for inputs, *_ in batches)
    scored: list[int] = []
    with mock.patch.object(segment_losses, "SEGMENT_TOKENS", 20):
        sums = SegmentSums(len(text), document_ends, torch.device("cpu"))
    nats, count = losses_by_position(sensitive, batches, length, PAD, scored.append, sums)
    token_nats = reference_losses(sensitive, text, first)
    expected, times = sums_by_position(token_nats, first)
    assert sum(scored) == len(text) and torch.equal(count, F.pad(times, (0, length))[:length])
    torch.testing.assert_close(nats, F.pad(expected, (0, length))[:length], rtol=1e-5, atol=1e-5)

    found = text_result(TextKey(checkpoint="c", split="test", length=length), nats, count)
    assert found.tokens == len(text) and found.ppl == pytest.approx(2**found.loss_base2, rel=1e-12)
    assert found.loss_base2 == pytest.approx(bits(float(expected.sum()), len(text)), rel=1e-5)
    upto, begins = found.positions_loss.upto, [0, *(last + 1 for last in found.positions_loss.upto[:-1])]
    assert upto[-1] == int(times.nonzero().max()) and begins == [0, *(2**k for k in range(len(begins) - 1))]
    parts = zip(begins, upto, found.positions_loss.tokens, found.positions_loss.loss_base2, strict=True)
    for start, last, tokens, loss in parts:
        assert tokens == int(times[start : last + 1].sum())
        assert loss == pytest.approx(bits(float(expected[start : last + 1].sum()), tokens), rel=1e-4)

    segments = sums.pack(length, draws=1)
    counts = segments.counts().tolist()
    assert max(counts) <= 20 and segments.sums().sum() == pytest.approx(found.loss_base2 * len(text), rel=1e-6)
    for segment, loss in zip(token_nats.split(counts), segments.sums(), strict=True):
        assert loss == pytest.approx(float(segment.sum()) / math.log(2), rel=1e-4, abs=1e-4)


def test_padded_rows_belong_to_no_document(task):
    """As fairseq pads batches with --pad-to-fixed-bsz and --pad-to-fixed-length."""
    blocks = TokenBlockDataset([torch.arange(4, 17)], [13], 5, PAD, 2, break_mode="none", include_targets=True)
    padding = {"fixed_pad_length": 8, "pad_to_bsz": 4}
    words = task.source_dictionary
    data = SeparateDocuments(blocks, np.array([7, 13]), words, tgt_vocab=words, targets=["future"], **padding)
    documents = data.collater([data[1], data[2]])["net_input"]["documents"]
    assert documents.tolist() == [[0, 0, 1, 1, 1, -1, -1, -1], [1, 1, 1] + [-1] * 5, [-1] * 8, [-1] * 8]


CASES = [
    ("rope:scaling=yarn,factor=auto,original_length=32", ""),  # reads the row's length
    ("rope", " ".join(RANDOM)),  # draws for each block
    ("rope", "--blocks document --max-tokens 200"),
    ("rope", "--separate-documents"),
    pytest.param("sinusoidal", "", marks=pytest.mark.release),
    pytest.param("kerple_log", "--positions-eval interpolate", marks=pytest.mark.release),
    pytest.param("alibi", "--rpe type1 --batch-size 3", marks=pytest.mark.release),
]


def test_flags_of_an_earlier_fairseq_command_do_not_replace_settings(state, text, tmp_path):
    command = ("eval", checkpoint_with(state, tmp_path, "alibi"), text, "--lengths", "64")
    expected = rows_of(*command)
    with mock.patch.dict(compat.overrides, {"rpe": "nope"}):
        rows = rows_of(*command)
    assert [row["loss_base2"] for row in rows] == [row["loss_base2"] for row in expected]


@pytest.mark.parametrize(("spec", "flags"), CASES)
def test_fast_equals_fairseq_eval_lm(state, text, tmp_path, spec, flags):
    checkpoint = checkpoint_with(state, tmp_path, spec, torch.float16 if spec == "sinusoidal" else torch.float32)
    command = ("eval", checkpoint, text, "--lengths", "7,64", *flags.split())
    fast, slow = rows_of(*command), rows_of(*command, "--engine", "fairseq")
    assert len(fast) == len({row["loss_base2"] for row in fast}) == 2
    assert [key_of(row) for row in fast] == [key_of(row) for row in slow]
    for a, b in zip(fast, slow, strict=True):
        assert (a["engine"], b["engine"]) == ("fast", "fairseq")
        assert a["tokens"] == b["tokens"] == corpus_files.count_tokens(text, "test")
        assert a["loss_base2"] == pytest.approx(b["loss_base2"], rel=1e-6)
        # fairseq raises 2 to a loss in float32
        assert a["ppl"] == pytest.approx(b["ppl"], rel=1e-6 * b["loss_base2"])


def test_a_row_says_what_was_measured(state, text, tmp_path):
    ids, _ = corpus_files.read_split(text, "test")
    total, counts = len(ids), Counter(ids.tolist())
    unigram = math.prod((total / n) ** (n / total) for n in counts.values())
    out = tmp_path / "eval.jsonl"
    [row] = rows_of("eval", checkpoint_with(state, tmp_path), text, "--lengths", 37, "--out", out)
    keys = ["encoding", "checkpoint", "data", "split", "rpe", "positions", "length", "tokens", "loss_base2", "ppl"]
    keys += ["seconds", "engine", "peak_mb", "positions_loss", "unigram_ppl", "train_length", "context"]
    keys += ["updates", "tokens_trained"]
    assert list(row) == keys
    # the losses by segment are only in the file
    [stored] = results.read_results(results.TextResult, out)
    assert list(json.loads(out.read_text())) == [*keys, "segments"]
    assert stored.segments.counts().sum() == total
    assert stored.segments.sums().sum() == pytest.approx(row["loss_base2"] * total, rel=1e-6)
    assert row["unigram_ppl"] == pytest.approx(unigram, rel=1e-9)
    assert (row["train_length"], row["tokens"], row["context"]) == (TRAINED, total, "across documents")
    assert 50 < row["peak_mb"] < 50_000 and row["positions_loss"]["upto"] == [0, 1, 3, 7, 15, 31, 36]


def test_adaptive_softmax(task):
    model = make_model(task, "alibi", adaptive_softmax_cutoff="20,40", decoder_output_dim=32)
    torch.manual_seed(0)
    inputs, targets = torch.randint(4, 60, (2, 3, 17))
    targets[0, -5:] = PAD
    nats, count = losses_by_position(model, [TokenBatch(inputs, targets)], 20, PAD, lambda scored: None)
    with torch.no_grad():
        plain = model.get_normalized_probs(model(inputs), log_probs=True, sample={"target": targets})
    wanted = -plain.gather(-1, targets[..., None])[..., 0][targets.ne(PAD)].double()
    assert count.sum() == len(wanted) == 46
    assert float(nats.sum()) == pytest.approx(float(wanted.sum()), rel=1e-6)


@pytest.mark.parametrize("tile", [(1, 1), (3, 7), (64, 90), (200, 1000)])
def test_tiles_equal_the_plain_loss(tile, monkeypatch):
    monkeypatch.setattr(cross_entropy, "TILES", {"cpu": tile})
    torch.manual_seed(0)
    x, weight, target = 5 * torch.randn(50, 16), torch.randn(90, 16), torch.randint(90, (50,))
    plain = F.cross_entropy((x.double() @ weight.double().T), target, reduction="none")
    torch.testing.assert_close(target_losses(x, weight, target).double(), plain, rtol=1e-5, atol=1e-5)


def test_logits_are_never_larger_than_a_tile(state, text, tmp_path, monkeypatch):
    command = ("eval", checkpoint_with(state, tmp_path), text, "--lengths", "101")
    types = len((text / "dict.txt").read_text().splitlines()) + 4
    [wanted] = rows_of(*command)
    made, linear = [], F.linear

    def noted(x, weight, bias=None):
        out = linear(x, weight, bias)
        made.extend([out.numel()] if bias is None else [])
        return out

    monkeypatch.setattr(cross_entropy, "TILES", {"cpu": (16, 50)})
    monkeypatch.setattr(F, "linear", noted)
    monkeypatch.setattr(RPEDecoder, "output_layer", lambda *_, **__: pytest.fail("the logits of all tokens were made"))
    assert rows_of(*command)[0]["loss_base2"] == pytest.approx(wanted["loss_base2"], rel=1e-6)
    assert sum(made) >= wanted["tokens"] * types and max(made) <= 16 * torch.get_num_threads() * 50


@pytest.mark.parametrize(
    ("engine", "specs"),
    [
        ("fast", ["longrope:factors=1+1", "rope:scaling=linear,factor=1", "rerope:window=99"]),
        ("fairseq", ["longrope:factors=1+1"]),
    ],
)
def test_an_encoding_in_place_of_the_checkpoints_has_its_rotation(engine, specs, state, text, tmp_path):
    """What a spec leaves open is the checkpoint's: these change nothing, and the results name what was evaluated."""
    rotation = "base=500,rotary_fraction=0.5"
    command = ("eval", checkpoint_with(state, tmp_path, f"rope:{rotation}"), text, "--lengths", 37, "--engine", engine)
    [plain] = rows_of(*command)
    for spec in specs:
        [row] = rows_of(*command, "--rpe", spec)
        assert row["ppl"] == pytest.approx(plain["ppl"], rel=1e-6), spec
        assert row["rpe"] == f"{spec},{rotation}"


def test_random_positions_are_drawn_for_each_block(state, text, tmp_path):
    """Which blocks share a batch does not matter, other draws are others, and results know their number."""
    checkpoint, out = checkpoint_with(state, tmp_path, "rope"), tmp_path / "rows.jsonl"
    command = ("eval", checkpoint, text, "--lengths", 37)
    [one] = rows_of(*command, *RANDOM, "--out", out)
    [two] = rows_of(*command, *RANDOM, "--batch-size", 2)
    assert two["loss_base2"] == pytest.approx(one["loss_base2"], rel=1e-6)
    assert one["draws"] == 1 and "draws" not in rows_of(*command)[0]
    request = TextRequest(checkpoint=checkpoint, data=text, lengths=[37], positions_eval=RANDOM[1], device="cpu")
    model, task = loading.load_model(checkpoint, request, text)
    total, losses, segments = corpus_files.count_tokens(text, "test"), [], []
    for model.decoder.position_transforms.sample in range(2):
        segments.append(SegmentSums(total, corpus_files.document_ends(text, "test"), torch.device("cpu")))
        nats, _ = losses_by_position(
            model, perplexity.make_batches(request, task, 37, 2048), 37, PAD, lambda scored: None, segments[-1]
        )
        losses.append(bits(float(nats.sum()), total))
    assert losses[0] == pytest.approx(one["loss_base2"], rel=1e-9) and losses[1] != losses[0]
    [mean] = rows_of(*command, *RANDOM, "--position-samples", 2, "--out", out)
    assert mean["loss_base2"] == pytest.approx(sum(losses) / 2, rel=1e-9)
    assert (mean["draws"], mean["tokens"]) == (2, total)
    stored = results.read_results(results.TextResult, out)[-1].segments
    mean_sums = sum(sums.pack(37, draws=1).sums() for sums in segments) / 2
    assert len(mean_sums) > 2
    assert stored.sums() == pytest.approx(mean_sums, rel=1e-6)
    rows_of(*command, *RANDOM, "--position-samples", 1, "--out", out)
    assert [json.loads(line)["draws"] for line in out.read_text().splitlines()] == [1, 2]


def test_an_encoding_of_the_fairseq_engine_is_not_the_next_ones(state, text, tmp_path, monkeypatch):
    """Also where the module of fairseq-eval-lm, whose guard counts tokens, is imported after the models."""
    import fairseq_cli

    monkeypatch.delitem(sys.modules, "fairseq_cli.eval_lm", raising=False)
    monkeypatch.delattr(fairseq_cli, "eval_lm", raising=False)
    command = ("eval", checkpoint_with(state, tmp_path), text, "--lengths", 64)
    [plain] = rows_of(*command)
    [other] = rows_of(*command, "--engine", "fairseq", "--rpe", "nope")
    assert other["tokens"] == corpus_files.count_tokens(text, "test")
    [again] = rows_of(*command)
    assert again["loss_base2"] == plain["loss_base2"] != pytest.approx(other["loss_base2"], rel=1e-6)


def test_pruned_evaluation(state, corpus, tmp_path):
    """Close to the exact loss, and a measurement that is kept beside it."""
    words = (checkpoint_with(state, tmp_path), corpus, "--lengths", "1200", "--out", tmp_path / "eval.jsonl")
    [exact] = rows_of("eval", *words)
    [row] = rows_of("eval", *words, "--attention-prune", "1e-4")
    assert row["attention_prune"] == 1e-4 and "attention_prune" not in exact
    assert row["loss_base2"] == pytest.approx(exact["loss_base2"], rel=1e-3)
    assert row["loss_base2"] != exact["loss_base2"] and rows_of("eval", *words) == [exact]


def test_the_backend_of_an_evaluation(state, text, tmp_path, monkeypatch):
    """Kernels in place of the checkpoint's backend, pruned as well; what they refuse is one line."""
    pytest.importorskip("triton", reason="needs the package triton")
    from fairseq_rpe.attention import prune
    from fairseq_rpe.attention.triton import autograd, tuning

    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 32, "BLOCK_N": 32})
    for module in (prune, autograd):
        monkeypatch.setattr(module, "BLOCK", 32)  # keys that are left out together
    decided, decide = [], autograd.first_kept_key
    monkeypatch.setattr(autograd, "first_kept_key", lambda *rest: decided.append(decide(*rest)) or decided[-1])
    command = ("eval", checkpoint_with(state, tmp_path, decoder_attention_heads=1), text, "--lengths", 70)
    [plain] = rows_of(*command)
    [kernels] = rows_of(*command, "--attention-backend", "triton")
    assert kernels["loss_base2"] == pytest.approx(plain["loss_base2"], rel=1e-5) and not decided
    flags = ("--attention-backend", "triton", "--attention-prune", "1e-4")
    [pruned] = rows_of(*command, *flags)
    assert pruned["loss_base2"] == pytest.approx(plain["loss_base2"], rel=1e-3) and decided
    assert "head widths from 32" in refusal("eval", checkpoint_with(state, tmp_path), text, "--lengths", 64, *flags)


def test_contexts_are_those_of_the_training_unless_others_are_named(state, text, tmp_path):
    streams, within, separate = "across documents", "within documents", "separate documents in one row"
    documents = {"": within, "--blocks stream": streams, "--blocks document": within}
    others = {"": separate, "--no-separate-documents": streams, "--separate-documents": separate}
    others["--blocks document"] = within
    for task, rows in (({"blocks": "document"}, documents), ({"blocks": "stream", "separate_documents": True}, others)):
        trained = checkpoint_with(state, tmp_path, task={"_name": "rpe_language_modeling", **task})
        command = ("eval", trained, text, "--lengths", 37, "--out", tmp_path / f"{len(rows)}.jsonl")
        found = {flags: rows_of(*command, *flags.split())[0] for flags in rows}
        assert {flags: row["context"] for flags, row in found.items()} == rows
        assert len({row["loss_base2"] for row in found.values()}) == len(set(rows.values()))
        assert len({key_of(row) for row in found.values()}) == len(rows)
        assert len((tmp_path / f"{len(rows)}.jsonl").read_text().splitlines()) == len(rows)


def test_checkpoint_is_loaded_once_and_results_are_kept(state, text, tmp_path, monkeypatch):
    command = ("eval", checkpoint_with(state, tmp_path), text, "--out", out := tmp_path / "eval.jsonl", "--lengths")
    slow = rows_of(*command, "37", "--engine", "fairseq")
    assert "positions_loss" not in slow[0]
    loading_once = mock.Mock(wraps=loading.checkpoint_utils.load_model_ensemble_and_task)
    monkeypatch.setattr(loading.checkpoint_utils, "load_model_ensemble_and_task", loading_once)
    both = rows_of(*command, "64,37,16")
    assert [row["engine"] for row in both] == ["fast", "fairseq", "fast"] and both[1] == slow[0]
    assert loading_once.call_count == 1
    older = [{k: v for k, v in row.items() if k not in ("engine", "peak_mb", "positions_loss")} for row in both]
    out.write_text("".join(json.dumps(row) + "\n" for row in older))
    assert rows_of(*command, "37,16,64") == [older[1], older[2], older[0]]
    assert loading_once.call_count == 1 and len(out.read_text().splitlines()) == 3
    argv = ["eval", "--json", *map(str, command[1:]), "64,37"]
    code = f"import sys; from fairseq_rpe.cli.main import main; assert main({argv}) == 0; "
    done = run(sys.executable, "-c", code + "assert not {'torch', 'fairseq'} & set(sys.modules)")
    assert [json.loads(line) for line in done.stdout.splitlines()] == older[:2]


def test_a_table_has_ratios_to_the_training_length(state, text, tmp_path, monkeypatch):
    """Whatever the order: a ratio waits for the perplexity at the training length, or for its failure."""
    words = (checkpoint_with(state, tmp_path), text, "--lengths")
    rows = rows_of("eval", *words, f"16,{TRAINED}")
    head, *lines = table_of(*words, f"16,{TRAINED}")
    assert head == ["length", "perplexity", f"ratio to {TRAINED}", "tokens", "seconds"]
    for line, row in zip(lines, rows, strict=True):
        ratio = row["ppl"] / rows[1]["ppl"]
        assert line[:4] == [str(row["length"]), f"{row['ppl']:,.2f}", f"{ratio:.3f}", f"{row['tokens']:,}"]
    head, line = table_of(*words, "16")
    assert head == ["length", "perplexity", "tokens", "seconds"] and line[1] == f"{rows[0]['ppl']:,.2f}"
    whole = perplexity.losses_by_position

    def fails(model, batches, length, *rest):
        if length == TRAINED:
            raise UserError("no more")
        return whole(model, batches, length, *rest)

    monkeypatch.setattr(perplexity, "losses_by_position", fails)
    said = run_here("eval", *words, f"16,{TRAINED}", "--device", "cpu", ok=False)
    assert [line.split()[0] for line in said.stdout.splitlines()] == ["length", "16"] and "no more" in said.stderr


def test_lengths_have_a_default(state, text, tmp_path, monkeypatch, capsys):
    """1, 2, 4, 8 and 16 times the training length, to where the text, a document, the table or the positions end."""
    checkpoint, total = checkpoint_with(state, tmp_path), corpus_files.count_tokens(text, "test")
    longest = corpus_files.longest_document(text, "test")
    assert 64 <= longest < 128 <= total < 256
    _, *lines = table_of(checkpoint, text)
    assert [line[0] for line in lines] == ["32", "64", "128"] and lines[0][2] == "1.000"
    for flags, lengths, why in (
        ((None, None), [32, 64, 128], f"text/test has {total} tokens"),
        (("learned", None), [32], "'learned' has 32 positions"),
        (("tupe:max_positions=64", None), [32, 64], "'tupe' has 64 positions"),
        ((None, "randomized:max_position=64"), [32, 64], "has 64 positions"),
        ((None, None, "document"), [32, 64], f"the longest document of {text}/test has {longest} tokens"),
    ):
        assert default_lengths(checkpoint, text, "test", *flags) == lengths
        assert why in capsys.readouterr().err
    assert default_lengths(checkpoint, text, "test", "learned:max_positions=64", None) == [32, 64]
    head, *rows = table_of(checkpoint, text, "--blocks", "document")
    assert head[-1] == "context" and [row[0] for row in rows] == ["32", "64"]
    assert all(row[-1] == "within documents" for row in rows)
    monkeypatch.setattr(checkpoints.RpeCheckpoint, "train_length", lambda _: None)
    assert f"{checkpoint} does not record its training length: use --lengths" in refusal("eval", checkpoint, text)


def test_corpora_that_know_their_text_give_bits_per_byte(state, text, tmp_path):
    data = Path(shutil.copytree(text, tmp_path / "data"))
    command = ("eval", checkpoint_with(state, tmp_path), data, "--lengths", 64)
    assert "bits_per_byte" not in rows_of(*command)[0]

    def describe(tokens: int) -> None:
        counts = {"tokens": tokens, "bytes": 5000, "words": 700, "documents": 3}
        (data / "corpus.json").write_text(json.dumps({"made_by": MADE_BY, "splits": {"test": counts}}))

    describe(tokens := corpus_files.count_tokens(data, "test"))
    [row] = rows_of(*command)
    assert row["bits_per_byte"] == pytest.approx(row["loss_base2"] * tokens / 5000)
    assert math.log2(row["word_ppl"]) == pytest.approx(row["loss_base2"] * tokens / 700)
    describe(tokens + 1)
    assert f"counts {tokens + 1} tokens in test where the data have {tokens}" in refusal(*command)


@pytest.mark.parametrize("engine", ["fast", "fairseq"])
def test_data_of_another_vocabulary_are_refused(engine, state, text, tmp_path):
    """Of the same size, so that nothing but the numbers would be wrong."""
    data = Path(shutil.copytree(text, tmp_path / "data"))
    first, second, *lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join([second, first, *lines]) + "\n")
    error = refusal("eval", checkpoint_with(state, tmp_path), data, "--lengths", 32, "--engine", engine)
    assert "another vocabulary" in error and "--vocab-from" in error


REFUSALS = [
    ("alibi", {}, "--position-samples 3", "--position-samples 3: positions are not random"),
    (
        "alibi",
        {},
        "--position-samples 3 --positions-eval randomized:max_position=99 --engine fairseq",
        "--position-samples needs --engine fast",
    ),
    ("alibi", {"self_target": True}, "", "trained with --self-target, .*or use --engine fairseq"),
    ("alibi", {"output_dictionary_size": 9}, "", "trained with --output-dictionary-size, .*or use --engine fairseq"),
    ("alibi", {"algorithm": "copy"}, "", "algorithmic task: this command is for text$"),
    ("alibi", {"blocks": "chapters"}, "", "blocks is 'chapters'"),
    ("alibi", {"separate_documents": "yes"}, "", "separate_documents is 'yes'"),
    ("learned", {}, "", "beyond the 32 positions"),
    ("alibi", {}, "--rpe dual_chunk", "was with 'alibi'"),
    ("rope:base=500", {}, "--rpe rerope:base=10000", "give base=500"),
    ("rope:base=500", {}, "--rpe longrope:base=10000 --engine fairseq", "give base=500"),
    ("alibi", {}, "--attention-prune 1e-4 --attention-backend flex", "prunes on the backends sdpa and triton"),
    ("alibi", {}, "--attention-prune 1e-4 --engine fairseq", "--attention-prune needs --engine fast"),
    ("alibi", {}, "--attention-prune 1e-4 --rpe nope", "cannot be pruned"),
    ("alibi", {}, "--separate-documents --blocks document", "--separate-documents needs --blocks stream"),
    ("alibi", {}, "--separate-documents --attention-prune 0.1", "does not go with --separate-documents"),
    ("alibi", {}, "--separate-documents --positions-eval interpolate", "--blocks document"),
    ("rope:scaling=dynamic_ntk,original_length=32", {}, "--separate-documents", "--blocks document"),
    ("alibi", {}, "--blocks document --lengths 128", "has [0-9]+ tokens, less than one block of 128"),
]


@pytest.mark.parametrize(("spec", "task", "flags", "words"), REFUSALS)
def test_what_cannot_be_measured_is_refused(state, text, tmp_path, spec, task, flags, words):
    lengths = () if "--lengths" in flags else ("--lengths", 64)
    error = refusal("eval", checkpoint_with(state, tmp_path, spec, task=task), text, *lengths, *flags.split())
    assert re.search(words, error.strip()), error


def test_documents_that_are_not_marked_are_refused(state, corpus, tmp_path):
    error = refusal("eval", checkpoint_with(state, tmp_path), corpus, "--lengths", 32, "--blocks", "document")
    assert f"{corpus}/test has no document boundaries" in error and "--blocks stream" in error


def test_other_models_are_refused_and_fairseq_named(state, text, tmp_path):
    model = {key: value for key, value in state["cfg"]["model"].items() if not key.startswith("rpe")}
    cfg = {**state["cfg"], "model": {**model, "_name": "transformer_lm", "arch": "transformer_lm"}}
    torch.save({**state, "cfg": cfg}, tmp_path / "stock.pt")
    command = ("eval", tmp_path / "stock.pt", text, "--lengths", 32)
    assert re.search("its model is 'transformer_lm'.* or use --engine fairseq", refusal(*command))
    error = refusal(*command, "--engine", "fairseq", "--separate-documents")
    assert re.search("is not of this plugin.*drop --separate-documents", error)


def test_losses_that_are_no_numbers_are_refused(state, text, tmp_path):
    def checkpoint(name: str, factor: float) -> Path:
        return checkpoint_with({**state, "model": {**state["model"], name: factor * state["model"][name]}}, tmp_path)

    command = ("eval", checkpoint("decoder.embed_tokens.weight", math.nan), text, "--lengths", 64)
    for engine in ("fast", "fairseq"):
        assert "probability 0 or NaN" in refusal(*command, "--engine", engine)
    path = checkpoint("decoder.output_projection.weight", 3e4)
    assert "overflows a float, with a loss of" in refusal("eval", path, text, "--lengths", 64)
    flags = ["--windows", 16, "--stride", 16, "--first-tokens", 64, "--out", tmp_path / "out"]
    assert "overflows a float, with a loss of" in refusal("sliding", path, text, *flags)
    assert not (tmp_path / "out" / "sliding.jsonl").exists()


def test_tokens_that_were_not_scored_are_refused(state, text, tmp_path, monkeypatch):
    whole, out = perplexity.make_batches, tmp_path / "eval.jsonl"

    def without_last_column(*words):
        for batch in whole(*words):
            yield TokenBatch(batch.inputs[:, :-1], batch.targets[:, :-1], begins=batch.begins)

    monkeypatch.setattr(perplexity, "make_batches", without_last_column)
    error = refusal("eval", checkpoint_with(state, tmp_path), text, "--lengths", 37, "--out", out)
    assert "tokens were scored, so the result is not stored" in error and not out.exists()


def test_a_changed_file_of_encodings_is_another_measurement(state, text, tmp_path):
    file = tmp_path / "steps.py"
    request = results.TextRequest(
        checkpoint=checkpoint_with(state, tmp_path), data=text, lengths=[64], rpe="steps", rpe_module=file
    )
    keys = []
    for source in ("SLOPE = 0.1", "SLOPE = 5.0", "SLOPE = 0.1"):
        file.write_text(source)
        keys += request.keys()
    assert keys[0] == keys[2] != keys[1]


def test_a_mistake_in_an_encoding_of_a_file_is_told_with_its_place(state, text, tmp_path):
    file = tmp_path / "my_encoding.py"
    lines = ["from fairseq_rpe.encodings import DistanceBias, register", "@register('test_wrong')"]
    file.write_text("\n".join([*lines, "class Wrong(DistanceBias):", "    def bias(self, d):", "        return -d"]))
    flags = ("--lengths", 64, "--rpe", "test_wrong", "--rpe-module", file)
    said = refusal("eval", checkpoint_with(state, tmp_path), text, *flags)
    assert "Wrong.bias returned (64,), expected (4, 64)" in said and f"{file}:4" in said

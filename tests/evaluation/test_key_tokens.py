"""Key tokens and LongPPL: against the definition, window by window; the file, the command, and what is refused."""

from __future__ import annotations

import functools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import checkpoint_with, make_model, run_here, with_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import EOS, reference_losses, refusal, rows_of

from fairseq_rpe.cli.main import build_parser
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.evaluation import key_token_records, key_tokens, losses_by_token
from fairseq_rpe.evaluation.key_token_records import (
    KeyTokenRequest,
    KeyTokenSettings,
    is_key_token_file,
    read_key_tokens,
)

SYMBOLS = 5
SIZE = st.integers(1, 9)
TOKENS = st.integers(0, SYMBOLS - 1)


class Counting(torch.nn.Module):
    """A model with P(x | inputs) = (1 + number of x in the inputs) / (number of inputs + number of symbols)."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))

    @staticmethod
    def loss(inputs: list[int], target: int) -> float:
        return -math.log((1 + inputs.count(target)) / (len(inputs) + SYMBOLS))


def counting_losses(model: Counting, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In place of ``token_losses``: the losses of targets at the last positions of the inputs."""
    n, s = inputs.shape[1], targets.shape[1]
    return torch.tensor(
        [
            model.loss(row[: n - s + j + 1], target)
            for row, row_targets in zip(inputs.tolist(), targets.tolist(), strict=True)
            for j, target in enumerate(row_targets)
        ]
    )


def definition(stream: list[int], ends: list[int], k: int, stretch: int, alpha: float, beta: float) -> list[int]:
    """The key tokens by the words of the paper: token h of a block is its input h, and the first one has no loss."""
    keys, begin = [], 0
    for end in ends:
        block = stream[begin : end + 1]
        for h in range(1, len(block)):
            if h < k:
                continue
            start = (h - k) // stretch * stretch  # K before the stretch of h
            lcl = -Counting.loss(block[:h], block[h])
            lsd = lcl + Counting.loss(block[start:h], block[h])
            assert k <= h - start < k + stretch
            if lsd > alpha and lcl > beta:
                keys.append(begin + h - 1)
        begin = end
    return keys


def settings_of(**changes) -> KeyTokenSettings:
    return KeyTokenSettings(
        **{
            **{"evaluator": "e", "data": "d", "vocabulary": "v", "split": "test", "blocks": "stream", "length": 9},
            **{"short_context": 2, "stretch": 1, "alpha": 0.1, "beta": -2.0, **changes},
        }
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=25), min_size=1, max_size=3),
    SIZE,
    SIZE,
    st.sampled_from([0.0, 0.1, 0.3]),
    st.sampled_from([-1.2, -2.0]),
)
def test_key_tokens_and_long_ppl_are_those_of_the_definition(blocks, k, stretch, alpha, beta):
    stream = [EOS, *(token for block in blocks for token in block)]
    ends = np.cumsum([len(block) for block in blocks])
    longest, model = max(map(len, blocks)), Counting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses_by_token, "token_losses", counting_losses)
        windows = losses_by_token.block_windows(ends, longest)
        long = losses_by_token.losses_by_token(model, torch.tensor(stream), windows, 20, "")
        windows = losses_by_token.short_windows(ends, k, stretch)
        short = losses_by_token.losses_by_token(model, torch.tensor(stream), windows, 20, "")
    options = settings_of(short_context=k, stretch=stretch, alpha=alpha, beta=beta)
    # 1e-6 apart: the losses here are float32, those of the definition float64
    found = key_tokens.select_key_tokens(long + 1e-6, short, key_tokens.context_lengths(ends), options)
    wanted = definition(stream, ends.tolist(), k, stretch, alpha + 1e-6, beta)
    assert found.tolist() == wanted
    if wanted:
        begins = [max([0, *(e for e in ends.tolist() if e <= i)]) for i in wanted]
        logs = [-Counting.loss(stream[b : i + 1], stream[i + 1]) for b, i in zip(begins, wanted, strict=True)]
        long_ppl = math.exp(-sum(logs) / len(logs))
        assert 2 ** key_tokens.mean_bits(long[found]) == pytest.approx(long_ppl, rel=1e-5)


def test_a_case_by_hand():
    """K = 2, stretch 2: the last token is predicted from all four inputs, and from the last two."""
    stream, ends = [EOS, 1, 0, 0, 1], [4]
    # Of the inputs 2 1 0 0, one is the target 1: P = (1 + 1) / (4 + 5). Of the short context 0 0, none is: P = 1 / 7.
    gain = math.log(2 / 9) - math.log(1 / 7)
    assert definition(stream, ends, 2, 2, gain - 1e-9, -2.0) == [3]
    assert definition(stream, ends, 2, 2, gain + 1e-9, -2.0) == []
    assert definition(stream, ends, 2, 2, 0.1, math.log(2 / 9) + 1e-9) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(SIZE, min_size=1, max_size=4), SIZE, SIZE, st.data())
def test_far_inputs_are_replaced_and_near_ones_remain(sizes, k, stretch, data):
    """Stream i is the number i, so inputs show from where they are."""
    ends, tokens = np.cumsum(sizes), sum(sizes)
    numbers = torch.arange(tokens + 1)
    chosen = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1)))
    seen: dict[int, list[int]] = {}

    def record(model, inputs, targets):
        for row, row_targets in zip(inputs.tolist(), targets.tolist(), strict=True):
            for j, target in enumerate(row_targets):
                assert target - 1 not in seen
                seen[target - 1] = row[: len(row) - len(row_targets) + j + 1]
        return torch.zeros(targets.numel())

    windows = losses_by_token.windows_with(losses_by_token.short_windows(ends, k, stretch), np.array(chosen))
    windows = losses_by_token.extend_to_blocks(windows, ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses_by_token, "token_losses", record)
        losses = losses_by_token.losses_by_token(Counting(), numbers, windows, 30, "", near=k - 1)
    assert set(chosen) <= set(seen) and np.isnan(losses).sum() == tokens - len(seen)
    for target, inputs in seen.items():
        begin = max([0, *(end for end in ends.tolist() if end <= target)])
        context = target - begin + 1
        near = context if context < k else k + (context - k) % stretch
        assert inputs[context - near :] == list(range(target - near + 1, target + 1))
        far = range(begin, target - near + 1)
        assert inputs[: context - near] == [1 + (i + tokens // 2) % tokens for i in far]


def test_losses_are_those_of_each_block_alone(task):
    model = make_model(task, "alibi", decoder_layers=1)
    text = torch.randint(4, 60, (50,), generator=torch.Generator().manual_seed(3))
    ends = np.array([7, 30, 50])
    stream = torch.cat([torch.tensor([EOS]), text])
    found = losses_by_token.losses_by_token(model, stream, losses_by_token.block_windows(ends, 23), 40, "")
    first = torch.tensor([max([0, *(e for e in ends.tolist() if e <= i)]) for i in range(50)])
    np.testing.assert_allclose(found, reference_losses(model, text, first), rtol=1e-5)


@pytest.fixture(scope="module")
def reference(state, tmp_path_factory):
    return checkpoint_with(state, tmp_path_factory.mktemp("reference"), "nope")


@pytest.fixture(scope="module")
def checkpoint(state, tmp_path_factory):
    return checkpoint_with(state, tmp_path_factory.mktemp("windowed"), "window:window=3")


FIND = ("--short-context", 8, "--length", 32, "--alpha", 0.2, "--beta", -50, "--device", "cpu")


@pytest.fixture(scope="module")
def key_file(reference, corpus, made_once):
    def fill(folder):
        run_here("key-tokens", reference, corpus, "--out", folder / "keys.json", *map(str, FIND))

    return made_once("key-tokens", fill) / "keys.json"


def test_the_file_has_the_indices_and_all_settings(reference, corpus, key_file, monkeypatch):
    stored = read_key_tokens(key_file)
    assert is_key_token_file(key_file) and not is_key_token_file(reference)
    assert (stored.short_context, stored.stretch, stored.length, stored.blocks) == (8, 2, 32, "stream")
    ids, _ = corpus_files.read_split(corpus, "test")
    context = [i % 32 + 1 for i in stored.indices]
    assert min(context) >= 8 and stored.tokens == len(ids) and 0 < len(stored.indices) < stored.candidates
    # the increase of each key token is more than α, so that of the mean is, too
    assert stored.short_loss_base2 - stored.key_loss_base2 > 0.2 / math.log(2)
    # found, not measured again
    monkeypatch.setattr(key_tokens, "load_model", None)
    done = run_here("key-tokens", reference, corpus, "--out", key_file, *map(str, FIND))
    assert f"key tokens: {len(stored.indices):,} of" in done.stdout


def test_an_edited_module_makes_other_key_tokens(reference, corpus, tmp_path):
    module, digests = tmp_path / "mine.py", set()
    for text in ("A = 1\n", "A = 2\n"):
        module.write_text(text)
        request = KeyTokenRequest(checkpoint=reference, data=corpus, short_context=8, length=32, rpe_module=module)
        digests.add(request.settings({}).digest)
    assert len(digests) == 2


def test_eval_scores_the_key_tokens_at_each_length(checkpoint, corpus, key_file, tmp_path, monkeypatch):
    out = tmp_path / "keys.jsonl"
    command = (checkpoint, corpus, "--lengths", "4,32", "--out", out)
    rows = rows_of("eval", *command, "--key-tokens", key_file)
    plain = rows_of("eval", checkpoint, corpus, "--lengths", "4,32")
    stored = read_key_tokens(key_file)
    for row, same in zip(rows, plain, strict=True):
        assert row["loss_base2"] == pytest.approx(same["loss_base2"], rel=1e-6) and row["tokens"] == same["tokens"]
        assert row["long_ppl"] == pytest.approx(2 ** row["key_loss_base2"])
        assert row["key_count"] == len(stored.indices) and row["key_share"] == pytest.approx(stored.share)
    # a model that sees two layers of three tokens reads nothing beyond the short context
    assert rows[1]["key_loss_base2"] == pytest.approx(rows[1]["short_loss_base2"], rel=1e-6)
    assert rows[0]["key_loss_base2"] != pytest.approx(rows[1]["key_loss_base2"], rel=1e-4)
    monkeypatch.setattr(key_tokens, "load_model", None)
    assert rows_of("eval", *command, "--key-tokens", key_file) == rows
    for least, has_note in ((len(stored.indices), False), (len(stored.indices) + 1, True)):
        monkeypatch.setattr(key_token_records, "MIN_KEY_TOKENS", least)
        shown = run_here("eval", *map(str, command), "--key-tokens", key_file).stdout
        assert ("too few for a verdict" in shown) is has_note


def test_results_on_key_tokens_and_on_all_tokens_share_a_file(checkpoint, corpus, key_file, tmp_path):
    out = tmp_path / "results.jsonl"
    text = ("eval", checkpoint, corpus, "--lengths", 32, "--out", out)
    kinds = ("--key-tokens", key_file), ("--blocks", read_key_tokens(key_file).blocks)
    for flags in (*kinds, *kinds):
        rows_of(*text, *flags)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [("key_tokens" in row, "segments" in row) for row in rows] == [(True, False), (False, True)]


def test_other_text_in_place_of_the_far_context_raises_the_loss_of_a_model_that_reads_it(
    reference, checkpoint, corpus, key_file
):
    flags = ("--lengths", 32, "--key-tokens", key_file, "--shuffle-far")
    [far] = rows_of("eval", reference, corpus, *flags, "--allow-self-evaluation")
    assert far["shuffled_loss_base2"] > far["key_loss_base2"] + 0.1
    [near] = rows_of("eval", checkpoint, corpus, *flags)
    assert near["shuffled_loss_base2"] == pytest.approx(near["key_loss_base2"], rel=1e-6)


def test_a_reference_checkpoint_in_place_of_a_file(reference, checkpoint, corpus, tmp_path, monkeypatch):
    # a model of four updates has no key tokens by the usual thresholds
    request = functools.partial(key_tokens.KeyTokenRequest, alpha=0.05, beta=-50.0)
    monkeypatch.setattr(key_tokens, "KeyTokenRequest", request)
    out = tmp_path / "keys.jsonl"
    command = ("eval", checkpoint, corpus, "--lengths", 32, "--out", out, "--key-tokens", reference, "--device", "cpu")
    first = run_here(*map(str, command)).stdout
    [stored] = tmp_path.glob("key-tokens-*.json")
    assert read_key_tokens(stored).short_context == 32 and "with 32" in first
    out.unlink()
    monkeypatch.setattr(key_tokens, "select_key_tokens", None)  # the stored ones are read
    again = run_here(*map(str, command)).stdout
    assert [line.split()[:5] for line in again.splitlines()] == [line.split()[:5] for line in first.splitlines()]


def test_documents_are_apart(reference, corpus, tmp_path):
    data = with_documents(corpus, tmp_path)
    run_here("key-tokens", reference, data, "--out", tmp_path / "keys.json", *map(str, FIND))
    stored = read_key_tokens(tmp_path / "keys.json")
    ends = corpus_files.document_ends(data, "test")
    begins = np.concatenate(([0], ends[:-1]))[np.searchsorted(ends, stored.indices, side="right")]
    assert stored.blocks == "document" and ((np.array(stored.indices) - begins) % 32 + 1 >= 8).all()


def test_what_is_refused(reference, checkpoint, corpus, key_file, tmp_path):
    evaluate = ("eval", checkpoint, corpus, "--lengths", 32)
    own = refusal("eval", reference, corpus, "--lengths", 32, "--key-tokens", key_file)
    assert "that it chose itself" in own and "--allow-self-evaluation" in own
    own = refusal(*evaluate, "--key-tokens", checkpoint)
    assert "that it chose itself" in own
    other = shutil.copytree(corpus, tmp_path / "other")
    shutil.copyfile(corpus / "valid.bin", other / "test.bin")
    shutil.copyfile(corpus / "valid.idx", other / "test.idx")
    assert "of another corpus" in refusal("eval", checkpoint, other, "--lengths", 32, "--key-tokens", key_file)
    words = (other / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join([words[1], words[0], *words[2:]]) + "\n")
    assert "of another tokenizer" in refusal("eval", checkpoint, other, "--lengths", 32, "--key-tokens", key_file)
    assert "use --split test" in refusal(*evaluate, "--split", "valid", "--key-tokens", key_file)
    for flag in (("--engine", "fairseq"), ("--blocks", "stream"), ("--position-samples", 2), ("--batch-size", 3)):
        assert f"{flag[0]} does not go with --key-tokens".replace("engine does", "engine fairseq does") in refusal(
            *evaluate, "--key-tokens", key_file, *flag
        )
    assert "--shuffle-far needs --key-tokens" in refusal(*evaluate, "--shuffle-far")
    tokens = corpus_files.count_tokens(corpus, "test")
    flags = ("--lengths", tokens // 2 + 1, "--key-tokens", key_file, "--shuffle-far")
    assert "less than two blocks" in refusal("eval", checkpoint, corpus, *flags)
    random = ("--positions-eval", "randomized:max_position=99")
    assert "random positions" in refusal(*evaluate, "--key-tokens", key_file, *random)


def test_what_key_tokens_refuses(reference, corpus, key_file, tmp_path):
    def error(*flags: object) -> str:
        return refusal("key-tokens", reference, corpus, *flags)

    out = ("--out", tmp_path / "k.json")
    changed = ("--short-context", 4, "--length", 32)
    assert "another short_context: name another file" in error("--out", key_file, *changed)
    assert "finds no key tokens" in error(*out, "--short-context", 8, "--alpha", 99)
    assert "need at least 10 tokens" in error(*out, "--short-context", 8, "--length", 9)
    assert "--beta 1 is not a log-probability" in error(*out, "--short-context", 8, "--beta", 1)
    assert not (tmp_path / "k.json").exists()


def test_the_command_and_the_record_have_the_thresholds_of_the_paper():
    line = ["key-tokens", "c", "d", "--out", "o", "--short-context", "4"]
    parsed, request = build_parser("key-tokens").parse_args(line), key_token_records.KeyTokenRequest
    assert (parsed.alpha, parsed.beta) == (request.alpha, request.beta) == (2.0, -2.0)


def test_a_damaged_file_is_refused(checkpoint, corpus, key_file, tmp_path):
    row = json.loads(key_file.read_text())
    bad = tmp_path / "bad.json"
    command = ("eval", checkpoint, corpus, "--lengths", 32, "--key-tokens", bad)
    for change, words in (
        ({"indices": [3, 3]}, "indices that do not increase"),
        ({"indices": [row["tokens"]]}, "where the split has"),
        ({"stretch": 0}, "stretch"),
    ):
        bad.write_text(json.dumps({**row, **change}))
        assert words in refusal(*command)
    bad.unlink()
    assert "does not exist: name a checkpoint or a file of key tokens" in refusal(*command)


def test_default_lengths_are_as_long_as_the_text_allows(reference, corpus):
    tokens = corpus_files.count_tokens(corpus, "test")
    request = key_tokens.KeyTokenRequest(checkpoint=reference, data=corpus, short_context=tokens // 5)
    chosen = key_tokens.resolve_settings(request)
    assert (chosen.length, chosen.stretch) == (4 * (tokens // 5), tokens // 5 // 4)
    assert chosen.length <= tokens

"""BiPE: counters of segments and places, both ways in attention against dense numpy, refusals, and checkpoints."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from conftest import make_model, save_checkpoint
from numeric import softmax, vectors
from refusal import refused

from fairseq_rpe import attend
from fairseq_rpe.analysis.convergence import DEPENDS, DIVERGES, verdict
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.bipe import count_segments, segment_delimiter_ids
from fairseq_rpe.evaluation.sliding_window_loss import cache_mismatch_reason
from fairseq_rpe.runs import checkpoints

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", ".", "a", "b", "Ġ.", "St."]
SHAPES = [(1, 1, 1), (2, 5, 2), (1, 9, 4), (2, 31, 2)]  # rows, tokens, heads
SEGMENT_ENDS = {2, 4, 7, 8}


def at(tokens: torch.Tensor, n: int | None = None, dtype=torch.float64) -> Positions:
    m = tokens.shape[1]
    k = torch.arange(m, dtype=dtype)[None]
    return Positions(k[:, m - (n or m) :], k, tokens=tokens)


def by_hand(tokens, ends) -> tuple[np.ndarray, np.ndarray]:
    """Segment and place of each token, one after another."""
    segments, places = np.zeros(tokens.shape, int), np.zeros(tokens.shape, int)
    for row, ids in enumerate(tokens.tolist()):
        segment = place = 0
        for t, one in enumerate(ids):
            segments[row, t], places[row, t] = segment, place
            if one >= 0:
                segment, place = (segment + 1, 0) if one in ends else (segment, place + 1)
    return segments, places


def test_counters():
    many = torch.randint(-1, 9, (50, 40), generator=torch.Generator().manual_seed(0))
    for got, expected in zip(count_segments(many, torch.tensor([2, 5])), by_hand(many, {2, 5}), strict=True):
        np.testing.assert_array_equal(got[many >= 0].numpy(), expected[(many >= 0).numpy()])


def test_the_scale_of_queries_counts_tokens_and_not_segments():
    ids = torch.tensor([[5, 6, 4, 5, 6, 4, 5, 6]])
    q, k, v = torch.randn(3, 1, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pos = at(ids)
    scaled, plain = (build(f"bipe{options}", 2, 16, symbols=SYMBOLS) for options in (":query_scale=ssmax", ""))
    factor = build("nope:query_scale=ssmax", 2, 16).query_scale(pos)
    expected = attend(q * factor, k, v, plain, positions=pos)
    torch.testing.assert_close(attend(q, k, v, scaled, positions=pos), expected)


def test_names_of_symbols():
    assert segment_delimiter_ids(["</s>", "."], SYMBOLS) == [2, 4, 7, 8]
    assert segment_delimiter_ids(["b"], SYMBOLS) == [6]  # a word is itself alone
    with refused(r"'bipe:segment_delimiters=</s>\+!': no symbol of the dictionary is or ends in '!'"):
        build("bipe:segment_delimiters=</s>+!", 2, 8, symbols=SYMBOLS)
    with refused("no symbol of the dictionary is 'St': name symbols that end a segment"):
        build("bipe:segment_delimiters=St", 2, 8, symbols=SYMBOLS)


@pytest.mark.parametrize(("rows", "n", "heads"), SHAPES)
def test_alibi_by_segments_is_its_equation(rows, n, heads):
    made, (q, k, v) = build("bipe:inter=alibi", heads, heads * 4, symbols=SYMBOLS), vectors(rows, heads, n, 4)
    ids = torch.randint(9, (rows, n), generator=torch.Generator().manual_seed(0))
    segments = by_hand(ids, SEGMENT_ENDS)[0][:, None]
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1)[:, None, None] / heads)
    bias = -96 * slopes * (segments[..., None] - segments[:, :, None])
    logits = (q @ k.mT).numpy() / 2 + np.where(np.tril(np.ones((n, n))) > 0, bias, -np.inf)
    expected = softmax(logits) @ v.numpy()
    np.testing.assert_allclose(attend(q, k, v, made, positions=at(ids)).numpy(), expected, rtol=1e-9, atol=1e-12)
    for backend in ("reference", "sdpa"):
        last = attend(q[:, :, -1:], k, v, made, positions=at(ids, 1), backend=backend)
        np.testing.assert_allclose(last[:, :, 0].numpy(), expected[:, :, -1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("rows", "n", "heads"), SHAPES)
def test_rotation_by_segments_is_ropes_at_those_positions(rows, n, heads):
    made, rope = build("bipe", heads, heads * 6, symbols=SYMBOLS), build("rope", heads, heads * 6)
    ids = torch.randint(9, (rows, n), generator=torch.Generator().manual_seed(0))
    q, k, v = vectors(rows, heads, n, 6)
    segments = by_hand(ids, SEGMENT_ENDS)[0]
    out = attend(q, k, v, made, positions=at(ids))
    torch.testing.assert_close(out, attend(q, k, v, rope, positions=torch.from_numpy(segments)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("intra", ["learned,max_intra=3", "sinusoidal"])
def test_vectors_of_places(intra):
    made = build(f"bipe:intra={intra}", 2, 8, symbols=SYMBOLS)
    ids = torch.tensor([[5, 6, 4, 5, 6, 5, 5, 5], [4, 4, 5, 6, 7, 8, 5, 6]])
    x, places = torch.randn(2, 8, 8), by_hand(ids, {4, 7, 8})[1]
    got = made.embed(x, at(ids, dtype=torch.float32)) - x
    if intra == "sinusoidal":
        rows = build("sinusoidal", 2, 8).vectors(torch.arange(9.0)[None])[0]
    else:
        rows = made.table[[0, 1, *[2] * 7]]
    torch.testing.assert_close(got, rows[torch.from_numpy(places)], rtol=1e-5, atol=1e-5)
    some = made.embed(x[:, 5:], at(ids, 3, dtype=torch.float32))
    torch.testing.assert_close(some - x[:, 5:], got[:, 5:], rtol=1e-5, atol=1e-5)
    if intra != "sinusoidal":
        got.square().sum().backward()
        assert made.table.grad.abs().sum(1).ne(0).all()


@pytest.mark.parametrize("spec", ["bipe", "bipe:inter=alibi"])
def test_without_tokens_or_dictionary(spec):
    made, empty = build(spec, 2, 8, symbols=SYMBOLS), build(spec, 2, 8)
    q = torch.randn(1, 2, 5, 4)
    with refused("'bipe' reads the tokens, which are not available here.*tokens=ids"):
        attend(q, q, q, made)
    with refused("does not know which tokens end a segment: pass symbols"):
        attend(q, q, q, empty, positions=at(torch.tensor([[5, 6, 4, 5, 5]])))
    with refused("acts at a model's input"):
        attend(q, q, q, spec)
    with refused("rotates queries and keys|where the text's segments end"):
        made.mask(5)
    assert not made.adds_bias
    with refused("depends on the tokens: bias_profile needs a bias of the distance alone"):
        made.bias_profile(5)
    assert {head.decision for head in verdict(made)} == {DIVERGES if spec == "bipe" else DEPENDS}
    for wrong in (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 5), torch.zeros(5, dtype=torch.int64)):
        with refused(r"tokens are int64 ids \(batch, 5\)"):
            Positions(torch.zeros(1, 5), torch.zeros(1, 5), tokens=wrong)


def test_a_checkpoint_alone_brings_its_symbols(tmp_path):
    def known(encoding):
        encoding.ends = torch.tensor([2, 4])

    path, (made,) = save_checkpoint(tmp_path, "bipe:inter=alibi", change=known)
    (found,) = checkpoints.load(path).load_encodings()
    assert found.ends.tolist() == [2, 4] and torch.equal(found.table, made.table)
    ids, q = torch.tensor([[5, 4, 6, 2, 5]]), torch.randn(1, 4, 5, 8)
    assert torch.equal(*(attend(q, q, q, one, positions=at(ids, dtype=torch.float32)) for one in (found, made)))
    state = {**made.state_dict(), "ends": torch.zeros(2, 2)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        build("bipe:inter=alibi", 4, 32).load_state_dict(state)


def test_kept_states_of_windows_are_refused(task):
    assert "depends on the previous tokens" in cache_mismatch_reason(
        make_model(task, "bipe:segment_delimiters=</s>+w1"), 8, 2
    )


def test_an_adapted_model_has_no_tokens_to_show():
    pytest.importorskip("transformers")
    adapter = importlib.import_module("fairseq_rpe.adapters.transformers")  # before what it keeps transformers from
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 9}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    for spec in ("bipe", "complex"):
        with refused(f"'{spec}' reads the tokens, which attention of transformers is not told"):
            adapter.use_encoding(model, spec)

"""Abacus embeddings and position coupling: published examples, random starts of training, refusals, and decoding."""

from __future__ import annotations

import pytest
import torch
from conftest import make_model, save_checkpoint
from numeric import vectors
from refusal import refused

from fairseq_rpe import attend
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build, contract
from fairseq_rpe.encodings.number_tokens import digit_indices
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.tasks.algorithmic import AlgorithmicConfig, AlgorithmicTask

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", "+", "=", *"0123456789"]
PAD = 1
# a base with a rotation, one with a bias of the distance, one with a bias of both positions, and none
ABACUS = ["abacus", "abacus:base=rope,rotary_fraction=0.5", "abacus:base=kerple_log", "abacus:base=fire"]


def ids(*rows: str) -> torch.Tensor:
    """Token ids (B, m); _ is padding, and . is </s>."""
    return torch.tensor([[-1 if c == "_" else SYMBOLS.index("</s>" if c == "." else c) for c in row] for row in rows])


def at(tokens: torch.Tensor, n: int | None = None) -> Positions:
    m = tokens.shape[1]
    k = torch.arange(m, dtype=torch.float32)[None]
    return Positions(k[:, m - (n or m) :], k, tokens=tokens)


def rows_added(encoding, tokens: torch.Tensor, n: int | None = None) -> torch.Tensor:
    """The row of the table that is added to each of the last n tokens, (B, n)."""
    n = n or tokens.shape[1]
    with torch.no_grad():
        added = encoding.embed(torch.zeros(len(tokens), n, 8), at(tokens, n))  # (B, n, C)
    is_row = (added[:, :, None] == encoding.table).all(-1)  # (B, n, R)
    assert (is_row.sum(-1) == 1).all()
    return is_row.byte().argmax(-1)


def test_indices_within_numbers():
    digits = torch.arange(6, 16)
    expected = [[1, 2, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert digit_indices(ids("12+345=753"), digits).tolist() == expected
    # padding neither counts nor ends a number; each row counts for itself
    mixed = ids("__12+3_45=753.", "9.12+345==7531")
    assert digit_indices(mixed, digits).tolist() == [
        [0, 0, 1, 2, 0, 1, 0, 2, 3, 0, 1, 2, 3, 0],
        [1, 0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4],
    ]
    encoding = build("abacus", 2, 8, symbols=SYMBOLS).eval()
    assert rows_added(encoding, ids("12+345=753")).tolist() == expected
    assert rows_added(encoding, ids("12+345=753"), 2).tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("order", "example", "expected"),
    [
        ("answer", "653+049=2070", [4, 3, 2, 1, 4, 3, 2, 1, 2, 3, 4, 5]),
        ("plain", "653+049=0702", [4, 3, 2, 1, 4, 3, 2, 6, 5, 4, 3, 2]),
        ("all", "356+940=2070", [2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 5]),
        ("answer", "_53+49=.", [0, 3, 2, 1, 3, 2, 1, 0]),
        ("plain", "7+8=157.4", [2, 1, 2, 4, 3, 2, 0, 0, 3]),  # more digits than the sum can have
    ],
)
def test_coupled_positions(order, example, expected):
    encoding = build(f"coupled:order={order}", 2, 8, symbols=SYMBOLS).eval()
    rows = ids(example, "5+31=72+1=+9"[: len(example)].ljust(len(example), "_"))
    assert rows_added(encoding, rows).tolist()[0] == expected
    expected = {"answer": [2, 1, 3, 2, 1, 2, 3], "plain": [2, 1, 3, 2, 5, 4, 3], "all": [2, 1, 2, 3, 1, 2, 3]}
    assert encoding.positions(at(ids("5+31=72")), 7)[0].tolist() == expected[order]


def test_sinusoids_of_coupled_positions():
    encoding, x = build("coupled:vectors=sinusoidal", 2, 8, symbols=SYMBOLS).eval(), torch.randn(1, 6, 8)
    expected = build("sinusoidal", 2, 8).vectors(torch.tensor([[3.0, 2, 1, 3, 2, 1]]))
    torch.testing.assert_close(encoding.embed(x, at(ids("53+49="))) - x, expected)
    assert encoding.positions(at(ids(f"{'1' * 200}+1=")), 203).max() == 201  # evaluation has no largest position


def test_one_offset_for_each_batch_of_training():
    encoding, tokens = build("abacus:rows=12,max_offset=4", 2, 8, symbols=SYMBOLS), ids("12+345=753", "9+8=71....")
    plain, seen = digit_indices(tokens, encoding.digits), set()
    for seed in range(40):
        torch.manual_seed(seed)
        rows = rows_added(encoding, tokens)
        torch.manual_seed(seed)
        assert torch.equal(rows, rows_added(encoding, tokens))
        k = int(rows.max()) - 3
        assert torch.equal(rows, torch.where(plain > 0, plain + k, 0))
        seen.add(k)
    assert seen == {0, 1, 2, 3}
    state = torch.get_rng_state()
    assert torch.equal(rows_added(encoding.eval(), tokens), plain) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("order", "starts"), [("answer", 6), ("plain", 5)])
def test_one_start_for_each_row_of_training(order, starts):
    """s is U{1 … max_position - len(answer)}; the position of = in a plain row is one larger than of its sum."""
    encoding = build(f"coupled:order={order},max_position=10", 2, 8, symbols=SYMBOLS)
    tokens = ids("653+049=0702").repeat(100, 1)
    plain = encoding.eval().positions(at(tokens), 12)
    torch.manual_seed(0)
    rows = rows_added(encoding.train(), tokens)
    moved = rows - plain
    assert torch.equal(moved, moved[:, :1].expand(-1, 12))
    assert moved.unique().tolist() == list(range(starts))
    torch.manual_seed(0)
    assert torch.equal(rows, rows_added(encoding, tokens))
    state = torch.get_rng_state()
    encoding.eval().positions(at(tokens), 12)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("spec", "symbols", "message"),
    [
        ("abacus", [*SYMBOLS, "12"], "'abacus' numbers the digits of a number, and the symbol '12' of the dictionary"),
        ("coupled", [*SYMBOLS, "Ġ7"], "'Ġ7' of the dictionary is not a single digit: use a dictionary in which each"),
        ("abacus", ["</s>", "h1", "a", "½"], "no symbol of the dictionary is a digit: use a dictionary"),
        ("coupled", ["1", "+"], "the dictionary has no symbol '=': train on the task 'addition'"),
        ("abacus:rows=9,max_offset=9", SYMBOLS, "'abacus:max_offset=9' leaves no row for a digit in a table of rows=9"),
        ("abacus:rope_base=500", SYMBOLS, "'abacus:base=nope' does not read rope_base"),
    ],
)
def test_refused_at_build(spec, symbols, message):
    with refused(message):
        build(spec, 2, 8, symbols=symbols)


def test_refused_at_use():
    x = torch.zeros(1, 12, 8)
    for name in ("abacus", "coupled"):
        with refused(f"'{name}' reads the tokens, which are not available here.*tokens=ids"):
            build(name, 2, 8, symbols=SYMBOLS).embed(x, Positions.arange(12))
        with refused(f"'{name}' does not know which tokens are digits: pass symbols=…"):
            build(name, 2, 8).embed(x, at(ids("653+049=2070")))
    abacus = build("abacus:rows=9,max_offset=5", 2, 8, symbols=SYMBOLS)
    with refused("a number of 5 digits is longer than 4, the most that 'abacus:rows=9' has with its random offsets"):
        abacus.embed(x, at(ids("12345+67890=")))
    with refused("a number of 9 digits is longer than 8, the most that 'abacus:rows=9' has rows for: train with more"):
        abacus.eval().embed(x, at(ids("123456789+1=")))
    coupled = build("coupled:max_position=4", 2, 8, symbols=SYMBOLS)
    for mode in (True, False):
        with refused("'coupled:max_position=4' has no positions for a row that needs 5: train with a larger max_pos"):
            coupled.train(mode).embed(x, at(ids("653+049=2070")))
    with refused("'coupled:order=answer' numbers the digits of an operand from its last digit: decode from a prompt"):
        build("coupled", 2, 8, symbols=SYMBOLS).eval().embed(x[:, :3], at(ids("65+3"), 3))


@pytest.mark.parametrize("spec", ABACUS)
def test_attention_is_that_of_the_base(spec):
    torch.manual_seed(0)
    encoding = build(spec, 2, 8, 16, symbols=SYMBOLS)
    q, k, v = vectors(2, 2, 9, 4)
    expected = attend(q, k, v, encoding.base)
    assert torch.equal(attend(q, k, v, encoding), expected)
    assert (spec == "abacus") == torch.equal(expected, attend(q, k, v, build("nope", 2, 8)))
    assert encoding.position_type == ("none" if spec == "abacus" else "any")


@pytest.fixture(scope="module")
def addition():
    """fairseq's task over the dictionary of the task ``addition``."""
    return AlgorithmicTask.setup_task(AlgorithmicConfig(algorithm="addition:items=4,order=all,padding=true"))


def random_tokens(task, rows: int, n: int) -> torch.Tensor:
    words = [task.source_dictionary.index(word) for word in "+=0123456789"]
    return torch.tensor(words)[torch.randint(len(words), (rows, n), generator=torch.Generator().manual_seed(0))]


def logits(model, tokens: torch.Tensor, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **options)[0]


@pytest.mark.parametrize("spec", [*ABACUS, "coupled:order=all"])
def test_decoding_and_padding_change_nothing(addition, spec):
    """A cached step equals the full pass, with padding before, inside and after rows."""
    model, x = make_model(addition, spec), random_tokens(addition, 3, 20)
    x[0, :3], x[1, 8:10], x[2, 17:] = PAD, PAD, PAD
    whole, state = logits(model, x), {}
    steps = [logits(model, x[:, :end], incremental_state=state) for end in (7, 8, 12, 13, 20)]
    real = x.ne(PAD)
    torch.testing.assert_close(torch.cat(steps, 1)[real], whole[real], rtol=1e-5, atol=1e-5)
    alone = logits(model, x[1:2, x[1].ne(PAD)])
    torch.testing.assert_close(whole[1][real[1]], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["plain", "answer"])
def test_coupled_decoding_begins_after_the_prompt(addition, order):
    model, indices = make_model(addition, f"coupled:order={order}"), addition.source_dictionary.indices
    x = torch.tensor([[indices[c] for c in text] for text in ("653+049=2070", "907+140=7401")])
    whole, state = logits(model, x), {}
    steps = [logits(model, x[:, :end], incremental_state=state) for end in (8, 9, 10, 12)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)
    with refused("decode from a prompt that ends in '='"):
        logits(model, x[:, :5], incremental_state=(state := {}))
        logits(model, x[:, :6], incremental_state=state)


@pytest.mark.parametrize("spec", [*ABACUS, "coupled"])
def test_training_reaches_every_parameter(addition, spec):
    model = make_model(addition, spec).train()
    x = torch.tensor([[addition.source_dictionary.indices[c] for c in "653+049=2070"]])
    model(x)[0].square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.decoder.encodings[0].table.grad.abs().sum() > 0


@pytest.mark.parametrize("spec", [*ABACUS, "coupled:order=all"])
def test_contract(spec):
    contract.check(build(spec, 2, 16, 64, SYMBOLS), len(SYMBOLS))


def test_position_transforms(addition):
    for spec in ("coupled", "abacus"):
        with refused(f"'{spec}' reads no positions, so a transform has no effect"):
            make_model(addition, spec, positions_eval="interpolate:ratio=0.5")
    x, transform = random_tokens(addition, 1, 9), "interpolate:ratio=0.5"
    plain, halved = (make_model(addition, "abacus:base=rope", **o) for o in ({}, {"positions_eval": transform}))
    assert not torch.allclose(logits(plain, x), logits(halved, x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["abacus", "coupled"])
def test_a_checkpoint_alone_has_its_digits(tmp_path, name):
    def change(encoding):
        known = build(name, 4, 32, symbols=SYMBOLS)
        encoding.digits = known.digits
        if name == "coupled":
            encoding.signs.copy_(known.signs)

    path, (saved,) = save_checkpoint(tmp_path, name, change=change)
    (loaded,) = checkpoints.load(path).load_encodings()
    x, pos = torch.zeros(1, 12, 32), at(ids("653+049=2070"))
    assert torch.equal(loaded.eval().embed(x, pos), saved.eval().embed(x, pos)) and loaded.embed(x, pos).any()

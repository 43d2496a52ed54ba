"""Arguments that make no sense: one line that names the argument and the remedy, from every public function."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from fairseq_rpe import RelativeAttention, attend, build, encodings, positions
from fairseq_rpe.attention import choose_backend
from fairseq_rpe.attention.kv_cache import KVCache
from fairseq_rpe.core import Positions, UserError

H, D, B, N = 2, 8, 2, 5
X = torch.randn(B, H, N, D)
ROWS = torch.randn(B, N, H * D)
HALVES = torch.arange(float(N))[None] / 2


def made(spec: str, width: int = H * D) -> encodings.Encoding:
    return build(spec, H, width)


def quietly(change):
    """The same without torch's warnings that a kind of tensor is new or old."""

    def changed(x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return change(x)

    return changed


CHANGED = {
    "none": lambda x: None,
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "number": lambda x: 3,
    "text": lambda x: "x",
    "class": lambda x: torch.Tensor,
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "float8_e5m2": lambda x: x.to(torch.float8_e5m2),
    "complex": lambda x: x.to(torch.complex64),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "compressed": quietly(lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr()),
    "quantised": quietly(lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)),
    "nested": quietly(lambda x: torch.nested.nested_tensor(list(x.float()))),
    "flat": lambda x: x.flatten(),
    "none of it": lambda x: x[:0],
}
COUNTS = [0, -1, 2.5, 2.0, math.nan, math.inf, True, "2", [2], np.array([2, 3]), torch.ones(2), int, 1j]
PROBABILITIES = [2.0, 1.0, -0.1, math.nan, math.inf, True, None, "0.1", [0.1], np.array([0.1, 0.2]), torch.ones(2), 1j]
TEXTS = [3, ["alibi"], b"alibi", np.array(["alibi"]), str, "", "a:b", "alibi:"]


def assert_refused(call, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("change", [*CHANGED, "integers", "booleans"])
def test_queries_keys_and_values(change):
    changes = CHANGED | {"integers": torch.Tensor.int, "booleans": torch.Tensor.bool}
    for place, name in enumerate("qkv"):
        given = [X, X, X]
        given[place] = changes[change](X)
        assert_refused(lambda given=given: attend(*given, "alibi"), name)
    assert_refused(lambda: attend(*[changes[change](X)] * 3, "alibi"))
    assert_refused(lambda: layer()(changes[change](ROWS)), "x ")


@pytest.mark.parametrize("change", [name for name in CHANGED if name != "none"])
def test_positions_padding_and_notes(change):
    at, hidden, forgetting = torch.arange(float(N)), torch.zeros(B, N), made("forgetting")
    notes = forgetting.token_features(ROWS).detach()
    assert_refused(lambda: attend(X, X, X, "alibi", padding=CHANGED[change](hidden)), "padding")
    assert_refused(lambda: attend(X, X, X, forgetting, features=CHANGED[change](notes)), "features")
    if change != "flat":  # which they are
        assert_refused(lambda: attend(X, X, X, "alibi", positions=CHANGED[change](at)), "position")
    changed = CHANGED[change](at[None])
    assert_refused(lambda: attend(X, X, X, "alibi", positions=Positions(at[None], changed)), "positions")


def everywhere(position: float, device: str = "cpu") -> Positions:
    at = torch.full((1, N), position, device=device)
    return Positions(at, at)


@pytest.mark.parametrize(
    ("at", "part"),
    [
        (torch.full((N,), 1e30), "e+30 is beyond 16777216"),
        (torch.full((N,), 1e30, dtype=torch.float64), "e+30 is beyond 9007199254740992"),
        (torch.full((N,), 2**62), "is beyond 16777216"),
        (torch.full((N,), math.nan), "0 or more"),
        (everywhere(1e30), "is beyond 16777216"),
        (everywhere(math.nan), "finite"),
        (everywhere(-2.0), "0 or more"),
        (everywhere(0, "meta"), "positions are on meta"),
    ],
)
@pytest.mark.parametrize("spec", ["alibi", "rope", "t5_bias"])
def test_positions_that_nothing_can_count(at, part, spec):
    assert_refused(lambda: attend(X, X, X, made(spec), positions=at), part)


def test_positions_far_apart_need_no_table_of_all_distances():
    """A gap of 10^12 tokens: the bias is computed for each pair."""
    x, at = X.double(), torch.tensor([0, 1, 2, 10**12, 10**12 + 1])
    expected = attend(*3 * (x[:, :, 3:],), "alibi")
    torch.testing.assert_close(attend(x, x, x, "alibi", positions=at)[:, :, 3:], expected)


@pytest.mark.parametrize("spec", ["sandwich", "transformer_xl", "transformer_xl:max_distance=100000"])
def test_far_positions_need_no_table_of_all_distances(spec, monkeypatch):
    """What they give equals what a table of the distances, here a short one, gives."""
    encoding, x, at = made(spec).double(), X.double(), torch.arange(0, 5 * 40_000, 40_000, dtype=torch.float64)
    far = attend(x, x, x, encoding, positions=at)
    monkeypatch.setattr("fairseq_rpe.encodings.base._SMALL_TABLE", 1 << 20)
    torch.testing.assert_close(far, attend(x, x, x, encoding, positions=at))


@pytest.mark.parametrize("value", COUNTS)
def test_counts(value):
    alibi = made("alibi")
    calls = {
        "heads": lambda: build("alibi", heads=value, width=16),
        "width": lambda: build("alibi", heads=2, width=value),
        "length": lambda: build("alibi", heads=2, width=16, length=value),
        "train_length": lambda: positions.build("identity", value),
        "n must": lambda: alibi.bias_profile(value),
        "n, the number of tokens": lambda: alibi.mask(value),
        "n, the number of tokens of": lambda: alibi.score_mod(value),
        "length must": lambda: positions.freeze(positions.build("identity"), value),
    }
    for part, call in calls.items():
        assert_refused(call, part)
    for name in ("heads", "width", "length"):
        options = {"heads": 2, "width": 16, "length": 9} | {name: value}
        assert_refused(lambda options=options: RelativeAttention(encoding="alibi", **options), name)
    if type(value) is not int or value:
        assert_refused(lambda: Positions.arange(value), "n must be an integer")


def test_integers_of_other_packages_are_counts():
    assert build("alibi", np.int64(2), torch.tensor(16), np.int32(9)).bias_profile(np.int64(3)).shape == (2, 3)


@pytest.mark.parametrize("value", PROBABILITIES)
def test_dropout(value):
    part = "dropout is a probability from 0 to below 1"
    assert_refused(lambda: RelativeAttention(16, 2, "alibi", dropout=value), part)
    assert_refused(lambda: attend(X, X, X, "alibi", dropout=value), part)


@pytest.mark.parametrize("value", [*TEXTS, None])
def test_names(value):
    for call in (
        lambda: build(value, 2, 16),
        lambda: attend(X, X, X, value),
        lambda: RelativeAttention(16, 2, value),
        lambda: attend(X, X, X, "alibi", backend=value),
        lambda: RelativeAttention(16, 2, "alibi", backend=value),
        lambda: positions.build(value),
        lambda: encodings.normalise(value),
        lambda: positions.normalise(value),
        lambda: encodings.load_module(value),
    ):
        assert_refused(call)


def layer(spec: str | encodings.Encoding = "alibi", **options) -> RelativeAttention:
    return RelativeAttention(**{"width": H * D, "heads": H, "encoding": spec, **options})


# what attend is given beside X and "alibi", and parts of what it says
ATTEND = [
    ({"encoding": "kerple_log"}, ["'kerple_log' is learned, and a string would throw its parameters"]),
    ({"encoding": "sinusoidal"}, ["'sinusoidal' acts at a model's input, not in attention"]),
    ({"encoding": torch.nn.Linear(2, 2)}, ["encoding is a spec such as 'alibi' or what build"]),
    ({"encoding": build("alibi", 4, 64)}, ["is for 4 heads of width 16, q has 2 of 8: build it with"]),
    ({"encoding": made("rope", 32)}, ["is for 2 heads of width 16, q has 2 of 8"]),
    ({"encoding": made("shaw", 32)}, ["is for 2 heads of width 16, q has 2 of 8"]),
    ({"encoding": made("forgetting")}, ["reads a layer's input: give features=encoding.token_features"]),
    ({"encoding": made("shaw"), "features": X}, ["Shaw takes no features: leave them out"]),
    ({"encoding": made("forgetting"), "features": X[:, :, :4, :1]}, ["features are of shape (2, 2, 4, 1)"]),
    ({"encoding": made("cope"), "positions": torch.arange(N)}, ["Cope reads no positions: leave them out"]),
    ({"encoding": made("t5_bias"), "positions": HALVES}, ["T5", "accepts whole positions only"]),
    (
        {"encoding": made("transformer_xl"), "positions": Positions(HALVES, HALVES, None, False)},
        ["TransformerXL accepts whole positions only"],
    ),
    ({"encoding": made("shaw"), "positions": Positions(HALVES, HALVES, 0.5)}, ["Shaw accepts whole positions only"]),
    ({"causal": False}, ["attend is causal"]),
    ({"causal": None}, ["attend is causal"]),
    ({"v": X[..., :4]}, ["differ in more than q's tokens"]),
    ({"k": X[:, :, :3], "v": X[:, :, :3]}, ["5 queries and 3 keys"]),
    ({"k": X.double()}, ["float32 on cpu, float64 on cpu, float32 on cpu: give them one"]),
    ({"q": X.to("meta")}, ["q is on device 'meta'"]),
    ({"padding": torch.zeros(B, 4, dtype=torch.bool)}, ["padding is bool of shape (2, 5)"]),
    ({"positions": torch.arange(4)}, ["positions are of shape (5,) or (2, 5)"]),
    ({"positions": Positions.arange(4)}, ["positions of ", "give those of these tokens"]),
    ({"positions": torch.arange(N).half()}, ["positions in torch.float16 lose digits"]),
    ({"positions": torch.arange(N).flip(0)}, ["and never fall along a row"]),
    ({"positions": torch.arange(N) - 1}, ["0 or more and never fall"]),
    ({"encoding": made("floater"), "positions": torch.arange(N) * 4e6}, ["'floater'", "up to 3355443"]),
]


@pytest.mark.parametrize(("given", "parts"), ATTEND, ids=[parts[0] for _, parts in ATTEND])
def test_what_attend_refuses(given, parts):
    assert_refused(lambda: attend(**{"q": X, "k": X, "v": X, "encoding": "alibi", **given}), *parts)


OTHERS = [
    (
        lambda: choose_backend("triton", [made("cope")]),
        "Cope needs all scores of a query, which backend 'triton' never",
    ),
    (lambda: choose_backend("flex", [made("dape")]), "Dape needs all scores of a query, which backend 'flex' never"),
    (lambda: choose_backend("flex", [made("shaw:values=true")]), "Shaw needs all scores"),
    (lambda: choose_backend("sdap"), "unknown attention backend 'sdap' (did you mean 'sdpa'?)"),
    (lambda: layer(width=64, heads=5), "5 heads do not divide a model width of 64"),
    (lambda: layer("sinusoidal"), "'sinusoidal' acts at a model's input"),
    (lambda: layer(build("fire", 4, 32)), "is for 4 heads and width 32, this layer has"),
    (lambda: layer(encodings.Encoding), "not the class Encoding"),
    (lambda: layer(bias="no"), "bias is True or False"),
    (lambda: layer()(X), "x is (batch, tokens, 16), not (2, 2, 5, 8)"),
    (lambda: layer()(ROWS.double()), "the layer is in torch.float32 and x in torch.float64"),
    (lambda: layer().to("meta")(ROWS), "the layer is on meta and x on cpu"),
    (lambda: made("cope").mask(5), "Cope depends on the tokens, which a mask cannot express"),
    (lambda: made("shaw").score_mod(5), "Shaw depends on the tokens, which a mask cannot express"),
    (lambda: made("rope").mask(3), "Rope rotates queries and keys, which is not a bias: call fairseq_rpe.attend"),
    (lambda: made("xpos").score_mod(3), "XPos rotates queries and keys, which is not a bias"),
    (lambda: made("alibi").mask(3, dtype=torch.int64), "dtype of 16 bits or more, not torch.int64"),
    (lambda: made("alibi").mask(3, dtype=torch.float8_e4m3fn), "not torch.float8_e4m3fn"),
    (lambda: made("alibi").mask(3, dtype="float32"), "not 'float32'"),
    (lambda: made("alibi").mask(3, device="nowhere"), "device 'nowhere' is not available"),
    (lambda: made("alibi").mask(3, device="meta"), "device 'meta' is not available"),
    (lambda: made("alibi").score_mod(3, device=[1]), "device"),
    (lambda: build("alibi", 2, 16, symbols=3), "symbols must be a list of strings"),
    (lambda: build("alibi", 2, 16, symbols=[1]), "symbols must be a list of strings"),
    (lambda: Positions.arange(3, 2), "3 queries and 2 keys"),
    (lambda: Positions.arange(3, dtype=torch.float16), "float16"),
    (lambda: Positions(HALVES, HALVES, step=0.0), "step of positions"),
    (lambda: Positions(HALVES, HALVES, step="1"), "step of positions"),
    (lambda: Positions(HALVES, HALVES, tokens=[[1, 2, 3, 4, 5]]), "tokens are a torch.int64"),
    (lambda: positions.build("warp")(HALVES, [3]), "lengths must be an int64 tensor"),
    (lambda: positions.build("warp")([[0.0]], torch.tensor([3])), "index must be a float32 or float64 tensor"),
    (lambda: positions.build("warp")(HALVES, torch.tensor([3]), 5), "generator must be a torch.Generator"),
    (lambda: positions.build("warp")(torch.zeros(2, 3), torch.tensor([3])), "2 rows and lengths has 1"),
    (lambda: positions.freeze("warp", 3), "transform must come from positions.build"),
    (lambda: positions.freeze_rows(positions.build("identity"), [3], []), "1 lengths and 0 generators"),
]


@pytest.mark.parametrize(("call", "part"), OTHERS, ids=[part for _, part in OTHERS])
def test_what_others_refuse(call, part):
    assert_refused(call, part)


def test_caches():
    one, rope = layer(), layer("rope")
    cache = rope.new_cache()
    rope(ROWS, cache)
    strangers = [(layer(width=2 * H * D), ROWS.repeat(1, 1, 2)), (layer(heads=2 * H), ROWS)]
    for stranger, x in (*strangers, (layer().double(), ROWS.double())):
        assert_refused(lambda stranger=stranger, x=x: stranger(x, cache), "the cache holds keys", "a cache of its own")
    assert_refused(lambda: layer("forgetting")(ROWS, cache), "the cache holds features (none)")
    assert_refused(lambda: rope(ROWS[:1], cache), "the cache holds 2 rows and 1 came: use a new cache for a new batch")
    assert_refused(lambda: rope(ROWS, cache, positions=torch.arange(N)), "positions are of shape (10,)")
    for other, its in ((one, "Alibi"), (layer("rope"), "Rope")):  # of the same size
        assert_refused(lambda other=other: other(ROWS, cache), "of another layer, with Rope", f"this layer has {its}")
    for value in ({}, (X, X), "cache", 3, KVCache):
        assert_refused(lambda value=value: one(ROWS, value), "cache is what new_cache() returns")
    assert len(cache) == N
    cache.layer = "another process", 0, cache.layer[2]  # as one that was saved
    rope(ROWS, cache)
    assert len(cache) == 2 * N


@pytest.mark.parametrize("spec", ["sinusoidal", "learned", "complex:frequencies=dimension"])
def test_what_is_embedded(spec):
    encoding, at = build(spec, H, H * D, 9), Positions.arange(N)
    for x in (ROWS.tolist(), ROWS[..., :8], ROWS[0], ROWS.to("meta"), ROWS.long(), None):
        assert_refused(lambda x=x: encoding.embed(x, at), "x ")
    for other in (torch.arange(N), None, Positions.arange(N - 1), Positions.arange(N, device="meta")):
        assert_refused(lambda other=other: encoding.embed(ROWS, other), "positions ")
    assert encoding.embed(ROWS, at).shape == ROWS.shape


@pytest.mark.parametrize("spec", ["learned", "tupe", "music"])
def test_sizes_that_no_memory_holds(spec):
    assert_refused(lambda: build(spec, 4, 64, 10**30), "length must be at most")
    assert_refused(lambda: build(spec, 4, 64, 10**13), "not enough memory for", spec)


def test_lengths_that_no_memory_holds():
    alibi = made("alibi")
    for call in (alibi.bias_profile, alibi.mask, alibi.score_mod):
        assert_refused(lambda call=call: call(10**12), "not enough memory for", "1000000000000")
        assert_refused(lambda call=call: call(10**30), "must be at most")


def test_what_is_registered_is_a_class():
    register = encodings.register("x")
    assert_refused(lambda: register(assert_refused), "the function assert_refused", "test_arguments.py:", "no encoding")
    assert_refused(lambda: register(KVCache), "the class KVCache")

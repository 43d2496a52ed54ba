"""Arguments that make no sense: one line that names the argument and the remedy, from every public function."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from fairseq_rpe import RelativeAttention, attend, build, encodings, positions
from fairseq_rpe.attention.plain import Cache
from fairseq_rpe.core import Positions, UserError

H, D, B, N = 2, 8, 2, 5
X = torch.randn(B, H, N, D)
ROWS = torch.randn(B, N, H * D)


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
    layer = RelativeAttention(H * D, H, "alibi")
    assert_refused(lambda: layer(changes[change](ROWS)), "x ")


@pytest.mark.parametrize("change", [name for name in CHANGED if name != "none"])
def test_positions_padding_and_notes(change):
    at, hidden, forgetting = torch.arange(float(N)), torch.zeros(B, N), build("forgetting", H, H * D)
    notes = forgetting.note(ROWS).detach()
    assert_refused(lambda: attend(X, X, X, "alibi", padding=CHANGED[change](hidden)), "padding")
    assert_refused(lambda: attend(X, X, X, forgetting, notes=CHANGED[change](notes)), "notes")
    if change != "flat":  # which they are
        assert_refused(lambda: attend(X, X, X, "alibi", positions=CHANGED[change](at)), "position")
    changed = CHANGED[change](at[None])
    assert_refused(lambda: attend(X, X, X, "alibi", positions=Positions(at[None], changed)), "positions")


@pytest.mark.parametrize(
    ("at", "part"),
    [
        (torch.full((N,), 1e30), "1.0000000150474662e+30 is beyond 16777216"),
        (torch.full((N,), 1e30, dtype=torch.float64), "1.0000000000000000199e+30 is beyond 9007199254740992"),
        (torch.full((N,), 2**62), "is beyond 16777216"),
        (torch.full((N,), math.nan), "0 or more"),
        (Positions(torch.full((1, N), 1e30), torch.full((1, N), 1e30)), "is beyond 16777216"),
        (Positions(torch.full((1, N), math.nan), torch.full((1, N), math.nan)), "finite"),
        (Positions(torch.full((1, N), -2.0), torch.full((1, N), -2.0)), "0 or more"),
        (Positions(torch.zeros(1, N, device="meta"), torch.zeros(1, N, device="meta")), "positions are on meta"),
    ],
)
@pytest.mark.parametrize("spec", ["alibi", "rope", "t5_bias"])
def test_positions_that_nothing_can_count(at, part, spec):
    assert_refused(lambda: attend(X, X, X, build(spec, H, H * D), positions=at), part.partition(".0000")[0])


def test_positions_far_apart_need_no_table_of_all_distances():
    """A gap of 10^12 tokens: the bias is computed for each pair."""
    x, at = X.double(), torch.tensor([0, 1, 2, 10**12, 10**12 + 1])
    expected = attend(x[:, :, 3:], x[:, :, 3:], x[:, :, 3:], "alibi")
    torch.testing.assert_close(attend(x, x, x, "alibi", positions=at)[:, :, 3:], expected)


@pytest.mark.parametrize("value", COUNTS)
def test_counts(value):
    alibi = build("alibi", H, H * D)
    calls = {
        "heads": lambda: build("alibi", heads=value, width=16),
        "width": lambda: build("alibi", heads=2, width=value),
        "length": lambda: build("alibi", heads=2, width=16, length=value),
        "train_length": lambda: positions.build("identity", value),
        "n must": lambda: alibi.profile(value),
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
    assert build("alibi", np.int64(2), torch.tensor(16), np.int32(9)).profile(np.int64(3)).shape == (2, 3)


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


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: attend(X, X, X, "alibi", causal=None), "causal"),
        (lambda: attend(X, X, X, torch.nn.Linear(2, 2)), "encoding is a spec such as 'alibi' or what build"),
        (lambda: RelativeAttention(16, 2, encodings.Encoding), "not the class Encoding"),
        (lambda: RelativeAttention(16, 2, "alibi", bias="no"), "bias is True or False"),
        (lambda: build("alibi", 2, 16, symbols=3), "symbols must be a list of strings"),
        (lambda: build("alibi", 2, 16, symbols=[1]), "symbols must be a list of strings"),
        (lambda: build("alibi", 2, 16).mask(3, dtype=torch.float8_e4m3fn), "not torch.float8_e4m3fn"),
        (lambda: build("alibi", 2, 16).mask(3, dtype="float32"), "not 'float32'"),
        (lambda: build("alibi", 2, 16).mask(3, device="nowhere"), "device 'nowhere' is not available"),
        (lambda: build("alibi", 2, 16).mask(3, device="meta"), "device 'meta' is not available"),
        (lambda: build("alibi", 2, 16).score_mod(3, device=[1]), "device"),
        (lambda: Positions.arange(3, 2), "3 queries and 2 keys"),
        (lambda: Positions.arange(3, dtype=torch.float16), "float16"),
        (lambda: Positions(torch.zeros(1, 3), torch.zeros(1, 3), step=0.0), "step of positions"),
        (lambda: Positions(torch.zeros(1, 3), torch.zeros(1, 3), step="1"), "step of positions"),
        (lambda: Positions(torch.zeros(1, 3), torch.zeros(1, 3), tokens=[[1, 2, 3]]), "tokens are a torch.int64"),
        (lambda: positions.build("warp")(torch.zeros(1, 3), [3]), "lengths are an int64 tensor"),
        (lambda: positions.build("warp")([[0.0]], torch.tensor([3])), "index is a float32 or float64 tensor"),
        (lambda: positions.build("warp")(torch.zeros(1, 3), torch.tensor([3]), 5), "generator is a torch.Generator"),
        (lambda: positions.build("warp")(torch.zeros(2, 3), torch.tensor([3])), "2 rows and lengths are of 1"),
        (lambda: positions.freeze("warp", 3), "transform is what positions.build"),
        (lambda: positions.freeze_rows(positions.build("identity"), [3], []), "1 lengths and 0 generators"),
    ],
)
def test_other_arguments(call, part):
    assert_refused(call, part)


def test_a_layer_and_its_input():
    layer = RelativeAttention(H * D, H, "kerple_log")
    assert_refused(lambda: layer(ROWS.double()), "the layer is in torch.float32 and x in torch.float64")
    assert_refused(lambda: layer.to("meta")(ROWS), "the layer is on meta and x on cpu")


def test_caches():
    layer, other = RelativeAttention(H * D, H, "alibi"), RelativeAttention(2 * H * D, H, "alibi")
    heads, wide = RelativeAttention(H * D, 2 * H, "alibi"), RelativeAttention(H * D, H, "alibi").double()
    cache = layer.new_cache()
    layer(ROWS, cache)
    for stranger, x in ((other, ROWS.repeat(1, 1, 2)), (heads, ROWS), (wide, ROWS.double())):
        assert_refused(lambda stranger=stranger, x=x: stranger(x, cache), "the cache holds keys", "a cache of its own")
    gated = RelativeAttention(H * D, H, "forgetting")
    assert_refused(lambda: gated(ROWS, cache), "the cache holds notes (none)")
    for value in ({}, (X, X), "cache", 3, Cache):
        assert_refused(lambda value=value: layer(ROWS, value), "cache is what new_cache() returns")
    assert len(cache) == N


def test_meta_of_one_argument_is_singular():
    assert_refused(lambda: attend(X.to("meta"), X, X, "alibi"), "q is on device 'meta'")


@pytest.mark.parametrize("spec", ["sinusoidal", "learned", "complex:frequencies=dimension"])
def test_what_is_embedded(spec):
    encoding, at = build(spec, H, H * D, 9), Positions.arange(N)
    for x in (ROWS.tolist(), ROWS[..., :8], ROWS[0], ROWS.to("meta"), ROWS.long(), None):
        assert_refused(lambda x=x: encoding.embed(x, at), "x ")
    for other in (torch.arange(N), None, Positions.arange(N - 1), Positions.arange(N, device="meta")):
        assert_refused(lambda other=other: encoding.embed(ROWS, other), "positions ")
    assert encoding.embed(ROWS, at).shape == ROWS.shape


def test_caches_of_other_layers_of_the_same_size():
    alibi = build("alibi", H, H * D)
    layers = [RelativeAttention(H * D, H, spec) for spec in ("rope", alibi, alibi, "alibi")]
    cache = layers[0].new_cache()
    layers[0](ROWS, cache)
    for other in layers[1:]:
        assert_refused(lambda other=other: other(ROWS, cache), "of another layer, with Rope", "Alibi")
    cache.layer = "another process", 0, cache.layer[2]  # as one that was saved
    layers[0](ROWS, cache)
    assert len(cache) == 2 * N


@pytest.mark.parametrize("spec", ["sandwich", "transformer_xl", "transformer_xl:clamp=100000"])
def test_far_positions_need_no_table_of_all_distances(spec, monkeypatch):
    """What they give equals what a table of the distances, here a short one, gives."""
    encoding, at = build(spec, H, H * D).double(), torch.arange(0, 5 * 40_000, 40_000, dtype=torch.float64)
    far = attend(X.double(), X.double(), X.double(), encoding, positions=at)
    monkeypatch.setattr("fairseq_rpe.encodings.base._SMALL_TABLE", 1 << 20)
    torch.testing.assert_close(far, attend(X.double(), X.double(), X.double(), encoding, positions=at))


def test_positions_that_no_solver_reaches():
    floater = build("floater", H, H * D)
    assert_refused(lambda: attend(X, X, X, floater, positions=torch.arange(N) * 8e5 * 5), "'floater'", "up to 3355443")


@pytest.mark.parametrize("spec", ["learned", "tupe", "music"])
def test_sizes_that_no_memory_holds(spec):
    assert_refused(lambda: build(spec, 4, 64, 10**30), "length must be at most")
    assert_refused(lambda: build(spec, 4, 64, 10**13), "not enough memory for", spec)
    alibi = build("alibi", H, H * D)
    for call in (alibi.profile, alibi.mask, alibi.score_mod):
        assert_refused(lambda call=call: call(10**12), "not enough memory for", "1000000000000")
        assert_refused(lambda call=call: call(10**30), "must be at most")


def test_what_is_registered_is_a_class():
    def bias(d):
        return -d

    assert_refused(lambda: encodings.register("x")(bias), "the function bias", "test_arguments.py:", "is no encoding")
    assert_refused(lambda: encodings.register("x")(Cache), "the class Cache")

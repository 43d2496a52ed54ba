"""Representatives of the encodings, and properties of specs and of forms of a bias."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import specs
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from specs import CAPABILITIES, capabilities, every_spec, representatives

from fairseq_rpe import algorithms, core, encodings, positions
from fairseq_rpe.core import Positions, UserError, canonical, configure, parse
from fairseq_rpe.encodings import Encoding, register

steady = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("of", [(), ("adds_bias",), ("rotates", "content_bias"), tuple(CAPABILITIES)])
def test_there_is_one_representative_of_each_combination(of, tokens):
    def combination(spec: str) -> tuple[object, ...]:
        return tuple(capabilities(spec)[name] for name in of or CAPABILITIES)

    every = {spec for spec in every_spec() if tokens or not capabilities(spec)["needs_token_ids"]}
    chosen = representatives(*of, tokens=tokens)
    assert set(chosen) <= every and {spec.partition(":")[0] for spec in every_spec()} >= set(specs.SPECS)
    assert {combination(spec) for spec in chosen} == {combination(spec) for spec in every}
    assert len({combination(spec) for spec in chosen}) == len(chosen)


def test_a_new_encoding_with_a_new_combination_is_a_representative():
    @register("test_new_combination")
    class New(Encoding):
        """Turns and changes values, which no other encoding does."""

        def rotate(self, x, at, pos, key=False):
            return x * at[:, None, :, None].cos().to(x.dtype)

        def value(self, v, pos):
            return v / 2

    @register("test_old_combination")
    class Old(encodings.DistanceBias):
        def bias(self, d):
            return -d.log1p().expand(self.heads, -1)

    try:
        representatives.cache_clear()
        assert {"test_new_combination", "test_old_combination"} <= set(every_spec())
        assert "test_new_combination" in representatives() and "test_old_combination" not in representatives()
    finally:
        for name in ("test_new_combination", "test_old_combination"):
            del encodings.base.registry._table[name]
        representatives.cache_clear()


CONFIGS = {
    f"{room.__name__.rpartition('.')[2]} {name}": room.base.registry.get(name).Config
    for room in (encodings, positions, algorithms)
    for name in room.names()
}
words = st.text("abcdefghijklmnopqrstuvwxyz0123456789_.+-/()", min_size=1, max_size=8)


@st.composite
def values(draw, hint: typing.Any, limits: typing.Mapping[str, typing.Any], default: typing.Any) -> typing.Any:
    """A value of an option that its declaration allows."""
    if (choices := limits.get("choices")) is not None:
        return draw(st.sampled_from(list(choices() if callable(choices) else choices)))
    kinds = typing.get_args(hint) or (hint,)
    if kinds[0] is bool:
        return draw(st.booleans())
    least, above, most = (limits.get(name) for name in ("minimum", "above", "maximum"))
    if kinds[0] is int:
        return draw(st.integers(1 if least is None else least, 10**6 if most is None else most))
    if kinds[0] is float:
        low = above if above is not None else -1e9 if least is None else least
        return draw(st.floats(low, 1e9 if most is None else most, exclude_min=above is not None))
    return default


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_printed_spec_is_parsed_to_the_same_options(name, data):
    config, hints = CONFIGS[name], typing.get_type_hints(CONFIGS[name])
    chosen = {}
    for field in dataclasses.fields(config):
        if data.draw(st.booleans()):
            chosen[field.name] = data.draw(values(hints[field.name], field.metadata, field.default))
    try:
        expected = config(**chosen)
    except UserError:  # options that do not go together
        assume(False)
    spec = canonical("x", expected)
    parsed = configure(config, *parse(spec))
    assert parsed == expected and canonical("x", parsed) == spec


@steady
@given(words, st.dictionaries(words, words, max_size=4))
def test_a_spec_of_any_words_is_parsed_as_it_was_written(name, options):
    written = ",".join(f"{key}={value}" for key, value in options.items())
    assert parse(f"{name}:{written}" if options else name) == (name, options)
    assert parse(f" {name} : {written.replace(',', ' , ').replace('=', ' = ')}" if options else name) == (name, options)


@st.composite
def biases(draw) -> tuple[typing.Any, Positions]:
    """A bias of any form, and positions of its queries and keys."""
    n, extra, step = draw(st.integers(1, 6)), draw(st.integers(0, 4)), draw(st.sampled_from([0.5, 1.0, 2.0]))
    noise, columns = torch.Generator().manual_seed(draw(st.integers(0, 99))), draw(st.integers(1, 7))
    m, wide = n + extra, draw(st.sampled_from([1, 4]))

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    at = (draw(st.integers(-3, 3)) + torch.arange(m, dtype=torch.float64) * step).expand(2, -1)
    table = {"origin": draw(st.integers(0, columns - 1)), "step": step}
    made = [
        core.ToeplitzBias(tensor(3, columns), **table),
        core.QueryTableBias(tensor(2, 3, n, 4), tensor(1, columns, 4), **table),
        core.KeyTableBias(tensor(2, 3, m, 4), tensor(3, columns, 4), **table),
        core.QueryKeyTableBias(tensor(2, 3, n, 4), tensor(2, 3, m, 4), tensor(3, columns, wide), **table),
        core.TokenBias(tensor(2, 3, n), tensor(2, 3, m)),
        core.DenseBias(tensor(2, 3, n, m)),
        core.PairBias(lambda i, j, x: x * (i[:, None, :, None] - j[:, None, None]), (tensor(3, 1, 1),)),
    ]
    chosen = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
    return (chosen[0] if len(chosen) == 1 else core.SumBias(tuple(chosen))), Positions(at[:, m - n :], at, step)


@steady
@given(biases(), st.data())
def test_slices_of_a_bias_concatenate_to_it(bias, data):
    form, pos = bias
    n, m = pos.q.shape[1], pos.k.shape[1]
    whole = form.materialize(pos).expand(2, 3, -1, -1)
    assert whole.shape == (2, 3, n, m)
    cut, keys = data.draw(st.integers(0, n)), data.draw(st.integers(1, m))
    rows = [rows for rows in (slice(0, cut), slice(cut, n)) if rows.stop > rows.start]
    joined = [form.materialize(pos, some).expand(2, 3, -1, -1) for some in rows]
    torch.testing.assert_close(torch.cat(joined, 2), whole)
    columns = slice(data.draw(st.integers(0, keys - 1)), keys)
    torch.testing.assert_close(form.materialize(pos, keys=columns).expand(2, 3, -1, -1), whole[..., columns])
    parts = [
        form.select(some, slice(0, keys)).materialize(Positions(pos.q[:, some], pos.k[:, :keys], pos.step))
        for some in rows
    ]
    torch.testing.assert_close(torch.cat([one.expand(2, 3, -1, -1) for one in parts], 2), whole[..., :keys])
    if (tensors := form.tree_flatten()) is not None:
        doubled = form.tree_unflatten(iter([2 * tensor for tensor, _ in tensors]))
        again = doubled.tree_unflatten(iter([tensor / 2 for tensor, _ in doubled.tree_flatten()]))
        assert torch.equal(again.materialize(pos).expand(2, 3, -1, -1), whole)

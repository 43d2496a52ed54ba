"""A user's encoding with a mistake in it: found before it is used, in a line that names the method and its place."""

from __future__ import annotations

import random
import re
import textwrap

import numpy
import pytest
import torch
from conftest import DEVICE, run_here
from specs import ALL_SPECS, CONTENT_SPECS

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.core import UserError
from fairseq_rpe.encodings import Encoding, build, contract, load_module

SYMBOLS = ["<s>", "</s>", ".", *map(str, range(20))]
HEAD = """import math
import torch
from fairseq_rpe.core import *
from fairseq_rpe.encodings import *


"""
LINES = HEAD.count("\n")
_count = iter(range(10**6))


def load(folder, body: str, name: str = "") -> str:
    """Register the class that ``body`` is, in a file of its own; the name that it has got."""
    name = name or f"test_contract_{next(_count)}"
    file = folder / "my_encoding.py"
    file = file if not file.exists() else folder / f"my_encoding_{name}.py"
    file.write_text(HEAD + f'@register("{name}")\n' + textwrap.dedent(body).lstrip())
    load_module(file)
    return name


def own(family: str, *lines: str) -> str:
    """A class of one method or of several, four blanks before each line."""
    return f"class Mine({family}):\n" + "".join(f"    {line}\n" for line in lines)


def hook(family: str, head: str, *lines: str) -> str:
    return own(family, f"def {head}:", *(f"    {line}" for line in lines))


EVERY = "torch.zeros(self.heads, len(d), dtype=d.dtype)"
HEADS_LAST = "return -d[:, None].expand(-1, self.heads)"
FUTURE = "return -(i[:, None, :, None] - j[:, None, None]).sqrt().expand(-1, self.heads, -1, -1)"
PARAMETER = ("def setup(self):", "    self.a = torch.nn.Parameter(torch.ones(self.heads, 1))")
LEARNED_ANGLES = ("def setup(self):", "    super().setup()", "    self.a = torch.nn.Parameter(torch.ones(8))")
LATER = "return Levels(q.sum(3) * 0, k.sum(3) * k.sum((2, 3))[..., None])"

FINE = {
    "distance": hook("DistanceBias", "bias(self, d)", "return -d.log1p().expand(self.heads, -1)"),
    "window": hook("DistanceBias", "of_head(self, d)", "return (d * 0).masked_fill(d > 5, -math.inf)"),
    "pair": hook("PairBias", "bias(self, i, j)", FUTURE.replace("sqrt", "abs")),
    "rotary": hook("Rotary", "angles(self, at, pos)", "return at[..., None] * torch.ones(self.rotated // 2).to(at)"),
    "absolute": hook("Absolute", "vectors(self, at)", "return at[..., None].expand(*at.shape, self.width) / 100"),
    "value": hook("Encoding", "value(self, v, pos)", "return v * (1 + pos.k[:, None, :, None]).to(v.dtype).rsqrt()"),
    "temperature": hook("Encoding", "remap(self, scores, q, pos)", "return scores * 2"),
    "helper": hook("DistanceBias", "bias(self, d)", "return self.norm(d)")
    + hook("", "norm(self, d)", "return -d.expand(self.heads, -1)").partition("\n")[2],
}


@pytest.mark.parametrize("body", FINE.values(), ids=FINE)
def test_encodings_without_a_mistake_pass(body, tmp_path):
    assert isinstance(build(load(tmp_path, body), 4, 64), Encoding)


@pytest.mark.parametrize("spec", [*ALL_SPECS, *CONTENT_SPECS, "bipe", "bipe:inter=alibi", "complex"])
def test_encodings_of_this_package_pass(spec):
    for heads, width in ((4, 64), (1, 32)):
        contract.check(build(spec, heads, width, 64, SYMBOLS).to(DEVICE), len(SYMBOLS))


WRONG = {
    # shapes, types and values of a family's own method
    "no heads": (hook("DistanceBias", "bias(self, d)", "return -d"), "Mine.bias returned (64,), expected (4, 64): ", 3),
    "heads last": (
        hook("DistanceBias", "bias(self, d)", HEADS_LAST),
        "Mine.bias returned (64, 4), expected (4, 64): ",
        3,
    ),
    "nothing": (
        hook("DistanceBias", "bias(self, d)", "-d.expand(self.heads, -1)"),
        "Mine.bias returned NoneType, expected (4, 64): ",
        3,
    ),
    "narrow": (
        hook("DistanceBias", "bias(self, d)", f"return {EVERY}.half()"),
        "Mine.bias returned torch.float16, expected torch.float32: ",
        3,
    ),
    "always float32": (
        hook("DistanceBias", "bias(self, d)", "return -d.float().expand(self.heads, -1)"),
        "Mine.bias returned torch.float32, expected torch.float64: ",
        3,
    ),
    "inf at 0": (
        hook("DistanceBias", "bias(self, d)", "return -d.log().expand(self.heads, -1)"),
        "Mine.bias returned inf at d = 0, expected a finite log-bias: ",
        3,
    ),
    "-inf at 0": (
        hook("DistanceBias", "bias(self, d)", "return d.log().expand(self.heads, -1)"),
        "Mine.bias returned -inf at d = 0, expected",
        3,
    ),
    "nan": (
        hook("DistanceBias", "bias(self, d)", "return (3 - d).sqrt().expand(self.heads, -1)"),
        "Mine.bias returned nan at d = 4, expected",
        3,
    ),
    "inf far": (
        hook("DistanceBias", "bias(self, d)", "return (d / 99).exp().expand(self.heads, -1)"),
        "Mine.bias returned inf at d = 65,536, expected",
        3,
    ),
    "table too short": (
        hook("DistanceBias", "bias(self, d)", "return torch.zeros(self.heads, 64)[:, d.long()].to(d)"),
        "Mine.bias fails for float32 (64,) from 0 to 131,072: IndexError",
        4,
    ),
    "raises": (
        hook("DistanceBias", "bias(self, d)", "x = d + 1", "return x + torch.ones(3)"),
        "Mine.bias fails for float32 (64,) from 0 to 63: RuntimeError",
        5,
    ),
    "of_head": (
        own(
            "DistanceBias",
            "def of_head(self, d, a):",
            "    return d",
            "def numbers(self, like):",
            "    return (like.new_ones(3),)",
        ),
        "Mine.numbers returned (3,), expected (4,): ",
        5,
    ),
    "pair": (
        hook("PairBias", "bias(self, i, j)", "return i[..., None] - j[:, None]"),
        "Mine.bias returned (1, 11, 11), expected (1, 4, 11, 11): ",
        3,
    ),
    "pair future": (hook("PairBias", "bias(self, i, j)", FUTURE), "Mine.bias returned nan for keys after the query", 3),
    "angles": (
        hook("Rotary", "angles(self, at, pos)", "return at"),
        "Mine.angles returned (1, 11), expected (1, 11, 8): ",
        3,
    ),
    "no super": (
        own("Rotary", "def setup(self):", "    self.a = 1", "def angles(self, at, pos):", "    return at"),
        "Mine.setup does not call super().setup()",
        3,
    ),
    "vectors": (
        hook("Absolute", "vectors(self, at)", "return at[..., None].expand(-1, -1, self.heads)"),
        "Mine.vectors returned (1, 11, 4), expected (1, 11, 64): ",
        3,
    ),
    "setup": (
        own(
            "DistanceBias", "def setup(self):", "    self.a = self.hidden", "def bias(self, d):", f"    return {EVERY}"
        ),
        "Mine.setup fails: AttributeError",
        4,
    ),
    # hooks of any encoding
    "embed": (
        hook("Encoding", "embed(self, x, pos)", "return x.sum(1)"),
        "Mine.embed returned (2, 64), expected (2, 11, 64): ",
        3,
    ),
    "rotate": (
        hook("Encoding", "rotate(self, x, at, pos, key=False)", "return x[:, :1]"),
        "Mine.rotate returned (2, 1, 11, 16), expected (2, 4, 11, 16): ",
        3,
    ),
    "value": (
        hook("Encoding", "value(self, v, pos)", "return v.mT"),
        "Mine.value returned (2, 4, 16, 11), expected (2, 4, 11, 16): ",
        3,
    ),
    "value type": (
        hook("Encoding", "value(self, v, pos)", "return v.double()"),
        "Mine.value returned torch.float64, expected torch.float32: ",
        3,
    ),
    "form": (
        hook("Encoding", "form(self, pos)", "return Toeplitz(torch.zeros(64))"),
        "Mine.form returned Toeplitz.table (64,), expected (4, any): ",
        3,
    ),
    "form type": (
        hook("Encoding", "form(self, pos)", "return torch.zeros(4, 64)"),
        "Mine.form returned (4, 64), expected a form",
        3,
    ),
    "form pair": (
        hook("Encoding", "form(self, pos)", "return Pair(lambda i, j: i[..., None] - j[:, None])"),
        "Mine.form returned (1, 11, 11), expected (1, 4, 11, 11): ",
        3,
    ),
    "scores": (
        hook("Encoding", "scores(self, q, k, pos, notes)", "return Levels(q.sum(3), k)"),
        "Mine.scores returned Levels.key (2, 4, 11, 16), expected (2, 4, 11): ",
        3,
    ),
    "note": (
        hook("Encoding", "note(self, x)", "return x"),
        "Mine.note returned (2, 11, 64), expected (2, 4, 11, E): ",
        3,
    ),
    "reading": (
        hook("Encoding", "reading(self, pos)", "return Reading(torch.zeros(9, 16))"),
        "Mine.reading returned (9, 16), expected (1, 1, 16) or (4, 1, 16): ",
        3,
    ),
    "remap": (
        hook("Encoding", "remap(self, scores, q, pos)", "return scores.sum(1)"),
        "Mine.remap returned (2, 11, 11), expected (2, 4, 11, 11): ",
        3,
    ),
    "remap broadcast": (
        hook("Encoding", "remap(self, scores, q, pos)", "return scores + pos.k[:, :3]"),
        "Mine.remap fails for float32",
        4,
    ),
    "remap of q": (
        hook("Encoding", "remap(self, scores, q, pos)", "return scores + q"),
        "Mine.remap fails for float32",
        4,
    ),
    "remap nan": (
        hook("Encoding", "remap(self, scores, q, pos)", "return scores - scores.mean(-1, keepdim=True)"),
        "Mine.remap returned ",
        3,
    ),
    "settle": (
        hook("Encoding", "settle(self, pos)", "return pos.k"),
        "Mine.settle returned (1, 11), expected Positions: ",
        3,
    ),
    "scalars": (
        hook("DistanceBias", "bias(self, d)", f"return {EVERY}")
        + "    def scalars(self):\n        return {'a': torch.zeros(7)}\n",
        "Mine.scalars returned (7,), expected (4,) or (): ",
        5,
    ),
    "series": (
        hook("DistanceBias", "bias(self, d)", f"return {EVERY}") + "    def series(self):\n        return ['0']\n",
        "Mine.series returned 1 formulas, expected 4",
        5,
    ),
    # gradients
    "detached": (
        own("DistanceBias", *PARAMETER, "def bias(self, d):", "    return -self.a.detach().to(d) * d"),
        "parameters that get no gradient ('a')",
        1,
    ),
    "angles learned": (
        own("Rotary", *LEARNED_ANGLES, "def angles(self, at, pos):", "    return self.a.to(at) * at[..., None]"),
        "parameters that get no gradient ('a')",
        1,
    ),
    "gradient": (
        own(
            "DistanceBias",
            *PARAMETER,
            "def bias(self, d):",
            "    return torch.where(d > 0, -self.a.to(d) * (1 / d - 1), 0)",
        ),
        "Mine.bias has the gradient nan for its parameter 'a', expected a finite one: ",
        5,
    ),
    "no way back": (
        hook("Encoding", "value(self, v, pos)", "return v.detach() * 2"),
        "Mine.value passes no gradient to its input",
        3,
    ),
    # decoding
    "of the number": (
        hook("DistanceBias", "bias(self, d)", "return -(d / d.max().clamp_min(1)).expand(self.heads, -1)"),
        "set reads_length = True",
        3,
    ),
    "later tokens": (
        hook("Encoding", "scores(self, q, k, pos, notes)", LATER),
        "Mine.scores gives one query of 6 tokens, as in decoding, other values than all 11 tokens",
        3,
    ),
    "turned otherwise": (
        own(
            "Encoding",
            "rotation_is_fixed = True",
            "def rotate(self, x, at, pos, key=False):",
            "    return x * pos.k.shape[1]",
        ),
        "Mine.rotate gives",
        4,
    ),
    "remap by rows": (
        hook("Encoding", "remap(self, scores, q, pos)", "return scores * q.shape[2]"),
        "Mine.remap gives one query of",
        3,
    ),
}


@pytest.mark.parametrize(("body", "message", "line"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_told_with_its_place(body, message, line, tmp_path):
    name = load(tmp_path, body)
    with pytest.raises(UserError) as caught:
        build(name, 4, 64)
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"{tmp_path}/my_encoding.py:{LINES + line}")


NAMES = [
    (hook("DistanceBias", "bais(self, d)", "return d"), "Mine defines 'bais', which nothing calls, and no 'bias'"),
    (hook("PairBias", "biases(self, i, j)", "return i"), "Mine defines 'biases', which nothing calls, and no 'bias'"),
    (hook("Rotary", "angle(self, at, pos)", "return at"), "Mine defines 'angle', which nothing calls, and no 'angles'"),
    (hook("Absolute", "vector(self, at)", "return at"), "defines 'vector', which nothing calls, and no 'vectors'"),
    (hook("Encoding", "score(self, q, k, pos, notes)", "return None"), "defines 'score', which nothing calls, and no"),
    (
        FINE["distance"] + "    reads_lenght = True\n",
        "defines 'reads_lenght', which nothing calls, and no 'reads_length'",
    ),
    (
        FINE["distance"] + "    def remmap(self, s, q, pos):\n        return s\n",
        "defines 'remmap', which nothing calls",
    ),
    (own("DistanceBias", "def setup(self):", "    pass"), "Mine does not define bias or of_head"),
    (own("PairBias", "x = 1"), "Mine does not define bias"),
    (own("Encoding", "x = 1"), "Mine does not define any of embed, rotate"),
    (
        FINE["distance"] + "    positions = 'wholes'\n",
        "Mine has positions = 'wholes', expected 'any', 'whole' or 'none'",
    ),
]


@pytest.mark.parametrize(("body", "message"), NAMES)
def test_a_missing_or_misspelt_method_is_named(body, message, tmp_path):
    name = load(tmp_path, body)
    with pytest.raises(UserError, match=r"my_encoding.py:\d+$") as caught:
        build(name, 4, 64)
    assert message in str(caught.value)


def test_options_without_a_dataclass_are_named(tmp_path):
    name = load(tmp_path, FINE["distance"] + "    class Config:\n        rate: float = option(1.0, 'slope')\n")
    with pytest.raises(UserError, match=f"Config of '{name}' is no dataclass: decorate it"):
        build(name, 4, 64)


def test_it_is_checked_once_for_its_options_and_changes_nothing(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(contract, "check", lambda *given: calls.append(given))
    name = load(tmp_path, FINE["distance"])
    for _ in range(3):
        build(name, 4, 64)
    build(name, 2, 64)
    assert len(calls) == 2


def test_random_states_and_the_encoding_stay_as_they_are(tmp_path):
    lines = ("torch.rand(1), random.random(), numpy.random.rand(1)", "self.seen = d")
    body = own(
        "DistanceBias",
        "def setup(self):",
        "    self.a, self.seen = torch.nn.Parameter(torch.ones(self.heads, 1)), None",
        "def bias(self, d):",
        "    import random, numpy",
        *(f"    {line}" for line in lines),
        "    return -self.a.to(d) * d",
    )
    name = load(tmp_path, body)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with torch.inference_mode():
        encoding = build(name, 4, 64)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert encoding.training and encoding.seen is None and encoding.a.grad is None


def test_an_encoding_that_was_built_by_hand_is_checked_by_attention(tmp_path):
    from fairseq_rpe.encodings.base import registry

    cls = registry.get(load(tmp_path, WRONG["no heads"][0]))
    q = torch.randn(3, 1, 4, 7, 16)
    with pytest.raises(UserError, match=r"Mine.bias returned \(64,\), expected \(4, 64\)"):
        attend(*q, cls(cls.Config(), 4, 64))
    with pytest.raises(UserError, match=r"Mine.bias returned \(64,\), expected \(4, 64\)"):
        RelativeAttention(64, 4, cls(cls.Config(), 4, 64))


def test_parameters_in_float64_meet_positions_in_float64(tmp_path):
    from fairseq_rpe.encodings.base import registry

    lines = (*PARAMETER, "def bias(self, d):")
    cls = registry.get(load(tmp_path, own("DistanceBias", *lines, "    return -self.a * d")))
    contract.check_contract(cls(cls.Config(), 4, 64).double())


@pytest.mark.parametrize(
    "command",
    [
        ("train", "DATA", "--rpe", "NAME", "--save-dir", "OUT"),
        ("selftest", "--encodings", "NAME"),
        ("verdict", "NAME"),
        ("profile", "NAME"),
        ("sweep", "DATA", "--encodings", "alibi NAME", "--out", "OUT", "--lengths", "64"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_tells_it_before_anything_begins(command, corpus, tmp_path):
    file = tmp_path / "my_encoding.py"
    name = load(tmp_path, WRONG["no heads"][0])
    named = {"DATA": str(corpus), "OUT": str(tmp_path / "out")}
    words = [named.get(word, word.replace("NAME", name)) for word in command]
    done = run_here(*words, "--rpe-module", file, ok=False)
    assert done.returncode == 2
    assert re.search(rf"Mine.bias returned \(64,\), expected \([248], 64\): {file}:{LINES + 3}", done.stderr)
    assert not (tmp_path / "out").exists()

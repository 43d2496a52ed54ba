"""A user's encoding with a mistake in it: found before it is used, in a line that names the method and its place."""

from __future__ import annotations

import random
import re
import textwrap

import numpy
import pytest
import torch
from conftest import DEVICE, run_here
from refusal import refused
from specs import ALL_SPECS, CONTENT_SPECS, representatives

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.encodings import Encoding, build, contract, load_module
from fairseq_rpe.encodings.base import registry

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


def method(head: str, value: str) -> str:
    """One more method, which returns a value."""
    return f"    def {head}:\n        return {value}\n"


def bias(*lines: str) -> str:
    return hook("DistanceBias", "bias(self, d)", *lines)


TRANSFORMS_SCORES = ("Encoding", "transform_scores(self, scores, q, pos)")
STATEFUL = "transform_scores_with_state(self, scores, q, pos, state)"
SCALED = "scores[:, :1].exp()"
NO_HEADS = bias("return -d")
FUTURE = "-(i[:, None, :, None] - j[:, None, None]).sqrt().expand(-1, self.heads, -1, -1)"
ANGLES = ("angles(self, at, pos)", "return at[..., None] * torch.ones(self.rotated // 2).to(at)")
ALL_PAIRS = "RotationRegion(pos.q, pos.k, lambda i, j: i >= j, lambda low, high: (0 * low, high))"
LEARNS = hook("DistanceBias", "setup(self)", "self.a = torch.nn.Parameter(torch.ones(self.heads, 1))")

PRODUCT = "score_product(self, q, k, pos, features, padding, key_state)"


def product(*lines: str) -> str:
    """An encoding whose product of queries and keys is computed by a class of these lines."""
    made = [f"    {line}" for line in ("class Product(ScoreProduct):", *(f"    {line}" for line in lines))]
    return hook("Encoding", PRODUCT, *(line[4:] for line in made), "return Product()")


FINE = {
    "product": product("def products(self):", "    return q @ k.mT / 2"),
    "distance": bias("return -d.log1p().expand(self.heads, -1)"),
    "window": hook("DistanceBias", "head_bias(self, d)", "return (d * 0).masked_fill(d > 5, -math.inf)"),
    "pair": hook("PairwiseBias", "bias(self, i, j)", "return " + FUTURE.replace("sqrt", "abs")),
    "rotary": hook("Rotary", *ANGLES),
    "absolute": hook("Absolute", "vectors(self, at)", "return at[..., None].expand(*at.shape, self.width) / 100"),
    "value": hook("Encoding", "value(self, v, pos)", "return v * (1 + pos.k[:, None, :, None]).to(v.dtype).rsqrt()"),
    "temperature": hook("Encoding", "transform_scores(self, scores, q, pos)", "return scores * 2"),
    "key state": own("Encoding", "key_state_width = 1")
    + method(STATEFUL, f"scores - state.mT - {SCALED}.cumsum(2) + {SCALED}, state + {SCALED}.sum(2)[:, :, :, None]"),
    "helper": bias("return self.norm(d)") + method("norm(self, d)", "-d.expand(self.heads, -1)"),
}


@pytest.mark.parametrize("body", FINE.values(), ids=FINE)
def test_encodings_without_a_mistake_pass(body, tmp_path):
    assert isinstance(build(load(tmp_path, body), 4, 64), Encoding)


OF_ONE_HEAD = representatives(tokens=True)  # asked before a test here registers another encoding


@pytest.mark.parametrize("spec", [*ALL_SPECS, *CONTENT_SPECS, "bipe", "bipe:inter=alibi", "complex"])
def test_encodings_of_this_package_pass(spec):
    contract.check(build(spec, 4, 64, 64, SYMBOLS).to(DEVICE), len(SYMBOLS))
    if spec in OF_ONE_HEAD:
        contract.check(build(spec, 1, 32, 64, SYMBOLS).to(DEVICE), len(SYMBOLS))


EVERY = "torch.zeros(self.heads, len(d), dtype=d.dtype)"
# what a method returns, by its family and head, and what the message says of it
RETURNED = {
    ("DistanceBias", "bias(self, d)"): {
        "-d": "returned (64,), expected (4, 64): ",
        "-d[:, None].expand(-1, self.heads)": "returned (64, 4), expected (4, 64): ",
        "None and -d.expand(self.heads, -1)": "returned NoneType, expected (4, 64): ",
        f"{EVERY}.half()": "returned torch.float16, expected torch.float32: ",
        "-d.float().expand(self.heads, -1)": "returned torch.float32, expected torch.float64: ",
        "-d.log().expand(self.heads, -1)": "returned inf at d = 0, expected a finite log-bias: ",
        "d.log().expand(self.heads, -1)": "returned -inf at d = 0, expected",
        "(3 - d).sqrt().expand(self.heads, -1)": "returned nan at d = 4, expected",
        "(d / 99).exp().expand(self.heads, -1)": "returned inf at d = 65,536, expected",
    },
    ("PairwiseBias", "bias(self, i, j)"): {
        "i[..., None] - j[:, None]": "returned (1, 11, 11), expected (1, 4, 11, 11): ",
        FUTURE: "returned nan for keys after the query",
    },
    ("Rotary", "angles(self, at, pos)"): {"at": "returned (1, 11), expected (1, 11, 8): "},
    ("Absolute", "vectors(self, at)"): {
        "at[..., None].expand(-1, -1, self.heads)": "returned (1, 11, 4), expected (1, 11, 64): "
    },
    ("Encoding", "embed(self, x, pos)"): {"x.sum(1)": "returned (2, 64), expected (2, 11, 64): "},
    ("Encoding", "rotate(self, x, at, pos, key=False)"): {
        "x[:, :1]": "returned (2, 1, 11, 16), expected (2, 4, 11, 16): "
    },
    ("Encoding", "value(self, v, pos)"): {
        "v.mT": "returned (2, 4, 16, 11), expected (2, 4, 11, 16): ",
        "v.double()": "returned torch.float64, expected torch.float32: ",
        "v.detach() * 2": "passes no gradient to its input",
    },
    ("Encoding", "position_bias(self, pos)"): {
        "ToeplitzBias(torch.zeros(64))": "returned ToeplitzBias.table (64,), expected (4, any): ",
        "torch.zeros(4, 64)": "returned (4, 64), expected a bias",
        "PairBias(lambda i, j: i[..., None] - j[:, None])": "returned (1, 11, 11), expected (1, 4, 11, 11): ",
    },
    ("Encoding", "content_bias(self, q, k, pos, features)"): {
        "TokenBias(q.sum(3), k)": "returned TokenBias.key (2, 4, 11, 16), expected (2, 4, 11): ",
        "TokenBias(q.sum(3) * 0, k.sum(3) * k.sum((2, 3))[..., None])": "gives one query of 6 tokens, as in decoding, "
        "other values than all 11 tokens",
    },
    ("Encoding", "token_features(self, x)"): {"x": "returned (2, 11, 64), expected (2, 4, 11, E): "},
    ("Encoding", "relative_values(self, pos)"): {
        "RelativeValues(torch.zeros(9, 16))": "returned (9, 16), expected (1, 1, 16) or (4, 1, 16): "
    },
    ("Encoding", "transform_scores(self, scores, q, pos)"): {
        "scores.sum(1)": "returned (2, 11, 11), expected (2, 4, 11, 11): ",
        "scores - scores.mean(-1, keepdim=True)": "returned ",
        "scores * q.shape[2]": "gives one query of",
    },
    ("Encoding", "prepare_positions(self, pos)"): {"pos.k": "returned (1, 11), expected Positions: "},
}
# the message, and the line of the class that it names -> the class
WRONG = {
    ("Mine.bias fails for float32 (64,) from 0 to 131,072: IndexError", 4): bias(
        "return torch.zeros(self.heads, 64)[:, d.long()].to(d)"
    ),
    ("Mine.bias fails for float32 (64,) from 0 to 63: RuntimeError", 5): bias("x = d + 1", "return x + torch.ones(3)"),
    ("Mine.head_parameters returned (3,), expected (4,): ", 5): hook(
        "DistanceBias", "head_bias(self, d, a)", "return d"
    )
    + method("head_parameters(self, like)", "(like.new_ones(3),)"),
    ("Mine.setup does not call super().setup()", 3): hook("Rotary", "setup(self)", "self.a = 1")
    + method("angles(self, at, pos)", "at"),
    ("Mine.setup fails: AttributeError", 4): hook("DistanceBias", "setup(self)", "self.a = self.hidden")
    + method("bias(self, d)", EVERY),
    ("Mine.transform_scores fails for float32", 4): hook(*TRANSFORMS_SCORES, "return scores + pos.k[:, :3]"),
    ("Mine.transform_scores fails for", 4): hook(*TRANSFORMS_SCORES, "return scores + q"),
    ("Mine.logged_scalars returned (7,), expected (4,) or (): ", 5): bias(f"return {EVERY}")
    + method("logged_scalars(self)", "{'a': torch.zeros(7)}"),
    ("Mine.log_bias_formulas returned 1 formulas, expected 4", 5): bias(f"return {EVERY}")
    + method("log_bias_formulas(self)", "['0']"),
    ("parameters that get no gradient ('a')", 1): LEARNS + method("bias(self, d)", "-self.a.detach().to(d) * d"),
    ("Mine has parameters that get no gradient ('a')", 1): hook(
        "Rotary", "setup(self)", "super().setup()", "self.a = torch.nn.Parameter(torch.ones(8))"
    )
    + method("angles(self, at, pos)", "self.a.to(at) * at[..., None]"),
    ("Mine.bias has the gradient nan for its parameter 'a', expected a finite one: ", 5): LEARNS
    + method("bias(self, d)", "torch.where(d > 0, -self.a.to(d) * (1 / d - 1), 0)"),
    ("set length_dependent = True", 3): bias("return -(d / d.max().clamp_min(1)).expand(self.heads, -1)"),
    ("Mine.rotation_regions returned Positions, expected a tuple of RotationRegion or None: ", 5): hook(
        "Rotary", *ANGLES
    )
    + method("rotation_regions(self, pos)", "pos"),
    ("Mine.rotation_regions returned regions that share pairs, expected each pair in at most one: ", 5): hook(
        "Rotary", *ANGLES
    )
    + method("rotation_regions(self, pos)", f"2 * ({ALL_PAIRS},)"),
    ("Mine.score_product returned (2, 4, 11, 11), expected a ScoreProduct", 3): hook(
        "Encoding", PRODUCT, "return q @ k.mT"
    ),
    ("Mine.score_product returns a VectorProduct exactly if has_vector_product is True", 3): hook(
        "Encoding", PRODUCT, "return VectorProduct(q, k)"
    ),
    ("Mine.score_product gives other products after prepare_blocks: ", 3): product(
        "def __init__(self, scale=1.0):",
        "    self.scale = scale",
        "def products(self):",
        "    return self.scale * q @ k.mT",
        "def prepare_blocks(self):",
        "    return Product(2.0)",
    ),
    ("Mine.score_product gives queries after transformed keys other values than one pass", 4): own(
        "Encoding", "transforms_keys = True"
    )
    + "    "
    + product(
        "def products(self):",
        "    return q @ (k if key_state is None else torch.cat([key_state, k[:, :, key_state.shape[2] :]], 2)).mT",
        "def key_state(self):",
        "    return 2 * k",
    )
    .split("\n", 1)[1]
    .strip()
    + "\n",
    ("Mine.transform_scores_with_state returned (2, 4, 11, 11), expected scores and state: ", 4): own(
        "Encoding", "key_state_width = 1"
    )
    + method(STATEFUL, "scores"),
    ("Mine.transform_scores_with_state gives two blocks of queries other values than one block", 4): own(
        "Encoding", "key_state_width = 1"
    )
    + method(STATEFUL, f"(scores - state.mT, state + {SCALED}.sum(2)[:, :, :, None])"),
    ("Mine.transform_scores_with_state is never called while key_state_width is 0", 3): hook(
        "Encoding", STATEFUL, "return scores, state"
    ),
    ("Mine.transform_scores returned weights with a sum of 11, expected at most 1", 4): own(
        "Encoding", "returns_log_weights = True"
    )
    + method("transform_scores(self, scores, q, pos)", "scores - scores.detach()"),
    ("Mine.rotate gives", 4): own("Encoding", "fixed_rotation = True")
    + method("rotate(self, x, at, pos, key=False)", "x * pos.k.shape[1]"),
}
WRONG = [(message, line, body) for (message, line), body in WRONG.items()] + [
    (f"Mine.{head.partition('(')[0]} {message}", 3, hook(family, head, f"return {value}"))
    for (family, head), messages in RETURNED.items()
    for value, message in messages.items()
]


@pytest.mark.parametrize(("message", "line", "body"), WRONG)
def test_a_mistake_is_reported_with_its_place(message, line, body, tmp_path):
    name = load(tmp_path, body)
    with refused(f"{re.escape(message)}.*{re.escape(str(tmp_path))}/my_encoding.py:{LINES + line}$"):
        build(name, 4, 64)


NAMES = {
    hook("DistanceBias", "bais(self, d)", "return d"): "defines 'bais', which nothing calls, and no 'bias'",
    hook("PairwiseBias", "biases(self, i, j)", "return i"): "defines 'biases', which nothing calls, and no 'bias'",
    hook("Rotary", "angle(self, at, pos)", "return at"): "defines 'angle', which nothing calls, and no 'angles'",
    hook("Absolute", "vector(self, at)", "return at"): "defines 'vector', which nothing calls, and no 'vectors'",
    hook(
        "Encoding", "content_bais(self, q, k, pos, features)", "return None"
    ): "defines 'content_bais', which nothing calls",
    FINE["distance"]
    + "    length_dependant = True\n": "'length_dependant', which nothing calls, and no 'length_dependent'",
    FINE["distance"]
    + method("transform_score(self, s, q, pos)", "s"): "defines 'transform_score', which nothing calls",
    own("DistanceBias", "def setup(self):", "    pass"): "Mine does not define bias or head_bias",
    own("PairwiseBias", "x = 1"): "Mine does not define bias",
    own("Encoding", "x = 1"): "Mine does not define any of embed, rotate",
    FINE["distance"] + "    position_type = 'wholes'\n": "position_type = 'wholes', expected 'any', 'whole' or 'none'",
}


@pytest.mark.parametrize(("body", "message"), NAMES.items())
def test_a_missing_or_misspelt_method_is_named(body, message, tmp_path):
    name = load(tmp_path, body)
    with refused(f"{re.escape(message)}.*my_encoding.py:\\d+$"):
        build(name, 4, 64)


def test_options_without_a_dataclass_are_named(tmp_path):
    name = load(tmp_path, FINE["distance"] + "    class Config:\n        rate: float = option(1.0, 'slope')\n")
    with refused(f"Config of '{name}' is no dataclass: decorate it"):
        build(name, 4, 64)


def test_it_is_checked_once_for_its_options_and_changes_nothing(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(contract, "check", lambda *given: calls.append(given))
    name = load(tmp_path, FINE["distance"])
    for heads in (4, 4, 2):
        build(name, heads, 64)
    assert len(calls) == 2


def test_random_states_and_the_encoding_stay_as_they_are(tmp_path):
    drawn = ("import random, numpy", "torch.rand(1), random.random(), numpy.random.rand(1)", "self.seen = d")
    body = bias(*drawn, "return -self.a.to(d) * d") + LEARNS.partition("\n")[2]
    name = load(tmp_path, body)

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

    before = states()
    with torch.inference_mode():
        encoding = build(name, 4, 64)
    assert states() == before
    assert encoding.training and not hasattr(encoding, "seen") and encoding.a.grad is None


def test_an_encoding_that_was_built_by_hand_is_checked_by_attention(tmp_path):
    cls = registry.get(load(tmp_path, NO_HEADS))
    q = torch.randn(3, 1, 4, 7, 16)
    for use in (lambda made: attend(*q, made), lambda made: RelativeAttention(64, 4, made)):
        with refused(r"Mine.bias returned \(64,\), expected \(4, 64\)"):
            use(cls(cls.Config(), 4, 64))


def test_parameters_in_float64_meet_positions_in_float64(tmp_path):
    cls = registry.get(load(tmp_path, LEARNS + method("bias(self, d)", "-self.a * d")))
    contract.check_contract(cls(cls.Config(), 4, 64).double())


@pytest.mark.parametrize(
    "command",
    [
        "train DATA --rpe NAME --out OUT",
        "selftest --encodings NAME",
        "sweep DATA --encodings NAME --out OUT --lengths 64",
    ],
)
def test_every_command_tells_it_before_anything_begins(command, corpus, tmp_path):
    file = tmp_path / "my_encoding.py"
    name = load(tmp_path, NO_HEADS)
    named = {"DATA": corpus, "OUT": tmp_path / "out", "NAME": name}
    words = [named.get(word, word) for word in command.split()]
    done = run_here(*words, "--rpe-module", file, ok=False)
    assert done.returncode == 2
    assert re.search(rf"Mine.bias returned \(64,\), expected \([248], 64\): {file}:{LINES + 3}", done.stderr)
    assert not (tmp_path / "out").exists()

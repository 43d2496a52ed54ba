"""``passkey`` and ``retrieval``: where the answer stands, how often a guess is right, and what is refused."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar

import pytest
from refusal import refused

from fairseq_rpe.algorithms import SPLITS, build
from fairseq_rpe.algorithms.needles import Passkey, num_before

SIZES = "items=60,times=3,train=600,valid=60,test=4,depths=5"
SPECS = {"passkey": f"passkey:{SIZES},digits=2", "retrieval": f"retrieval:{SIZES},alphabet=12"}
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
FILLER = "the grass is green . the sky is blue . the sun is yellow . here we go . there and back again ."


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, list]]:
    return {name: {split: list(build(spec).examples(split)) for split in SPLITS} for name, spec in SPECS.items()}


def solve(name: str, text: str) -> tuple[str, float]:
    """The answer and its place among the possible ones, from nothing but the text of a prompt."""
    if name == "passkey":
        question = " what is the pass key ? the pass key is"
        assert text.startswith("Passkey: ") and text.endswith(question)
        body = text.removeprefix("Passkey: ").removesuffix(question)
        ahead, _, rest = f" {body}".partition(" the pass key is ")
        key, _, rest = rest.partition(" . remember it . ")
        again, _, behind = rest.partition(" is the pass key .")
        assert again == key and all(len(digit) == 1 and digit.isdigit() for digit in key.split())
        ahead, behind = ahead.split(), behind.split()
        assert " ".join([*ahead, *behind]) in " ".join([FILLER] * 20)
        return key, len(ahead) / (len(ahead) + len(behind))
    said, _, asked = text.lstrip("; ").rpartition(" ? ")
    pairs = [pair.strip().split(" : ") for pair in said.rstrip(" ;").split(" ;")]
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys) and asked.endswith(" :")
    place = keys.index(asked.removesuffix(" :"))
    return pairs[place][1], place / (len(pairs) - 1)


@pytest.mark.parametrize("name", SPECS)
def test_answers_stand_where_the_depth_says(name, made):
    task = build(SPECS[name])
    for split in SPLITS:
        for example in made[name][split]:
            answer, place = solve(name, " ".join(example.prompt))
            assert " ".join(example.answer) == answer
            assert len(example.prompt) + len(example.answer) == example.length == task.num_tokens(example.length)
            assert (example.depth is None) == (split != "test")
            if example.depth is not None:
                # rounded down to a whole word or pair
                assert place <= example.depth + 1e-9 and example.depth - place < (0.04 if name == "passkey" else 0.15)


@pytest.mark.parametrize("name", SPECS)
def test_the_test_has_every_length_and_depth(name, made):
    task = build(SPECS[name])
    counts = Counter((e.length, e.depth) for e in made[name]["test"])
    assert counts == dict.fromkeys([(n, depth) for n in (60, 120, 180) for depth in GRID], 4)
    assert task.lengths("test") == [60, 120, 180] and task.depths("test") == GRID and task.depths("valid") == ()
    assert build(f"{name}:items=64,times=18").lengths("test") == [64, 128, 256, 512, 1024, 1152]
    assert {e.length for e in made[name]["train"]} == set(range(task.config.least, 61))
    # any length and depth may be asked for, and gives the same examples however often
    asked = [list(task.examples_at_depth("test", 77, 0.3)) for _ in range(2)]
    assert asked[0] == asked[1] and {(e.length, e.depth) for e in asked[0]} == {(77, 0.3)}
    assert len({e.answer for e in task.examples_at_depth("test", 120, 0.5)}) > 1  # drawn anew for each


@pytest.mark.parametrize("name", SPECS)
def test_splits_are_apart_and_words_closed(name, made):
    prompts = {split: {e.prompt for e in made[name][split]} for split in SPLITS}
    assert not prompts["train"] & prompts["test"] and not prompts["train"] & prompts["valid"]
    words = build(SPECS[name]).vocabulary()
    assert len(set(words)) == len(words)
    assert {w for split in SPLITS for e in made[name][split] for w in (*e.prompt, *e.answer)} == set(words)
    assert prompts["valid"] != {e.prompt for e in build(f"{SPECS[name]},seed=2").examples("valid")}


@pytest.mark.parametrize("name", SPECS)
def test_depth_is_uniform_in_training_or_what_is_asked_for(name, made):
    places = [solve(name, " ".join(e.prompt))[1] for e in made[name]["train"]]
    assert abs(sum(places) / len(places) - 0.5) < 0.05 and min(places) == 0 and max(places) == 1
    last = build(f"{SPECS[name]},depth=1").examples("valid")
    assert {solve(name, " ".join(e.prompt))[1] for e in last} == {1.0}


class Long(Passkey):
    """Lines of the lengths that the counts below are of: 20 tokens, fillers of 20, 10, and 8."""

    head: ClassVar = ("h",) * 20
    cycle: ClassVar = tuple(f"w{k}" for k in range(20))
    question: ClassVar = ("q",) * 8

    def line(self, key: list[str]) -> list[str]:
        return ["line", *key, *["l"] * (9 - len(key))]


def test_counts_of_the_passkey():
    """A hundred fillers of 20 tokens: the line begins at 20 + 20·⌊100p⌋, and half way it is 1018 from the end."""
    task = Long("passkey", Passkey.Config(least=64, test=1))
    for hundredth in range(0, 101, 5):
        (example,) = task.examples_at_depth("test", 2038 + 3, hundredth / 100)
        assert len(example.prompt) == 2038 and len(example.answer) == 3
        assert example.prompt.index("line") == 20 + 20 * hundredth


def test_counts_of_the_pairs():
    """75 pairs ``k k : v v ;`` and ``? k k :`` are 454 tokens; the value of pair g is 450 − 6g before the end."""
    task = build("retrieval:items=456,times=1,test=1")
    assert task.num_pairs(456) == 75 and task.pair_tokens == 6
    for g in (0, 1, 37, 74):
        (example,) = task.examples_at_depth("test", 456, Fraction(g, 74))
        assert len(example.prompt) == 454 and example.prompt[453] == ":" and example.prompt[450] == "?"
        assert example.prompt[6 * g + 3 : 6 * g + 5] == example.answer
        assert example.prompt[6 * g : 6 * g + 3] == example.prompt[451:454]
        assert 453 - (6 * g + 3) == 450 - 6 * g


def test_the_pair_at_a_depth_is_rounded_down():
    """Of 140 pairs those at 0, ¼, ½, ¾ and 1 are 0, 34, 69, 104 and 139, as in the published experiment."""
    assert [num_before(depth, 139) for depth in GRID] == [0, 34, 69, 104, 139]
    # a product that is a hair below a whole number is that number, as 0.29 · 100 is
    assert all(num_before(k / 100, 100 * times) == times * k for k in range(101) for times in (1, 20))


def test_a_guess():
    assert [build(f"passkey:digits={m},least=50").chance_accuracy(64) for m in (1, 5)] == [10**-1, 10**-5]
    assert build("retrieval:alphabet=12").chance_accuracy(456) == pytest.approx(1 / 75 + 74 / 75 / 12**2, rel=1e-12)
    # whoever says the value of a random pair is right that often
    task, right, total = build("retrieval:items=60,times=1,valid=1500,alphabet=4,value=1,key=3"), 0.0, 0.0
    for example in task.examples("valid"):
        values = [value for word, value in pairwise(example.prompt[:-4]) if word == ":"]
        right += values.count(example.answer[0]) / len(values)
        total += task.chance_accuracy(example.length)
    assert right == pytest.approx(total, rel=0.05)


REFUSED = {
    "passkey:depth=1.5": "'depth' of 'passkey' must be at most 1, not 1.5",
    "passkey:depth=-0.1": "'depth' of 'passkey' must be at least 0, not -0.1",
    "passkey:digits=0": "'digits' of 'passkey' must be at least 1, not 0",
    "passkey:least=30": "30 tokens are too few, the shortest example has 34: raise least to at least 34",
    "passkey:items=30,least=20": "raise least and items to at least 34",
    "passkey:depths=1": "'depths' of 'passkey' must be at least 2, not 1",
    "retrieval:least=8": "8 tokens are too few, the shortest example has 18: raise least to at least 18",
    "retrieval:key=1,alphabet=50": "512 tokens hold 101 pairs and there are 50 keys: raise alphabet or key",
    "retrieval:items=20": "least=24 is more than items=20",
    "retrieval:items=12,least=12,alphabet=2,key=1,value=1,times=1": "tokens belongs to the test split: raise alphabet",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refusals(spec):
    with refused(REFUSED[spec]):
        list(build(spec).examples_at_depth("test", 12, 1.0))

"""The tasks of RULER and the oracle of a window: examples against their definitions, guesses and refusals."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from refusal import refused
from scipy import special, stats

from fairseq_rpe.algorithms import SPLITS, build
from fairseq_rpe.algorithms.base import Algorithm, Example
from fairseq_rpe.algorithms.window_oracle import window_accuracy

SIZES = "items=72,least=64,times=3,train=200,valid=30"
SPECS = {
    "multikey": f"multikey:{SIZES},test=10,depths=3,keys=5,digits=2",
    "multivalue": f"multivalue:{SIZES},test=10,depths=3,values=3,digits=2",
    "multiquery": f"multiquery:{SIZES},test=10,depths=3,keys=5,queries=3,digits=2",
    "update": f"update:{SIZES},test=10,depths=3,keys=4,updates=2,digits=2",
    "tracking": f"tracking:{SIZES},test=10,depths=3,chains=3,hops=2,digits=2",
    "common": f"common:{SIZES},test=30,common=3,often=5,rarely=2",
    "common, growing": f"common:{SIZES},test=30,common=3,often=5,rarely=2,growing=true",
    "frequent": f"frequent:{SIZES},test=30",
}


def solve_lines(prompt: str, name: str) -> str:
    """The answer to a question about lines, found with regular expressions in the text of a prompt."""
    lines = re.findall(r"key (\S+) is (\d) (\d) \.", prompt)
    values: dict[str, list[str]] = {}
    for key, *digits in lines:
        values.setdefault(key, []).append(" ".join(digits))
    if name == "multiquery":
        return " ".join(values[key][0] for key in re.search(r"keys (.*) :$", prompt)[1].split())
    if name == "multivalue":
        assert len(values) == 1 and len(lines) == 3
        return " ".join(values[re.search(r"all of (\S+)$", prompt)[1]])
    key = re.search(r"key (\S+) is$", prompt)[1]
    assert sorted(map(len, values.values())) == ([1, 1, 2, 2] if name == "update" else [1] * 5)
    assert len(values[key]) == (2 if name == "update" else 1)
    return values[key][-1]


def solve_tracking(prompt: str) -> str:
    names = {}
    for name, *rights in re.findall(r"(\S+) = (?:(\d \d)|(\S+)) ;", prompt):
        names["".join(rights)] = name
    assert len(names) == 9
    found, key = [], re.search(r"\? (\d \d) :$", prompt)[1]
    while key in names:
        found.append(key := names[key])
    return " ".join(found)


def solve_counting(prompt: str, name: str) -> str:
    counts = Counter(word for word in prompt.split()[1:-2] if word not in (";", "…"))
    found = [word for word, _ in counts.most_common(3)]
    assert len({counts[word] for word in found}) == (3 if name == "frequent" else 1)
    assert counts.most_common(4)[3][1] < counts[found[-1]]
    return " ".join(found if name == "frequent" else sorted(found, key=build(SPECS[name]).vocabulary().index))


def solve(name: str, example: Example) -> str:
    prompt = " ".join(example.prompt)
    if name == "tracking":
        return solve_tracking(prompt)
    return solve_counting(prompt, name) if "common" in name or name == "frequent" else solve_lines(prompt, name)


def all_examples(task: Algorithm) -> list[Example]:
    return [example for split in SPLITS for example in task.examples(split)]


@pytest.mark.parametrize("name", SPECS)
def test_the_text_determines_the_answer_and_lengths_are_exact(name):
    task = build(SPECS[name])
    words = set(task.vocabulary())
    for example in all_examples(task):
        assert solve(name, example) == " ".join(example.answer)
        assert task.answer_from_suffix(list(example.prompt), example.length) == list(example.answer)
        assert len(example.prompt) + len(example.answer) == example.length == task.num_tokens(example.length)
        assert words.issuperset((*example.prompt, *example.answer))
    assert {example.length for example in task.examples("test")} == {72, 144, 216}


@pytest.mark.parametrize("name", ["multikey", "multivalue", "multiquery", "update", "tracking"])
def test_the_first_needed_line_is_at_the_depth(name):
    """Nothing but the filler is counted: ⌊depth·F⌋ of its F words come before the line."""
    task = build(SPECS[name])
    for example in task.examples("test"):
        needles = [example.prompt[begin:end] for begin, end in example.needles]
        assert all(word in " ".join(" ".join(n) for n in needles) for word in example.answer)
        begin = example.needles[0][0]
        statement = r"\S+ = (\d \d|\S+) ;" if name == "tracking" else r"key \S+ is \d \d \."
        before = re.sub(statement, "", " ".join(example.prompt[1:begin])).split()
        assert len(before) == int(example.depth * (example.length - task.min_tokens) + 1e-9)


def test_training_places_are_uniform_and_questions_fair():
    task = build("multikey:items=60,least=60,times=1,keys=3,digits=2,train=1500")
    asked, before = Counter(), Counter()
    for example in task.examples("train"):
        lines = re.findall(r"key (\S+) is \d \d \.", " ".join(example.prompt))
        asked[lines.index(example.prompt[-2])] += 1
        filler = re.sub(r"key \S+ is \d \d \.", "", " ".join(example.prompt[1 : example.needles[0][0]])).split()
        before[len(filler)] += 1
    num_filler = 60 - task.min_tokens
    assert stats.chisquare([asked[k] for k in range(3)]).pvalue > 0.001
    assert stats.chisquare([before[k] for k in range(num_filler + 1)]).pvalue > 0.001


def test_counts_follow_the_zeta_distribution():
    task = build("frequent:items=128,train=20,alpha=1.7,alphabet=60,least=110")
    for example in task.examples("test"):
        n = example.length - 6
        expected = [int(n * rank**-1.7 / special.zeta(1.7)) for rank in range(2, 60)]
        counts = sorted(Counter(word for word in example.prompt[1:-2] if word != "…").values(), reverse=True)
        assert counts == [count for count in expected if count]


@pytest.mark.parametrize(("name", "others"), [("common", (25, 61, 97)), ("common, growing", (25, 25, 25))])
def test_common_words_grow_in_number_or_in_count(name, others):
    task = build(SPECS[name])
    lengths = (72, 144, 216)
    assert tuple(task.num_others(n) for n in lengths) == others
    for example in task.examples("test"):
        counts = Counter(example.prompt[1:-2])
        scale = example.length // 72 if "growing" in name else 1
        assert counts[example.answer[0]] == 5 * scale
        assert Counter(counts[word] for word in counts if word not in (";", *example.answer)) == {
            2 * scale: task.num_others(example.length)
        }


# what a guess does: draws an answer from the text of a prompt without its question
GUESSES = {
    "multikey": lambda p, r: r.choice(re.findall(r"is (\d \d) \.", p)),
    "update": lambda p, r: r.choice(re.findall(r"is (\d \d) \.", p)),
    "multiquery": lambda p, r: " ".join(r.choice(re.findall(r"is (\d \d) \.", p), 2, replace=False)),
    "tracking": lambda p, r: " ".join(r.choice(re.findall(r"(\S+) =", p), 2, replace=False)),
}
GUESSED = {
    "multikey": "multikey:items=64,times=1,keys=3",
    "update": "update:items=64,times=1,keys=3",
    "multiquery": "multiquery:items=64,times=1,keys=3,queries=2",
    "tracking": "tracking:items=64,times=1,chains=2,hops=1",
}


@pytest.mark.parametrize("name", GUESSES)
def test_chance_level(name):
    task, random = build(f"{GUESSED[name]},train=3000"), np.random.default_rng(1)
    hits = sum(GUESSES[name](" ".join(e.prompt), random) == " ".join(e.answer) for e in task.examples("train"))
    assert stats.binomtest(hits, 3000, task.chance_accuracy(64)).pvalue > 0.001


@pytest.mark.parametrize("name", ["multikey", "multivalue", "multiquery", "update", "tracking"])
def test_a_window_of_the_needles_suffices_and_one_token_less_does_not(name):
    """The window begins at the first needed line: a key or variable is the second or first of its words."""
    task = build(SPECS[name])
    offset = 0 if name == "tracking" else 1
    for example in task.examples("test"):
        suffix = list(example.prompt[example.needles[0][0] + offset :])
        assert task.answer_from_suffix(suffix, example.length) == list(example.answer)
        assert task.answer_from_suffix(suffix[1:], example.length) is None


@pytest.mark.parametrize(
    ("spec", "window", "expected"),
    [
        # depths 0, 0.5 and 1: only the last one is within 30 tokens, and a guess is right in a quarter of the others
        ("multikey:items=64,times=4,test=8,depths=3,keys=4,train=1", 30, (1 + 1 / 4 + 1 / 4) / 3),
        ("passkey:items=64,times=4,test=8,depths=3,train=1", 30, (1 + 2e-3) / 3),
        # of 50 different tokens all but the last 30 are hidden; the copy is of 5 tokens from place 0, 20 or 40
        ("induction:items=50,least=50,times=1,test=8,depths=3,alphabet=60,train=1", 20, (1 + 2 / 41) / 3),
    ],
)
def test_accuracy_of_a_window(spec, window, expected):
    task = build(spec)
    examples = [e for e in task.examples("test") if e.length == task.max_length("test")]
    assert window_accuracy(task, examples, window) == pytest.approx(expected)
    assert window_accuracy(task, examples, 10_000) == 1.0


def test_the_window_of_a_label_ends_at_the_label():
    """A label is right if its gap is within the window: the value lies gap tokens before the key that asks for it."""
    task = build("mqar:items=64,times=2,test=30,pairs=4,train=1")
    examples = [e for e in task.examples("test") if e.length == 128]
    gaps = [gap for example in examples for gap in example.gaps]
    expected = sum(1.0 if gap + 2 <= 40 else 0.25 for gap in gaps) / len(gaps)
    assert window_accuracy(task, examples, 40) == pytest.approx(expected)
    assert 0.3 < expected < 0.95


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("multikey:keys=20", "raise least and items to at least"),
        ("multikey:keys=11,digits=1,items=128,least=100", "11 lines have different values and there are 10"),
        ("multikey:keys=3,alphabet=2", "3 keys are more than alphabet=2"),
        ("multiquery:keys=2,queries=3", "3 queries are more than 2 keys"),
        ("update:keys=2,updates=3", "3 updates are more than 2 keys"),
        ("tracking:chains=9,hops=2,items=200,least=150", "27 variables are more than alphabet=26"),
        ("tracking:chains=11,hops=1,digits=1,items=200,least=150", "11 chains are more than 10 values"),
        ("common:rarely=6,items=64,least=60", "rarely=6 is not below often=6"),
        ("common:alphabet=40", "different words: raise alphabet"),
        ("frequent:alphabet=4", "different words: raise alphabet"),
        ("frequent:least=20", "raise least to at least 59"),
    ],
)
def test_refusals(spec, words):
    with refused(words):
        build(spec)

"""``mqar``, ``selective_copy`` and ``induction``: examples against their definitions, gaps, guesses and refusals."""

from __future__ import annotations

from collections import Counter
from itertools import islice, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused
from scipy import stats

from fairseq_rpe.algorithms import SPLITS, build
from fairseq_rpe.algorithms.base import Algorithm, Example

SIZES = "items=32,least=20,times=4,train=300,valid=60,test=5"
SPECS = {
    "mqar": f"mqar:{SIZES},pairs=3,alphabet=8",
    "growing": f"mqar:{SIZES},pairs=8,growing=true,alphabet=32",
    "selective_copy": f"selective_copy:{SIZES},tokens=5,alphabet=6",
    "induction": f"induction:{SIZES},prefix=2,answer=3,depths=3,alphabet=130",
}


def solve_mqar(words: tuple[str, ...], pairs: int) -> tuple[list[int], list[str]]:
    """The places and the values that the pairs in front tell, from nothing but the text of a prompt."""
    values = dict(zip(words[0 : 2 * pairs : 2], words[1 : 2 * pairs : 2], strict=True))
    assert len(values) == len(set(values.values())) == pairs
    assert all(key[0] == "k" and value[0] == "v" for key, value in values.items())
    places = [i for i in range(2 * pairs, len(words)) if words[i] != "_"]
    assert sorted(words[i] for i in places) == sorted(values)  # each key is asked exactly once
    assert all(i % 2 == 0 for i in places)
    return places, [values[words[i]] for i in places]


def solve_selective_copy(words: tuple[str, ...], tokens: int) -> tuple[list[int], list[str]]:
    body, tail = words[: -tokens - 1], words[-tokens - 1 :]
    copied = [word for word in body if word != "_"]
    assert tail == ("[COPY]", *["_"] * tokens) and len(copied) == tokens
    return list(range(len(words) - tokens, len(words))), copied


def solve_induction(words: tuple[str, ...], prefix: int, answer: int) -> list[str]:
    block, start = words[:-prefix], words.index(words[-prefix])
    assert len(set(block)) == len(block) and block[start : start + prefix] == words[-prefix:]
    return list(block[start + prefix : start + prefix + answer])


def all_examples(task: Algorithm) -> list[Example]:
    return [example for split in SPLITS for example in task.examples(split)]


@pytest.mark.parametrize("name", ["mqar", "growing"])
def test_mqar_asks_each_key_once_and_labels_its_value(name):
    task = build(SPECS[name])
    for example in all_examples(task):
        pairs = 3 if name == "mqar" else example.length // 4
        places, values = solve_mqar(example.prompt, pairs)
        assert list(example.label_indices) == places and list(example.answer) == values
        assert len(example.prompt) == example.length == task.num_tokens(example.length)
        assert [example.prompt.index(v) for v in values] == [p - g for p, g in zip(places, example.gaps, strict=True)]


def test_the_published_sizes_of_mqar():
    """Lengths and numbers of pairs of the paper's figure 2, T = 16·D, and of the extrapolation, T = 4·D."""
    for pairs, factor in ((4, 16), (16, 4)):
        task = build(f"mqar:pairs={pairs},growing=true,alphabet=256,times=16,test=1")
        assert [(n, task.num_pairs(n)) for n in task.lengths("test")] == [
            (n, n // factor) for n in (64, 128, 256, 512, 1024)
        ]
    assert [build("mqar").num_pairs(n) for n in (32, 64, 512)] == [4, 4, 4]


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_slots_follow_the_power_law(power):
    """The slot of the first drawn key has exactly p(g) ∝ g^(a − 1); with 16 slots, 2,000 draws."""
    task = build(f"mqar:items=34,least=34,times=1,pairs=1,alphabet=20,train=2000,power={power}")
    counts = Counter((example.label_indices[0] - 2) // 2 + 1 for example in task.examples("train"))
    weights = [g ** (power - 1) for g in range(1, 17)]
    expected = [2000 * weight / sum(weights) for weight in weights]
    assert stats.chisquare([counts[g] for g in range(1, 17)], expected).pvalue > 0.001
    assert (counts[1] > 5 * counts[16]) == (power < 1)


def test_slots_are_drawn_one_after_another_without_replacement():
    """Of two keys in six slots, the second has p(g) without the slot of the first."""
    task = build("mqar:items=16,least=16,times=1,pairs=2,alphabet=20,train=2000,power=0.5")
    counts: Counter = Counter()
    for example in task.examples("train"):
        slots = {example.prompt[i]: (i - 4) // 2 + 1 for i in example.label_indices}
        counts[slots[example.prompt[0]], slots[example.prompt[2]]] += 1
    weights = {g: g**-0.5 for g in range(1, 7)}
    total = sum(weights.values())
    pairs = list(permutations(weights, 2))
    expected = [2000 * weights[g] / total * weights[h] / (total - weights[g]) for g, h in pairs]
    assert stats.chisquare([counts[pair] for pair in pairs], expected).pvalue > 0.001


def test_selective_copy_hides_tokens_at_uniform_places():
    task = build(SPECS["selective_copy"])
    for example in all_examples(task):
        places, tokens = solve_selective_copy(example.prompt, 5)
        assert list(example.label_indices) == places and list(example.answer) == tokens
        sources = [i for i, word in enumerate(example.prompt[:-6]) if word != "_"]
        assert [p - g for p, g in zip(places, example.gaps, strict=True)] == sources
        assert len(example.prompt) == example.length
    uniform = build("selective_copy:items=20,least=20,times=1,tokens=3,train=1500")
    first = Counter(i for e in uniform.examples("train") for i, word in enumerate(e.prompt[:16]) if word != "_")
    # 3 of 16 places are drawn without replacement: the variance of a count is 13/15 of that of a multinomial one
    statistic = sum((first[i] - 1500 * 3 / 16) ** 2 / (1500 * 3 / 16) for i in range(16)) / (13 / 15)
    assert stats.chi2.sf(statistic, 15) > 0.001


def test_induction_continues_the_block_at_the_depth():
    task = build(SPECS["induction"])
    for example in all_examples(task):
        assert list(example.answer) == solve_induction(example.prompt, 2, 3)
        assert len(example.prompt) + len(example.answer) == example.length
        if example.depth is not None:
            block = example.length - 5
            assert example.prompt.index(example.prompt[-2]) == int(example.depth * (block - 5))


@pytest.mark.parametrize("name", SPECS)
def test_lengths_words_and_splits(name):
    task = build(SPECS[name])
    examples = {split: list(task.examples(split)) for split in SPLITS}
    assert Counter(e.length for e in examples["test"]) == dict.fromkeys((32, 64, 128), 15 if name == "induction" else 5)
    assert {e.length for e in examples["train"]} == set(range(20, 33))
    assert not {e.prompt for e in examples["train"]} & {e.prompt for e in examples["valid"] + examples["test"]}
    words = task.vocabulary()
    assert len(words) == len(set(words))
    assert {w for es in examples.values() for e in es for w in (*e.prompt, *e.answer)} == set(words)
    assert list(task.examples("test")) == examples["test"]


def answer_from_window(task: Algorithm, example: Example, window: int) -> list[list[str] | None]:
    """The answers of the oracle that sees ``window`` tokens up to each question, or up to the end of the prompt."""
    ends = [place + 1 for place in example.label_indices] or [len(example.prompt)]
    prompts = [list(example.prompt[max(0, end - window) : end]) for end in ends]
    return [task.answer_from_suffix(prompt, example.length) for prompt in prompts]


@pytest.mark.parametrize("name", SPECS)
def test_an_oracle_of_the_whole_prompt_is_always_right(name):
    task = build(SPECS[name])
    for example in all_examples(task):
        answers = answer_from_window(task, example, example.length)
        assert answers == ([[word] for word in example.answer] if example.label_indices else [list(example.answer)])


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(SPECS)), index=st.integers(0, 299), window=st.integers(1, 32))
def test_an_oracle_of_a_window_is_right_or_guesses(name, index, window):
    """It knows the answer from the smallest window that shows the repeated tokens; no window gives a wrong answer."""
    task = build(SPECS[name])
    example = next(islice(task.examples("train"), index, None))
    answers = answer_from_window(task, example, window)
    if name == "induction":
        first = len(example.prompt) - example.prompt.index(example.prompt[-1])
        assert answers == [list(example.answer) if window >= first else None]
        return
    for answer, word, gap in zip(answers, example.answer, example.gaps, strict=True):
        # the key is in front of the value in mqar; one token more than the gap shows the repeated token
        needed = gap + (1 if name == "selective_copy" else 2)
        assert answer == ([word] if window >= needed else None)


@pytest.mark.parametrize("name", SPECS)
def test_a_guess(name):
    """The random guess that ``chance_accuracy`` names is right so often."""
    task, right, expected = build(SPECS[name]), 0.0, 0.0
    for example in task.examples("train"):
        if name == "induction":
            block = example.prompt[:-2]
            expected += task.chance_accuracy(example.length)
            right += sum(block[s + 2 : s + 5] == example.answer for s in range(len(block) - 4)) / (len(block) - 4)
        else:
            shown = example.prompt[1 : 2 * len(example.answer) : 2]
            values = shown if name in ("mqar", "growing") else task.vocabulary()[2:]
            right += sum(values.count(word) / len(values) for word in example.answer)
            expected += len(example.answer) * task.chance_accuracy(example.length)
    assert right == pytest.approx(expected, rel=1e-6)


REFUSED = {
    "mqar:pairs=9": "32 tokens are too few, the shortest example has 36: raise least to at least 36",
    "mqar:pairs=17": "raise least and items to at least 68",
    "mqar:pairs=17,growing=true": "17 pairs and their questions need 68 tokens, more than items=64: raise items or",
    "mqar:pairs=5,alphabet=4": "512 tokens have 5 pairs and there are 4 keys: raise alphabet",
    "mqar:power=0": "'power' of 'mqar' must be more than 0",
    "selective_copy:tokens=16": "32 tokens are too few, the shortest example has 33: raise least",
    "induction:alphabet=100": "512 tokens have a block of 507 different tokens and there are 100: raise alphabet or",
    "induction:prefix=6,answer=2": "16 tokens are too few, the shortest example has 17",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refusals(spec):
    with refused(REFUSED[spec]):
        build(spec)

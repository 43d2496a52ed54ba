"""``addition`` and ``parity``: sums in every form against Python's integers, carry chains, and guesses."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_rpe.algorithms import SPLITS, build
from fairseq_rpe.algorithms.addition import add_digits, draw_with_carry_chain, longest_carry_chain

SIZES = "items=6,times=3,train=300,valid=40,test=100"
FORMS = [
    f"{order}padding={padding},hints={hints}"
    for order in ("order=plain,", "", "order=all,")
    for padding in ("true", "false")
    for hints in ("true", "false")
]


def number(words: list[str], is_reversed: bool) -> tuple[int, dict[int, str]]:
    """The value of a number's words, and the hint of each significance."""
    hints = words[::2] if words[0].startswith("h") else []
    digits = words[1::2] if hints else words
    by_significance = digits if is_reversed else digits[::-1]
    hints = hints if is_reversed else hints[::-1]
    return sum(int(digit) * 10**i for i, digit in enumerate(by_significance)), dict(enumerate(hints))


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_right_in_every_form(form):
    task = build(f"addition:{SIZES},{form}")
    config, used = task.config, set()
    for example in (e for split in SPLITS for e in task.examples(split)):
        *prompt, equals = example.prompt
        plus = prompt.index("+")
        first, second = (number(words, config.order == "all") for words in (prompt[:plus], prompt[plus + 1 :]))
        total = number(list(example.answer), config.order != "plain")
        assert first[0] + second[0] == total[0] and equals == "="
        # digits of equal significance have equal hints, which are consecutive words of a list
        assert first[1] == second[1] and first[1].items() <= total[1].items()
        places = [int(hint[1:]) for hint in total[1].values()]
        assert not places or places == list(range(places[0], places[0] - len(places), -1))
        width = 2 if config.hints else 1
        digits = len(example.answer) // width
        assert len(example.prompt) == (2 * example.length) * width + 2
        assert digits == (example.length + 1 if config.padding else len(str(total[0])))
        used |= {*example.prompt, *example.answer}
        assert max(first[0], second[0]) < 10**example.length
        if not config.padding and example.length > 1:
            assert min(first[0], second[0]) >= 10 ** (example.length - 1)
        assert task.answer_from_suffix(list(example.prompt), example.length) == list(example.answer)
        assert task.answer_from_suffix(list(example.prompt[2:]), example.length) is None
    assert used == set(task.vocabulary()) and len(task.vocabulary()) == len(used)


def test_position_coupling_has_3n_plus_3_tokens_and_all_pairs_of_lengths():
    task = build("addition:items=40,padding=true,train=4000,least=4")
    assert [task.num_tokens(n) for n in (1, 40)] == [6, 123]
    sizes, random = Counter(), np.random.default_rng(0)
    for _ in range(1400):
        _, *digits = task.draw(4, random)
        sizes[tuple(len("".join(map(str, part)).lstrip("0")) or 1 for part in (digits[:4], digits[4:]))] += 1
    assert set(sizes) == {(4, 1), (4, 2), (4, 3), (4, 4), (3, 4), (2, 4), (1, 4)}
    assert all(abs(count - 200) < 5 * 200**0.5 for count in sizes.values())


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 30), share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_a_drawn_carry_chain_is_the_longest(n, share, seed):
    chain = round(share * n)
    first, second = draw_with_carry_chain(n, chain, np.random.default_rng(seed))
    assert longest_carry_chain(first, second) == chain and len(first) == len(second) == n
    assert first[0] and second[0]
    numbers = [int("".join(map(str, digits))) for digits in (first, second)]
    assert int("".join(map(str, add_digits(first, second)))) == sum(numbers)


@given(digits=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_the_longest_carry_chain_by_following_each_carry(digits):
    """The slow way: remove each carry at its source and count the digits of the sum that change."""
    columns = digits[::-1]  # the least significant first
    longest = 0
    for start, (a, b) in enumerate(columns):
        if a + b >= 10:
            end = start + 1
            while end < len(columns) and sum(columns[end]) == 9:
                end += 1
            longest = max(longest, end - start)
    assert longest_carry_chain([a for a, _ in digits], [b for _, b in digits]) == longest


def test_random_sums_seldom_have_long_chains():
    random = np.random.default_rng(0)
    chains = Counter(longest_carry_chain(*random.integers(10, size=(2, 20)).tolist()) for _ in range(1000))
    assert sum(count for chain, count in chains.items() if chain >= 5) < 10


def test_the_guess_of_addition():
    """By all pairs of numbers: the share of sums with n digits determines the accuracy."""
    task = build("addition:least=1")
    for n, numbers in ((1, range(10)), (2, range(10, 100)), (3, range(100, 1000, 1))):
        short = sum(max(0, min(10**n - a, numbers[-1] + 1) - numbers[0]) for a in numbers) / len(numbers) ** 2
        assert task.chance_accuracy(n) == pytest.approx(short * 10.0**-n + (1 - short) * 10.0 ** -(n + 1))
    assert build("addition:padding=true").chance_accuracy(3) == pytest.approx(1e-4)


@pytest.mark.parametrize("scratchpad", ["false", "true"])
def test_parity(scratchpad):
    task = build(f"parity:items=12,times=2,train=400,valid=50,test=200,scratchpad={scratchpad}")
    ones = Counter()
    for example in (e for split in SPLITS for e in task.examples(split)):
        verb, *bits, end = example.prompt
        parities = [str(bits[: i + 1].count("1") % 2) for i in range(len(bits))]
        assert list(example.answer) == (parities if scratchpad == "true" else parities[-1:])
        assert (verb, end, len(bits)) == ("Parity:", "[SEP]", example.length)
        assert task.num_tokens(example.length) == len(example.prompt) + len(example.answer)
        assert task.answer_from_suffix(list(example.prompt), example.length) == list(example.answer)
        assert task.answer_from_suffix(list(example.prompt[2:]), example.length) is None
        ones[example.answer[-1]] += 1
    assert abs(ones["1"] - 325) < 5 * (650 / 4) ** 0.5
    assert task.chance_accuracy(10) == (0.5**10 if scratchpad == "true" else 0.5)


def test_parity_has_examples_of_every_length_in_every_split():
    task = build("parity:train=1500,valid=300,test=300")
    assert all(len(list(islice(task.examples(split), 300))) == 300 for split in SPLITS)

"""Addition of two numbers with many digits."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairseq_rpe.algorithms.base import Algorithm, TaskOptions, register
from fairseq_rpe.core.spec import option

Digits = list[int]  # of a number, the most significant digit first


@register("addition")
class Addition(Algorithm):
    """Add two numbers of n digits.

    ``order`` says which numbers are written with the least significant digit first. With ``padding`` the longer operand
    has n digits and the shorter one any smaller number of digits, such that all pairs of lengths with this maximum are
    equally likely. Zeros fill the shorter operand up to n digits and the sum up to n + 1 digits, so an example has 3n +
    3 tokens. Without ``padding`` both operands have exactly n digits, and the sum has n or n + 1. With ``hints`` a hint
    precedes each digit, and digits of equal significance have the same hint; the hints of an example are consecutive
    words of a list, from a random one on. The answers of Abacus embeddings are ``order=all``, those of position
    coupling ``order=answer,padding=true``. Random digits are correct with probability 10^-(n + 1), or 10^-n for a sum
    of n digits.

    Padding and hints show which digits belong together, so report results with and without them.
    """

    @dataclass(frozen=True)
    class Config(TaskOptions):
        """Options of the task."""

        items: int = option(10, "M: training lengths are Uniform(least, M) digits", minimum=2, maximum=10_000)
        least: int = option(1, "smallest number of digits in training and test", minimum=1, maximum=10_000)
        order: Literal["plain", "answer", "all"] = option(
            "answer", "numbers with the least digit first: none, the answer, or all", choices=("plain", "answer", "all")
        )
        padding: bool = option(False, "whether zeros fill operands up to n and sums up to n + 1 digits")
        hints: bool = option(False, "whether a hint for its significance precedes each digit")

    formula = "a1 … an + b1 … bn =  →  the digits of the sum"
    paper = "McLeish et al. 2024, Abacus (arXiv 2405.17399); Cho et al. 2024, position coupling (arXiv 2405.20671)"
    length_unit = "digits"
    variety_option = "least"

    def num_tokens(self, n: int) -> int:
        """Return the number of words of prompt and answer of the longest instance of n digits."""
        return (3 * n + 1) * (2 if self.config.hints else 1) + 2

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw the first hint and the digits of both operands, padded to n digits."""
        first_hint = int(random.integers(self._num_hints - n)) if self.config.hints else 0
        sizes = [n, n]
        if self.config.padding:
            number = int(random.integers(2 * n - 1))  # of the pair of lengths (n, 1), …, (n, n), …, (1, n)
            sizes = [n, number + 1] if number < n else [number + 1 - n, n]
        digits: Digits = []
        for size in sizes:
            first = int(random.integers(0 if size == 1 else 1, 10))
            digits += [0] * (n - size) + [first, *random.integers(10, size=size - 1).tolist()]
        return [first_hint, *digits]

    @property
    def _num_hints(self) -> int:
        """Number of hints: the longest sum in the test has so many digits."""
        return self.max_length("test") + 1

    def _write(self, digits: Digits, n: int, first_hint: int, is_reversed: bool) -> list[str]:
        """Return the words of a number in an instance of n digits."""
        words = []
        for index, digit in enumerate(digits):
            significance = len(digits) - 1 - index
            hint = [f"h{first_hint + n - significance}"] if self.config.hints else []
            words.append([*hint, str(digit)])
        return [word for group in (reversed(words) if is_reversed else words) for word in group]

    def prompt(self, items: list[int]) -> list[str]:
        """Return both operands."""
        first_hint, *digits = items
        n, is_reversed = len(digits) // 2, self.config.order == "all"
        first, second = (self._write(number, n, first_hint, is_reversed) for number in (digits[:n], digits[n:]))
        return [*first, "+", *second, "="]

    def answer(self, items: list[int]) -> list[str]:
        """Return the sum."""
        first_hint, *digits = items
        n = len(digits) // 2
        total = add_digits(digits[:n], digits[n:])
        if not self.config.padding and total[0] == 0:
            total = total[1:]
        return self._write(total, n, first_hint, self.config.order != "plain")

    def vocabulary(self) -> list[str]:
        """Return the signs, the digits and the hints."""
        hints = range(self._num_hints if self.config.hints else 0)
        return ["+", "=", *map(str, range(10)), *(f"h{i}" for i in hints)]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of random digits, if the number of digits and the hints are right."""
        longer = 10.0 ** -(n + 1)
        if self.config.padding:
            return longer
        # share of the pairs of n digits without a carry out of the last digit; for n = 1, zeros are operands, too
        shorter_share = 0.55 if n == 1 else (0.64 + 0.8 * 10.0**-n) / 1.62
        return shorter_share * 10.0**-n + (1 - shorter_share) * longer

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the sum, if the suffix shows all digits; a sum without some digit is a guess."""
        digits = [int(word) for word in suffix if word.isdigit()]
        if len(digits) < 2 * n:
            return None
        first, second = (
            (digits[:n], digits[n:]) if self.config.order != "all" else (digits[n - 1 :: -1], digits[: n - 1 : -1])
        )
        hints = [int(word[1:]) for word in suffix if word.startswith("h")]
        # The last hint of the prompt belongs to the least digit, or with all numbers reversed to the greatest.
        first_hint = 0 if not hints else hints[-1] - (1 if self.config.order == "all" else n)
        return self.answer([first_hint, *first, *second])


def add_digits(first: Digits, second: Digits) -> Digits:
    """Return the n + 1 digits of the sum of two numbers of n digits.

    >>> add_digits([9, 5], [0, 7])
    [1, 0, 2]
    """
    total: Digits = []
    carry = 0
    for a, b in zip(reversed(first), reversed(second), strict=True):
        carry, digit = divmod(a + b + carry, 10)
        total.append(digit)
    return [carry, *reversed(total)]


def longest_carry_chain(first: Digits, second: Digits) -> int:
    """Return the largest number of digits over which one carry travels.

    A chain begins at digits with a + b ≥ 10, which produce a carry, and continues over the more significant digits with
    a + b = 9, which pass the carry on. Sums of random digits seldom have long chains, since a + b = 9 for one pair of
    digits in ten.

    Args:
        first: Digits of one operand.
        second: Digits of the other operand, as many.

    Returns:
        The largest number of digits in a chain, 0 without a carry.

    >>> longest_carry_chain([1, 2, 3], [4, 5, 6]), longest_carry_chain([1, 4, 9], [2, 5, 1])
    (0, 2)
    """
    longest = length = 0
    for a, b in zip(reversed(first), reversed(second), strict=True):
        if a + b >= 10:
            length = 1
        elif a + b < 9 or length == 0:
            length = 0
        else:
            length += 1
        longest = max(longest, length)
    return longest


def draw_with_carry_chain(n: int, chain: int, random: np.random.Generator) -> tuple[Digits, Digits]:
    """Draw two numbers of n digits whose longest carry chain has a given number of digits.

    Args:
        n: Number of digits; the first digit of a number is not 0.
        chain: Number of digits in the longest chain, from 0 to n.
        random: Random generator.

    Returns:
        The digits of both numbers. One chain of ``chain`` digits begins at a random place; every other pair of digits
        is uniform among those that make no longer chain.
    """
    start = int(random.integers(n - chain + 1))  # significance at which the chain begins
    columns: list[tuple[int, int]] = []
    length = 0  # of the chain that has reached the last column
    for significance in range(n):
        while True:
            least = 1 if significance == n - 1 else 0
            a, b = random.integers(least, 10, size=2).tolist()
            if chain and significance == start:
                fits = a + b >= 10
            elif start < significance < start + chain:
                fits = a + b == 9
            else:
                fits = a + b < 10 - (length == chain > 0) or (a + b >= 10 and chain > 0)
            if fits:
                break
        length = 1 if a + b >= 10 else length + 1 if a + b == 9 and length else 0
        columns.append((a, b))
    return [a for a, _ in reversed(columns)], [b for _, b in reversed(columns)]

"""Arithmetic tasks, whose answer is one digit that depends on every item."""

import string
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fairseq_rpe.algorithms.base import SEPARATOR, Algorithm, TaskOptions, register
from fairseq_rpe.algorithms.lists import KAZEMNEJAD
from fairseq_rpe.core.spec import option


@register("summation")
class Summation(Algorithm):
    """Compute the last digit of a sum of digits from 1 to 9."""

    @dataclass(frozen=True)
    class Config(TaskOptions):
        """Options of the task."""

        # the option of TaskOptions, called M in formulas and texts, with a smaller default
        items: int = option(8, "M: training lengths are Uniform(2, M) items", minimum=2, maximum=10_000)

    signs = "+"
    formula = "Compute: v1 + … + vn [SEP]  →  (v1 + … + vn) mod 10"
    paper = KAZEMNEJAD

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw n digits from 1 to 9."""
        return random.integers(1, 10, size=n).tolist()

    def prompt(self, items: list[int]) -> list[str]:
        """Return the sum as words; a negative item, which :class:`AddSubtract` has, is subtracted."""
        terms = [word for v in items[1:] for word in ("+" if v > 0 else "-", str(abs(v)))]
        return ["Compute:", str(items[0]), *terms, SEPARATOR]

    def answer(self, items: list[int]) -> list[str]:
        """Return the last digit of the result."""
        return [str(sum(items) % 10)]

    def vocabulary(self) -> list[str]:
        """Return the words of the prompt and the digits."""
        return ["Compute:", SEPARATOR, *self.signs, *string.digits]


@register("add_subtract")
class AddSubtract(Summation):
    """Compute sums and differences of digits whose intermediate results are all digits.

    The first item is a digit. Each later item is signed and leads to a result drawn uniformly from the nine other
    digits, so the difficulty of a step does not grow with the length. A model need not always know the previous result:
    large steps reveal it, since after ``- 9`` the result can only be 0.
    """

    signs = "+-"
    formula = "Compute: v1 ± v2 … ± vn [SEP]  →  the result; it and all intermediate ones lie in 0 … 9"
    paper = "Zhao et al. 2023, survey (arXiv 2312.17044), A.3"

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw the intermediate results and return their differences, the first one as it is."""
        results = [int(random.integers(10))]
        for number in random.integers(9, size=n - 1).tolist():
            # The nine digits other than the last result: those from it on are one higher.
            results.append(number + (number >= results[-1]))
        return [results[0], *(b - a for a, b in pairwise(results))]

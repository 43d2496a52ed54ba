"""List tasks, whose answer is the items of the prompt in some order."""

import functools
import string
from dataclasses import dataclass

import numpy as np

from fairseq_rpe.algorithms.base import SEPARATOR, Algorithm, TaskOptions, register
from fairseq_rpe.core.spec import option

KAZEMNEJAD = "Kazemnejad et al. 2023 (arXiv 2305.19466)"


class _List(Algorithm):
    @dataclass(frozen=True)
    class Config(TaskOptions):
        alphabet: int = option(100, "number of different items", minimum=2, maximum=50_000)

    paper = KAZEMNEJAD
    verb = ""

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        return random.integers(self.config.alphabet, size=n).tolist()

    def prompt(self, items: list[int]) -> list[str]:
        return [self.verb, *self._words(items), SEPARATOR]

    def vocabulary(self) -> list[str]:
        return [self.verb, SEPARATOR, *alphabet(self.config.alphabet)]

    def _words(self, items: list[int]) -> list[str]:
        words = alphabet(self.config.alphabet)
        return [words[i] for i in items]


@functools.cache
def alphabet(size: int) -> list[str]:
    """Return ``size`` words in ascending order: digits, letters, then x62, x63, …."""
    plain = list(string.digits + string.ascii_letters)
    return plain[:size] + [f"x{i}" for i in range(len(plain), size)]


@register("copy")
class Copy(_List):
    """Copy the items."""

    formula = "Copy: t1 … tn [SEP]  →  t1 … tn"
    verb = "Copy:"

    def answer(self, items: list[int]) -> list[str]:
        """Return the items in their order."""
        return self._words(items)


@register("reverse")
class Reverse(_List):
    """Reverse the order of the items."""

    formula = "Reverse: t1 … tn [SEP]  →  tn … t1"
    verb = "Reverse:"

    def answer(self, items: list[int]) -> list[str]:
        """Return the items from the last to the first."""
        return self._words(items[::-1])


@register("sort")
class Sort(_List):
    """Sort the items in the order of the alphabet, keeping repeated ones."""

    @dataclass(frozen=True)
    class Config(_List.Config):
        """Options of the task."""

        items: int = option(8, "M: training lengths are Uniform(2, M) items", minimum=2, maximum=10_000)
        alphabet: int = option(50, "number of different items", minimum=2, maximum=50_000)

    formula = "Sort: t1 … tn [SEP]  →  the same items in ascending order"
    verb = "Sort:"

    def answer(self, items: list[int]) -> list[str]:
        """Return the items in ascending order."""
        return self._words(sorted(items))

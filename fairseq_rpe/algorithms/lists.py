"""Tasks whose answer is the items of the prompt in another order."""

import functools
import string
from dataclasses import dataclass

import numpy as np

from fairseq_rpe.algorithms.base import SEPARATOR, Algorithm, Sizes, register
from fairseq_rpe.core.spec import option

KAZEMNEJAD = "Kazemnejad et al. 2023 (arXiv 2305.19466)"


class _List(Algorithm):
    @dataclass(frozen=True)
    class Config(Sizes):
        alphabet: int = option(100, "different items", minimum=2, maximum=50_000)

    paper = KAZEMNEJAD
    verb = ""

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        return random.integers(self.config.alphabet, size=n).tolist()

    def prompt(self, items: list[int]) -> list[str]:
        return [self.verb, *self._shown(items), SEPARATOR]

    def words(self) -> list[str]:
        return [self.verb, SEPARATOR, *alphabet(self.config.alphabet)]

    def _shown(self, items: list[int]) -> list[str]:
        words = alphabet(self.config.alphabet)
        return [words[i] for i in items]


@functools.cache
def alphabet(size: int) -> list[str]:
    """``size`` words: digits, letters, then x62, x63 …; their order is the order of sorting."""
    plain = list(string.digits + string.ascii_letters)
    return plain[:size] + [f"x{i}" for i in range(len(plain), size)]


@register("copy")
class Copy(_List):
    """Say the items again."""

    formula = "Copy: t1 … tn [SEP]  →  t1 … tn"
    verb = "Copy:"

    def answer(self, items: list[int]) -> list[str]:
        return self._shown(items)


@register("reverse")
class Reverse(_List):
    """Say the items from the last to the first."""

    formula = "Reverse: t1 … tn [SEP]  →  tn … t1"
    verb = "Reverse:"

    def answer(self, items: list[int]) -> list[str]:
        return self._shown(items[::-1])


@register("sort")
class Sort(_List):
    """Say the items in the order of the alphabet, repeated ones as often as they are there."""

    @dataclass(frozen=True)
    class Config(_List.Config):
        items: int = option(8, "M: training lengths are Uniform(2, M) items", minimum=2, maximum=10_000)
        alphabet: int = option(50, "different items", minimum=2, maximum=50_000)

    formula = "Sort: t1 … tn [SEP]  →  the same items in ascending order"
    verb = "Sort:"

    def answer(self, items: list[int]) -> list[str]:
        return self._shown(sorted(items))

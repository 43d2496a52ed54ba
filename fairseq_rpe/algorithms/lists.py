"""Tasks whose answer is the items of the prompt in another order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core import option
from .base import SEPARATOR, Algorithm, Sizes, alphabet, register

KAZEMNEJAD = "Kazemnejad et al. 2023 (arXiv 2305.19466)"


@dataclass(frozen=True)
class ListConfig(Sizes):
    alphabet: int = option(100, "different items", minimum=2, maximum=50_000)


class _List(Algorithm):
    Config = ListConfig
    paper = KAZEMNEJAD
    verb = ""

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        return random.integers(self.config.alphabet, size=n).tolist()

    def _shown(self, items: list[int]) -> list[str]:
        return [self._alphabet[i] for i in items]

    def prompt(self, items: list[int]) -> list[str]:
        return [self.verb, *self._shown(items), SEPARATOR]

    def words(self) -> list[str]:
        return [self.verb, SEPARATOR, *self._alphabet]

    def __init__(self, name: str, config: ListConfig) -> None:
        super().__init__(name, config)
        self._alphabet = alphabet(config.alphabet)


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


@dataclass(frozen=True)
class SortConfig(ListConfig):
    items: int = option(8, "M: training lengths are Uniform(2, M) items", minimum=2, maximum=10_000)
    alphabet: int = option(50, "different items", minimum=2, maximum=50_000)


@register("sort")
class Sort(_List):
    """Say the items in the order of the alphabet, repeated ones as often as they are there."""

    Config = SortConfig
    formula = "Sort: t1 … tn [SEP]  →  the same items in ascending order"
    verb = "Sort:"

    def answer(self, items: list[int]) -> list[str]:
        return self._shown(sorted(items))

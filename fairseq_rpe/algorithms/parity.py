"""Parity: the sum of bits modulo 2."""

import itertools
import operator
from dataclasses import dataclass

import numpy as np

from fairseq_rpe.algorithms.base import SEPARATOR, Algorithm, TaskOptions, register
from fairseq_rpe.core.spec import option


@register("parity")
class Parity(Algorithm):
    """Say whether the number of ones is odd.

    With ``scratchpad`` the answer has the parity of the first bit, of the first two bits, and so on up to all n bits.
    Training begins at ``least`` bits, because only 2^n different prompts have n bits and no prompt may appear in two
    splits. A random guess is correct with probability 1/2, or 2^-n with ``scratchpad``.
    """

    @dataclass(frozen=True)
    class Config(TaskOptions):
        """Options of the task."""

        items: int = option(20, "M: training lengths are Uniform(least, M) bits", minimum=2, maximum=10_000)
        times: int = option(2, "test lengths are Uniform(least, times·M) bits", minimum=1, maximum=100)
        least: int = option(8, "smallest number of bits in training and test", minimum=1, maximum=10_000)
        scratchpad: bool = option(False, "whether the answer is the parity after each bit")

    formula = "Parity: b1 … bn [SEP]  →  (b1 + … + bn) mod 2"
    paper = "Anil et al. 2022, length generalization (arXiv 2207.04901)"
    length_unit = "bits"
    variety_option = "least"

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw n bits."""
        return random.integers(2, size=n).tolist()

    def prompt(self, items: list[int]) -> list[str]:
        """Return the bits."""
        return ["Parity:", *map(str, items), SEPARATOR]

    def answer(self, items: list[int]) -> list[str]:
        """Return the parity, or the parity after each bit."""
        parities = list(map(str, itertools.accumulate(items, operator.xor)))
        return parities if self.config.scratchpad else parities[-1:]

    def vocabulary(self) -> list[str]:
        """Return the words of the prompt and the bits."""
        return ["Parity:", SEPARATOR, "0", "1"]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of guessing each bit of the answer."""
        return 0.5 ** (n if self.config.scratchpad else 1)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the answer if the suffix shows all bits; fewer bits do not change the probability of a parity."""
        bits = [int(word) for word in suffix if word in ("0", "1")]
        return self.answer(bits) if len(bits) == n else None

"""Tasks of RULER in which frequent words are counted: common words and frequent words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, perm
from typing import Any, ClassVar

import numpy as np

from fairseq_rpe.algorithms.base import register
from fairseq_rpe.algorithms.lists import alphabet
from fairseq_rpe.algorithms.needle_lines import RULER
from fairseq_rpe.algorithms.token_lengths import TokenOptions, TokenTask
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option

_QUESTION = ("?", ":")


def most_frequent(words: Sequence[str], count: int) -> list[str] | None:
    """Return the most frequent words, the most frequent first; None if there are fewer different words.

    Of equally frequent words those that occur first are chosen. In a shuffled text this is a fair draw.

    >>> most_frequent("b a b c a b".split(), 2)
    ['b', 'a']
    """
    counts = Counter(words).most_common(count)
    return [word for word, _ in counts] if len(counts) == count else None


@register("common")
class CommonWords(TokenTask):
    """Find the K words of a list that occur more often than the others.

    K words occur f times, u other words g times, in a random order. The answer is the K words in the order of the
    vocabulary. With ``growing=false`` only the number u of the others grows with the length. With ``growing=true`` it
    is that of training, and in tests of s·M tokens each word occurs s times as often. K random words of the list are
    correct with probability 1/C(K + u, K). An example has 1 + padding + K·f + u·g + 2 + K tokens.
    """

    @dataclass(frozen=True)
    class Config(TokenOptions):
        """Options of the task."""

        common: int = option(3, "K: number of common words", minimum=1, maximum=1_000)
        often: int = option(6, "f: how often a common word occurs", minimum=2, maximum=1_000)
        rarely: int = option(1, "g: how often any other word occurs", minimum=1, maximum=1_000)
        growing: bool = option(False, "whether the words occur more often in longer tests, in place of further words")
        alphabet: int = option(512, "number of different words", minimum=2, maximum=50_000)

    formula = "Common: words, K of them f times and the others g times ? :  →  the K words"
    paper = RULER
    head: ClassVar[str] = "Common:"
    padding: ClassVar[str] = ";"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if config.rarely >= config.often:
            raise UserError(f"'{self.spec}': rarely={config.rarely} is not below often={config.often}: lower it")
        words = config.common + max(self.num_others(n) for n in self.lengths("test"))
        if words > config.alphabet:
            raise UserError(f"'{self.spec}': the longest example has {words} different words: raise alphabet")

    @property
    def min_tokens(self) -> int:
        """Number of tokens of an example with as many other words as common ones."""
        config = self.config
        return int(1 + config.common * (config.often + config.rarely) + len(_QUESTION) + config.common)

    def _scale(self, n: int) -> int:
        """Return how many times as often as in training the words occur in an example of n tokens."""
        return max(1, n // self.config.items) if self.config.growing else 1

    def num_others(self, n: int) -> int:
        """Return the number u of other words in an example of n tokens."""
        config = self.config
        if config.growing:
            n = min(n, config.items)
        return int((n - 1 - len(_QUESTION) - config.common - config.common * config.often) // config.rarely)

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw the length, the common words and the list of n tokens."""
        config, scale, others = self.config, self._scale(n), self.num_others(n)
        words = random.choice(config.alphabet, size=config.common + others, replace=False)
        counts = [config.often * scale] * config.common + [config.rarely * scale] * others
        listed = random.permutation(np.repeat(words, counts))
        return [n, *sorted(words[: config.common].tolist()), *listed.tolist()]

    def prompt(self, items: list[int]) -> list[str]:
        """Return the padding, the list and the question."""
        n, words = items[0], alphabet(self.config.alphabet)
        listed = [words[item] for item in items[1 + self.config.common :]]
        num_padding = n - 1 - len(listed) - len(_QUESTION) - self.config.common
        return [self.head, *[self.padding] * num_padding, *listed, *_QUESTION]

    def answer(self, items: list[int]) -> list[str]:
        """Return the common words in the order of the vocabulary."""
        words = alphabet(self.config.alphabet)
        return [words[item] for item in items[1 : 1 + self.config.common]]

    def vocabulary(self) -> list[str]:
        """Return the signs and the words."""
        return [self.head, self.padding, *_QUESTION, *alphabet(self.config.alphabet)]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of random words of the list."""
        return 1 / comb(self.config.common + self.num_others(n), self.config.common)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the most frequent words of the suffix in the order of the vocabulary."""
        words = [word for word in suffix[: -len(_QUESTION)] if word not in (self.head, self.padding)]
        common = most_frequent(words, self.config.common)
        return None if common is None else sorted(common, key=alphabet(self.config.alphabet).index)


@register("frequent")
class FrequentWords(TokenTask):
    """Find the three most frequent words of a text whose word counts follow a zeta distribution.

    In a text of N words the word of rank k = 2, 3, … occurs ⌊N·k^−α/ζ(α)⌋ times. The words are assigned to the ranks at
    random in each example. The other words of the text, rank 1, are noise ``…`` that does not count. The answer is the
    words of ranks 2, 3 and 4 in this order, whose counts always differ. Different random words of a vocabulary of V are
    correct with probability 1/(V·(V − 1)·(V − 2)). An example has 1 + N + 2 + 3 tokens.
    """

    @dataclass(frozen=True)
    class Config(TokenOptions):
        """Options of the task."""

        items: int = option(128, "M: training lengths are Uniform(least, M) tokens", minimum=2, maximum=10_000)
        least: int = option(96, "smallest length in training, in tokens", minimum=1, maximum=10_000)
        times: int = option(4, "test lengths are M, 2M, 4M … and times·M tokens", minimum=1, maximum=100)
        alpha: float = option(2.0, "α: exponent of the distribution", minimum=1.1, maximum=4)
        alphabet: int = option(50, "V: number of different words", minimum=4, maximum=50_000)

    formula = "Frequent: words, the one of rank k ⌊N·k^−α/ζ(α)⌋ times, among noise … ? :  →  words of ranks 2, 3, 4"
    paper = RULER
    head: ClassVar[str] = "Frequent:"
    noise: ClassVar[str] = "…"
    answer_tokens: ClassVar[int] = 3

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        words = len(self.counts(self.max_length("test")))
        if words > config.alphabet:
            raise UserError(f"'{self.spec}': the longest example has {words} different words: raise alphabet")

    @property
    def min_tokens(self) -> int:
        """Number of tokens from which on the counts of ranks 2 to 5 always differ."""
        return 1 + _shortest_text(self.config.alpha) + len(_QUESTION) + self.answer_tokens

    def counts(self, n: int) -> list[int]:
        """Return how often the words of ranks 2, 3, … occur in an example of n tokens, as long as they occur."""
        return list(zeta_counts(n - 1 - len(_QUESTION) - self.answer_tokens, self.config.alpha))

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw the words of the answer and the text of n tokens, in which −1 is noise."""
        counts = self.counts(n)
        words = random.choice(self.config.alphabet, size=len(counts), replace=False)
        num_noise = n - 1 - len(_QUESTION) - self.answer_tokens - sum(counts)
        text = random.permutation(np.append(np.repeat(words, counts), [-1] * num_noise)).astype(int)
        return [*words[: self.answer_tokens].tolist(), *text.tolist()]

    def prompt(self, items: list[int]) -> list[str]:
        """Return the text and the question."""
        words = alphabet(self.config.alphabet)
        text = (self.noise if item < 0 else words[item] for item in items[self.answer_tokens :])
        return [self.head, *text, *_QUESTION]

    def answer(self, items: list[int]) -> list[str]:
        """Return the words of ranks 2, 3 and 4."""
        words = alphabet(self.config.alphabet)
        return [words[item] for item in items[: self.answer_tokens]]

    def vocabulary(self) -> list[str]:
        """Return the signs and the words."""
        return [self.head, self.noise, *_QUESTION, *alphabet(self.config.alphabet)]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of different random words."""
        return 1 / perm(self.config.alphabet, self.answer_tokens)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the most frequent words of the suffix."""
        words = [word for word in suffix[: -len(_QUESTION)] if word not in (self.head, self.noise)]
        return most_frequent(words, self.answer_tokens)


def zeta_counts(num_words: int, alpha: float) -> list[int]:
    """Return ⌊N·k^−α/ζ(α)⌋ for the ranks k = 2, 3, … as long as it is not 0, for N words."""
    counts: list[int] = []
    while count := int(num_words * (len(counts) + 2) ** -alpha / _zeta(alpha)):
        counts.append(count)
    return counts


@cache
def _zeta(alpha: float) -> float:
    """Return ζ(α) = Σ k^−α for α > 1: 1,000 terms and the rest by the Euler-Maclaurin formula."""
    last = 1_000
    terms = sum(k**-alpha for k in range(1, last))
    return terms + last ** (1 - alpha) / (alpha - 1) + last**-alpha / 2 + alpha * last ** (-alpha - 1) / 12


@cache
def _shortest_text(alpha: float) -> int:
    """Return the least number of words from which on the counts of ranks 2 to 5 differ and are not 0 for rank 4."""
    # The counts of ranks k and k + 1 differ if N·(k^−α − (k + 1)^−α)/ζ(α) ≥ 1, which is hardest for k = 4.
    bound = int(_zeta(alpha) / (4**-alpha - 5**-alpha)) + 1
    equal = [n for n in range(bound) if len({*(*zeta_counts(n, alpha), 0, 0, 0, 0)[:4]}) < 4]
    return 1 + max(equal)

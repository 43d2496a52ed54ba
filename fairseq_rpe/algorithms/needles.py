"""Retrieval tasks, whose answer is at one position of a long prompt.

Perplexity beyond the training length shows that long texts do no harm; these tasks show whether a model still uses
distant text. Lengths are in tokens of prompt and answer together: for a model, an example of 512 is as long as a block
of 512 tokens of a text.
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fairseq_rpe.algorithms.base import SPLITS, Example, TaskOptions, register
from fairseq_rpe.algorithms.lists import alphabet
from fairseq_rpe.algorithms.token_lengths import TokenTask
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option

# words of the irrelevant text
FILLER: tuple[str, ...] = (
    *("the grass is green . the sky is blue . the sun is yellow .".split()),
    *("here we go . there and back again .".split()),
)


@dataclass(frozen=True)
class DepthOptions(TaskOptions):
    """Options of a task with depths.

    Attributes:
        items: Largest number of tokens M in training.
        times: The longest test example has times·M tokens.
        least: Smallest number of tokens in training.
        test: Number of test examples per length and depth.
        depth: Depth in training, from 0 (start of the prompt) to 1 (end); None: uniformly random.
        depths: Number of test depths.
    """

    items: int = option(64, "M: training lengths are Uniform(least, M) tokens", minimum=2, maximum=10_000)
    times: int = option(8, "test lengths are M, 2M, 4M … and times·M tokens", minimum=1, maximum=100)
    least: int = option(40, "smallest length in training, in tokens", minimum=1, maximum=10_000)
    test: int = option(50, "test examples for each length and depth", minimum=1, maximum=100_000)
    depth: float | None = option(None, "depth in training, from 0 to 1; none: drawn uniformly", minimum=0, maximum=1)
    depths: int = option(11, "number of depths in the test, in equal steps from 0 to 1", minimum=2, maximum=101)


class DepthTask(TokenTask):
    """Base class of tasks with an answer at some depth. Implement ``draw_at_depth`` and ``min_tokens`` too.

    Training and validation draw length and depth. The test split has ``test`` examples of each length and depth with
    a seed of their own, so any length up to times·M and any depth can be evaluated.
    """

    Config: ClassVar[type] = DepthOptions

    def draw_at_depth(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Draw a random instance.

        Args:
            n: Number of tokens of prompt and answer.
            depth: Depth of the answer; None: uniformly random.
            random: Random generator.

        Returns:
            The items of the instance.
        """
        raise NotImplementedError

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw a random instance of n tokens with the depth of training."""
        return self.draw_at_depth(n, self.config.depth, random)

    def missing_lengths(self, split: str, lengths: Any) -> str | None:
        """Return a message if a split cannot have some of ``lengths``, or None."""
        if split != "test":
            return super().missing_lengths(split, lengths)
        last = self.max_length(split)
        missing = next((n for n in lengths if not self.min_tokens <= n <= last), None)
        available = f"test examples of {self.min_tokens} to {last} tokens"
        return None if missing is None else f"{available}, not {missing}: leave it out of --lengths"

    def depths(self, split: str) -> tuple[float, ...]:
        """Return the depths of the test split in equal steps; other splits have none."""
        steps = self.config.depths - 1
        return tuple(k / steps for k in range(steps + 1)) if split == "test" else ()

    def examples(self, split: str) -> Iterator[Example]:
        """Generate the examples of a split; of the test split, by length and depth."""
        if split != "test":
            yield from super().examples(split)
            return
        for n in self.lengths(split):
            for depth in self.depths(split):
                yield from self.examples_at_depth(split, n, depth)

    def examples_at_depth(self, split: str, n: int, depth: float) -> Iterator[Example]:
        """Generate the test examples of n tokens at a depth; they are the same in every call."""
        random = np.random.default_rng([self.config.seed, SPLITS.index(split), n, round(1e6 * depth)])
        for _ in range(self.config.test):
            yield self._example(split, n, lambda: self.draw_at_depth(n, depth, random), depth)


def num_before(depth: float, count: int) -> int:
    """Return ⌊depth · count⌋, the number of units before the needle, robust against rounding of the product.

    >>> num_before(0.5, 139), num_before(0.29, 100)
    (69, 29)
    """
    return int(depth * count + 1e-9)


def filler_words(start: int, count: int) -> list[str]:
    """Return ``count`` words of the irrelevant text from word ``start`` on."""
    return [FILLER[(start + k) % len(FILLER)] for k in range(count)]


@register("passkey")
class Passkey(DepthTask):
    """Repeat a key that one line of an irrelevant text states twice.

    The text repeats five short sentences, starts at a random word and is interrupted by the line: ⌊depth·F⌋ of its F
    words come before the line. Each example has a new key. A random guess is correct with probability 10^-digits.
    """

    @dataclass(frozen=True)
    class Config(DepthOptions):
        """Options of the task."""

        digits: int = option(3, "m: number of digits of the key", minimum=1, maximum=9)

    formula = "Passkey: filler the pass key is d1 … dm . … filler what is the pass key ? the pass key is  →  d1 … dm"
    paper = "Mohtashami & Jaggi 2023, landmark attention (arXiv 2305.16300)"
    variety_option = "digits"
    head: ClassVar[tuple[str, ...]] = ("Passkey:",)
    question: ClassVar[tuple[str, ...]] = ("what", "is", "the", "pass", "key", "?", "the", "pass", "key", "is")

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the shortest example."""
        m = self.config.digits
        return len(self.head) + len(self.line(["0"] * m)) + len(self.question) + m + 1

    def line(self, key: list[str]) -> list[str]:
        """Return the line that states the key."""
        return [*"the pass key is".split(), *key, *". remember it .".split(), *key, *"is the pass key .".split()]

    def draw_at_depth(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Draw the numbers of filler words before and after the line, the first word of the filler, and the digits."""
        num_filler = n - self.min_tokens + 1
        before = int(random.integers(num_filler + 1)) if depth is None else num_before(depth, num_filler)
        start = int(random.integers(len(FILLER)))
        return [before, num_filler - before, start, *random.integers(10, size=self.config.digits).tolist()]

    def prompt(self, items: list[int]) -> list[str]:
        """Return the filler with the line and the question."""
        before, after, start, *_ = items
        words = filler_words(start, before + after)
        return [*self.head, *words[:before], *self.line(self.answer(items)), *words[before:], *self.question]

    def answer(self, items: list[int]) -> list[str]:
        """Return the digits of the key."""
        _before, _after, _start, *digits = items
        return [string.digits[digit] for digit in digits]

    def needle_spans(self, items: list[int]) -> list[tuple[int, int]]:
        """Return the span of the line that states the key."""
        start = len(self.head) + items[0]
        return [(start, start + len(self.line(self.answer(items))))]

    def vocabulary(self) -> list[str]:
        """Return the words of the text, the line and the question, and the digits."""
        return list(dict.fromkeys([*self.head, *FILLER, *self.question, *self.line([]), *string.digits]))

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of guessing the digits."""
        return 10.0**-self.config.digits

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the key, if the suffix shows all of its digits at least once."""
        places = [i for i, word in enumerate(suffix) if word in string.digits]
        last = places[-self.config.digits :]  # digits occur only in the key, so the last ones are a complete key
        return [suffix[i] for i in last] if len(last) == self.config.digits else None


class _Pairs(NamedTuple):
    """The pairs of a retrieval instance.

    Attributes:
        length: Number of tokens of prompt and answer.
        queried: Index of the pair whose value is asked for.
        keys: Words of each key.
        values: Words of each value.
    """

    length: int
    queried: int
    keys: list[list[str]]
    values: list[list[str]]


@register("retrieval")
class Retrieval(DepthTask):
    """Return the value of one of many keys.

    The prompt has as many pairs as fit into n tokens, after ``;`` as padding. Of p pairs with distinct keys, number
    ⌊depth·(p − 1)⌋ is queried, counted from 0. The value of a random pair is correct with probability
    1/p + (1 − 1/p)·alphabet^-value.
    """

    @dataclass(frozen=True)
    class Config(DepthOptions):
        """Options of the task."""

        least: int = option(24, "smallest length in training, in tokens", minimum=1, maximum=10_000)
        key: int = option(2, "tokens of a key", minimum=1, maximum=16)
        value: int = option(2, "tokens of a value", minimum=1, maximum=16)
        alphabet: int = option(30, "number of different tokens in keys and values", minimum=2, maximum=50_000)

    formula = "k1 : v1 ; k2 : v2 ; … ? ki :  →  vi, where each k and v is several tokens"
    paper = "Liu et al. 2023, lost in the middle (arXiv 2307.03172)"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        pairs, keys = self.num_pairs(self.max_length("test")), config.alphabet**config.key
        if keys >= 1 << 63:  # the numbers that NumPy draws
            raise UserError(
                f"'{self.spec}': {config.alphabet}^{config.key} keys are 2^63 or more: lower key or alphabet"
            )
        if pairs > keys:
            raise UserError(
                f"'{self.spec}': {self.max_length('test')} tokens hold {pairs} pairs and there are {keys} keys: "
                "raise alphabet or key, or lower times"
            )

    @property
    def pair_tokens(self) -> int:
        """Number of tokens of a pair: key, colon, value and semicolon."""
        return self.config.key + self.config.value + 2

    @property
    def min_tokens(self) -> int:
        """Number of tokens of an example with two pairs."""
        return 2 * self.pair_tokens + self.config.key + 2 + self.config.value

    def num_pairs(self, n: int) -> int:
        """Return the number of pairs that fit into an example of n tokens besides the question and the answer."""
        return (n - (self.config.key + 2 + self.config.value)) // self.pair_tokens

    def draw_at_depth(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Draw the length, the index of the queried pair, a number for each key and the tokens of all values.

        The digits of a key's number, in base ``alphabet``, are the tokens of the key; so keys are distinct.
        """
        config, pairs = self.config, self.num_pairs(n)
        queried = int(random.integers(pairs)) if depth is None else num_before(depth, pairs - 1)
        keys = random.choice(config.alphabet**config.key, size=pairs, replace=False).tolist()
        return [n, queried, *keys, *random.integers(config.alphabet, size=pairs * config.value).tolist()]

    def _unpack(self, items: list[int]) -> _Pairs:
        """Return the pairs of an instance that :meth:`draw_at_depth` has drawn."""
        length, queried, *numbers = items
        pairs, words = self.num_pairs(length), alphabet(self.config.alphabet)
        value_words = [words[token] for token in numbers[pairs:]]  # of all values, one after another
        size = self.config.value
        return _Pairs(
            length=length,
            queried=queried,
            keys=[[words[digit] for digit in self._key_digits(number)] for number in numbers[:pairs]],
            values=[value_words[start : start + size] for start in range(0, pairs * size, size)],
        )

    def _key_digits(self, number: int) -> list[int]:
        """Return the digits of a key's number in base ``alphabet``, the highest first."""
        base = self.config.alphabet
        return [number // base**k % base for k in reversed(range(self.config.key))]

    def prompt(self, items: list[int]) -> list[str]:
        """Return the padding, the pairs and the question."""
        pairs = self._unpack(items)
        words = [w for key, value in zip(pairs.keys, pairs.values, strict=True) for w in (*key, ":", *value, ";")]
        question = ["?", *pairs.keys[pairs.queried], ":"]
        num_padding = pairs.length - len(words) - len(question) - self.config.value
        return [";"] * num_padding + words + question

    def answer(self, items: list[int]) -> list[str]:
        """Return the value of the queried pair."""
        pairs = self._unpack(items)
        return pairs.values[pairs.queried]

    def needle_spans(self, items: list[int]) -> list[tuple[int, int]]:
        """Return the span of the queried pair: its key, the colon and its value."""
        length, queried, *_ = items
        num_padding = length - self.num_pairs(length) * self.pair_tokens - (self.config.key + 2 + self.config.value)
        start = num_padding + queried * self.pair_tokens
        return [(start, start + self.pair_tokens - 1)]

    def vocabulary(self) -> list[str]:
        """Return the separators and the alphabet."""
        return [":", ";", "?", *alphabet(self.config.alphabet)]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of answering with the value of a random pair."""
        pairs = self.num_pairs(n)
        equal_values = self.config.alphabet**-self.config.value  # probability that another pair has the right value
        return float(1 / pairs + (1 - 1 / pairs) * equal_values)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the value of the queried key, if the suffix shows its pair."""
        size, value = self.config.key, self.config.value
        words, question = suffix[: -size - 2], suffix[-size - 2 :]
        pattern = question[1:]  # the key and the colon; a value is followed by a semicolon
        for start in range(len(words) - size - value):
            if words[start : start + size + 1] == pattern and (not start or words[start - 1] == ";"):
                return words[start + size + 1 : start + size + 1 + value]
        return None

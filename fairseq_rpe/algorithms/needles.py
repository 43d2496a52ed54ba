"""Tasks whose answer stands at one place of a long prompt and has to be found there again.

Perplexity beyond the training length says that a model is not disturbed by a long text. These tasks say whether it
still reads what is far away. Lengths are in tokens, prompt and answer together: an example of 512 is as long for a
model as a block of 512 tokens of a text.
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fairseq_rpe.algorithms.base import SPLITS, Algorithm, Example, Sizes, register
from fairseq_rpe.algorithms.lists import alphabet
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option


@dataclass(frozen=True)
class Places(Sizes):
    """Options of a task with a depth: where in the prompt the answer stands, 0 for first and 1 for last."""

    items: int = option(64, "M: training lengths are Uniform(least, M) tokens", minimum=2, maximum=10_000)
    times: int = option(8, "test lengths are M, 2M, 4M … and times·M tokens", minimum=1, maximum=100)
    least: int = option(40, "the fewest tokens in training", minimum=1, maximum=10_000)
    test: int = option(50, "test examples of each length and depth", minimum=1, maximum=100_000)
    depth: float | None = option(None, "in training, from 0 to 1; none: uniform at random", minimum=0, maximum=1)
    depths: int = option(11, "test depths, in equal steps from 0 to 1", minimum=2, maximum=101)


class Needle(Algorithm):
    """Base class: an instance of n tokens whose answer stands at a depth. Fill ``draw_at`` and ``shortest`` too.

    Training and validation draw length and depth; the test has ``test`` examples of each length and depth, drawn apart,
    so that any length up to times·M and any depth may be asked for.
    """

    Config: ClassVar[type] = Places
    unit = "tokens"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if config.least < self.shortest:
            raise UserError(
                f"'{self.spec}': {config.least} tokens are too few, the shortest example has {self.shortest}: "
                f"raise least{' and items' * (config.items < self.shortest)} to at least {self.shortest}"
            )

    @property
    def shortest(self) -> int:
        """Tokens of the shortest example with somewhere to put the answer."""
        raise NotImplementedError

    def draw_at(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """A random instance of n tokens with the answer at ``depth``, anywhere without one."""
        raise NotImplementedError

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        return self.draw_at(n, self.config.depth, random)

    def tokens(self, n: int) -> int:
        return n

    def lengths(self, split: str) -> list[int]:
        if split != "test":
            return super().lengths(split)
        first, last = self.config.items, self.longest(split)
        return [*(first << k for k in range(last.bit_length()) if first << k < last), last]

    def lacks(self, split: str, lengths: Any) -> str | None:
        if split != "test":
            return super().lacks(split, lengths)
        last = self.longest(split)
        gone = next((n for n in lengths if not self.shortest <= n <= last), None)
        has = f"test examples of {self.shortest} to {last} tokens"
        return None if gone is None else f"{has}, not {gone}: leave it out of --lengths"

    def depths(self, split: str) -> tuple[float, ...]:
        steps = self.config.depths - 1
        return tuple(k / steps for k in range(steps + 1)) if split == "test" else ()

    def share(self, split: str) -> float:
        return float(self.config.test) if split == "test" else super().share(split)

    def examples(self, split: str) -> Iterator[Example]:
        if split != "test":
            yield from super().examples(split)
            return
        for n in self.lengths(split):
            for depth in self.depths(split):
                yield from self.at(split, n, depth)

    def at(self, split: str, n: int, depth: float) -> Iterator[Example]:
        """The examples of the test of n tokens at a depth; always the same ones."""
        random = np.random.default_rng([self.config.seed, SPLITS.index(split), n, round(1e6 * depth)])
        for _ in range(self.config.test):
            yield self._example(split, n, lambda: self.draw_at(n, depth, random), depth)


def before(depth: float, places: int) -> int:
    """⌊depth · places⌋: how many of ``places`` stand before the needle, whatever the rounding of the product.

    >>> before(0.5, 139), before(0.29, 100)
    (69, 29)
    """
    return int(depth * places + 1e-9)


@register("passkey")
class Passkey(Needle):
    """Say a key again that one line of an irrelevant text states twice.

    The text is a cycle of five short sentences, begun at a random word and cut where the line stands: ⌊depth·F⌋ of
    its F words come before it. The key is drawn anew for each example. A guess of its digits is right in 10^-digits.
    """

    @dataclass(frozen=True)
    class Config(Places):
        digits: int = option(3, "m: digits of the key", minimum=1, maximum=9)

    formula = "Passkey: filler the pass key is d1 … dm . … filler what is the pass key ? the pass key is  →  d1 … dm"
    paper = "Mohtashami & Jaggi 2023, landmark attention (arXiv 2305.16300)"
    variety = "digits"
    head: ClassVar[tuple[str, ...]] = ("Passkey:",)
    cycle: ClassVar[tuple[str, ...]] = (
        *("the grass is green . the sky is blue . the sun is yellow .".split()),
        *("here we go . there and back again .".split()),
    )
    question: ClassVar[tuple[str, ...]] = ("what", "is", "the", "pass", "key", "?", "the", "pass", "key", "is")

    @property
    def shortest(self) -> int:
        m = self.config.digits
        return len(self.head) + len(self.line(["0"] * m)) + len(self.question) + m + 1

    def line(self, key: list[str]) -> list[str]:
        """The line that states the key."""
        return [*"the pass key is".split(), *key, *". remember it .".split(), *key, *"is the pass key .".split()]

    def draw_at(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Words of filler before and after the line, the word of the cycle to begin with, and the digits."""
        filler = n - self.shortest + 1
        ahead = int(random.integers(filler + 1)) if depth is None else before(depth, filler)
        start = int(random.integers(len(self.cycle)))
        return [ahead, filler - ahead, start, *random.integers(10, size=self.config.digits).tolist()]

    def prompt(self, items: list[int]) -> list[str]:
        ahead, behind, start, *_ = items
        words = [self.cycle[(start + k) % len(self.cycle)] for k in range(ahead + behind)]
        return [*self.head, *words[:ahead], *self.line(self.answer(items)), *words[ahead:], *self.question]

    def answer(self, items: list[int]) -> list[str]:
        return [string.digits[d] for d in items[3:]]

    def words(self) -> list[str]:
        return list(dict.fromkeys([*self.head, *self.cycle, *self.question, *self.line([]), *string.digits]))

    def chance(self, n: int) -> float:
        return 10.0**-self.config.digits


@register("retrieval")
class Retrieval(Needle):
    """Say the value of one of many keys.

    As many pairs as n tokens hold; the tokens that are left over are leading ``;``. With p pairs, the pair that is
    asked for is number ⌊depth·(p − 1)⌋, counted from 0. Keys are distinct. Whoever says the value of any pair is right
    in 1/p, and a little more often where values repeat: 1/p + (1 − 1/p)·alphabet^-value.
    """

    @dataclass(frozen=True)
    class Config(Places):
        least: int = option(24, "the fewest tokens in training", minimum=1, maximum=10_000)
        key: int = option(2, "tokens of a key", minimum=1, maximum=16)
        value: int = option(2, "tokens of a value", minimum=1, maximum=16)
        alphabet: int = option(30, "different tokens of keys and values", minimum=2, maximum=50_000)

    formula = "k1 : v1 ; k2 : v2 ; … ? ki :  →  vi, where each k and v is several tokens"
    paper = "Liu et al. 2023, lost in the middle (arXiv 2307.03172)"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        pairs, keys = self.pairs(self.longest("test")), config.alphabet**config.key
        if pairs > keys:
            raise UserError(
                f"'{self.spec}': {self.longest('test')} tokens hold {pairs} pairs and there are {keys} keys: "
                "raise alphabet or key, or lower times"
            )

    @property
    def pair(self) -> int:
        """Tokens of a pair: key, colon, value and semicolon."""
        return self.config.key + self.config.value + 2

    @property
    def shortest(self) -> int:
        return 2 * self.pair + self.config.key + 2 + self.config.value

    def pairs(self, n: int) -> int:
        """Pairs in an example of n tokens: those that fit beside the question and the answer."""
        return (n - (self.config.key + 2 + self.config.value)) // self.pair

    def draw_at(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Number of tokens and of the pair that is asked for, the keys as numbers, the tokens of all values."""
        c, pairs = self.config, self.pairs(n)
        asked = int(random.integers(pairs)) if depth is None else before(depth, pairs - 1)
        keys = random.choice(c.alphabet**c.key, size=pairs, replace=False).tolist()
        return [n, asked, *keys, *random.integers(c.alphabet, size=pairs * c.value).tolist()]

    def _parts(self, items: list[int]) -> tuple[list[list[str]], list[list[str]]]:
        """The words of each key and of each value."""
        c, pairs, names = self.config, self.pairs(items[0]), alphabet(self.config.alphabet)
        keys = [[names[key // c.alphabet**k % c.alphabet] for k in reversed(range(c.key))] for key in items[2:][:pairs]]
        own = [names[v] for v in items[2 + pairs :]]
        return keys, [own[k * c.value :][: c.value] for k in range(pairs)]

    def prompt(self, items: list[int]) -> list[str]:
        keys, values = self._parts(items)
        words = [w for key, value in zip(keys, values, strict=True) for w in (*key, ":", *value, ";")]
        question = ["?", *keys[items[1]], ":"]
        return [";"] * (items[0] - len(words) - len(question) - self.config.value) + words + question

    def answer(self, items: list[int]) -> list[str]:
        return self._parts(items)[1][items[1]]

    def words(self) -> list[str]:
        return [":", ";", "?", *alphabet(self.config.alphabet)]

    def chance(self, n: int) -> float:
        p = self.pairs(n)
        return float(1 / p + (1 - 1 / p) * self.config.alphabet**-self.config.value)

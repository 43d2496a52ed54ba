"""What an algorithmic task is: instances of a length, their prompt and their only right answer.

Sequences are words of a closed vocabulary. Instances come from a seed and never from a file. Which split an instance
may appear in is decided by a digest of its prompt, so that no prompt of one split ever appears in another.
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.registry import Registry
from fairseq_rpe.core.spec import canonical, option

SPLITS = ("train", "valid", "test")
SEPARATOR = "[SEP]"
_TRIES, _MOST = 10_000, 10_000_000


@dataclass(frozen=True)
class Sizes:
    """Options of every algorithmic task."""

    items: int = option(20, "M: training lengths are Uniform(2, M) items", minimum=2, maximum=10_000)
    times: int = option(5, "test lengths are Uniform(2, times·M) items", minimum=1, maximum=100)
    least: int = option(2, "the fewest items, in training and test, in place of that 2", minimum=1, maximum=10_000)
    train: int = option(100_000, "training examples", minimum=1, maximum=_MOST)
    valid: int = option(2_000, "validation examples, lengths as in training", minimum=1, maximum=_MOST)
    test: int = option(10_000, "test examples", minimum=1, maximum=_MOST)
    seed: int = option(1, "of the examples; another seed is another data set", minimum=0, maximum=2**63 - 1)

    def __post_init__(self) -> None:
        if self.least > self.items:
            raise UserError(f"least={self.least} is more than items={self.items}, the most in training: lower least")


@dataclass(frozen=True)
class Example:
    """One instance: ``length`` items, the words of the prompt and those of the answer; its ``depth`` in some tests."""

    length: int
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    depth: float | None = None


class Algorithm:
    """Base class of the algorithmic tasks. Fill ``draw``, ``prompt``, ``answer`` and ``words``.

    A model reads ``prompt`` and must write ``answer`` and the end of the sentence, word for word. All instances of n
    items must have equally long prompts and equally long answers: they are decoded together, without padding.
    """

    Config: ClassVar[type] = Sizes
    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    unit: ClassVar[str] = "items"  # of lengths
    variety: ClassVar[str] = "alphabet"  # the option that makes more instances of one length

    def __init__(self, name: str, config: Any) -> None:
        self.config = config
        self.spec = canonical(name, config)  # fixes every example

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """A random instance of n items."""
        raise NotImplementedError

    def prompt(self, items: list[int]) -> list[str]:
        raise NotImplementedError

    def answer(self, items: list[int]) -> list[str]:
        raise NotImplementedError

    def words(self) -> list[str]:
        """The closed vocabulary, in the order in which it is numbered."""
        raise NotImplementedError

    def tokens(self, n: int) -> int:
        """What a model reads of an instance of n items when the last word is due: prompt and answer."""
        items = self.draw(n, np.random.default_rng(0))
        return len(self.prompt(items)) + len(self.answer(items))

    def longest(self, split: str) -> int:
        return self.config.items * (self.config.times if split == "test" else 1)

    def examples(self, split: str) -> Iterator[Example]:
        """The examples of ``train``, ``valid`` or ``test``; always the same ones.

        Raises UserError: no such split, or no instance of some length belongs to it (a tiny alphabet).
        """
        if split not in SPLITS:
            raise UserError(f"split '{split}' does not exist: an algorithmic task has {', '.join(SPLITS)}")
        random = np.random.default_rng([self.config.seed, SPLITS.index(split)])
        sizes = random.integers(self.config.least, self.longest(split) + 1, size=getattr(self.config, split))
        for n in sizes.tolist():
            yield self._example(split, n, functools.partial(self.draw, n, random))

    def lengths(self, split: str) -> list[int]:
        return sorted({example.length for example in self.examples(split)})

    def depths(self, split: str) -> tuple[float, ...]:
        """Where in the prompt of a split the answer stands, from 0, first, to 1, last; nothing where it is no axis."""
        return ()

    def share(self, split: str) -> float:
        """How many examples of each length, and depth where there are depths, a split has on average."""
        return float(getattr(self.config, split) / (self.longest(split) - self.config.least + 1))

    def lacks(self, split: str, lengths: Collection[int]) -> str | None:
        """What is wrong with lengths that a split has no example of; ``None``: it has them all."""
        there = set(self.lengths(split)) if lengths else set()
        gone = next((n for n in lengths if n not in there), None)
        return None if gone is None else f"no {split} example of {gone} {self.unit}: leave {gone} out of --lengths"

    def at(self, split: str, n: int, depth: float) -> Iterator[Example]:
        """The examples of n items at a depth, of a task that has depths."""
        raise NotImplementedError

    def chance(self, n: int) -> float | None:
        """The exact answers of a guess at ``n`` items, where the task says so."""
        return None

    def _example(self, split: str, n: int, draw: Callable[[], list[int]], depth: float | None = None) -> Example:
        for _ in range(_TRIES):
            items = draw()
            prompt = tuple(self.prompt(items))
            # longer prompts than in training cannot appear there
            if n > self.config.items or split_of(prompt) == split:
                return Example(n, prompt, tuple(self.answer(items)), depth)
        few = f"'{self.spec}': none of the few instances of {n} {self.unit} belongs to the {split} split"
        raise UserError(f"{few}: raise {self.variety}")


registry: Registry[type[Algorithm]] = Registry("algorithmic task", "fairseq_rpe.algorithms")
register = registry.register


def split_of(prompt: tuple[str, ...]) -> str:
    """The only split in which a prompt may appear: a tenth is for validation, a tenth for the test."""
    digest = hashlib.blake2b(" ".join(prompt).encode(), digest_size=8).digest()
    return {0: "valid", 1: "test"}.get(int.from_bytes(digest, "big") % 10, "train")

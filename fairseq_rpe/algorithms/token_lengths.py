"""Base class of the tasks whose lengths are in tokens and whose test lengths double."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fairseq_rpe.algorithms.base import SPLITS, Algorithm, Example, TaskOptions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option


@dataclass(frozen=True)
class TokenOptions(TaskOptions):
    """Options of a task whose lengths are in tokens.

    Attributes:
        items: Largest number of tokens M in training.
        times: The longest test example has times·M tokens.
        least: Smallest number of tokens in training.
        test: Number of test examples of each length.
    """

    items: int = option(64, "M: training lengths are Uniform(least, M) tokens", minimum=2, maximum=10_000)
    times: int = option(8, "test lengths are M, 2M, 4M … and times·M tokens", minimum=1, maximum=100)
    least: int = option(32, "smallest length in training, in tokens", minimum=1, maximum=10_000)
    test: int = option(500, "test examples of each length", minimum=1, maximum=100_000)


class TokenTask(Algorithm):
    """Base class of tasks whose lengths are in tokens.

    Training and validation draw the length. The test split has ``test`` examples of M, 2M, 4M, … and times·M tokens,
    each with a seed of its own.
    """

    Config: ClassVar[type] = TokenOptions
    length_unit = "tokens"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if config.least < self.min_tokens:
            raise UserError(
                f"'{self.spec}': {config.least} tokens are too few, the shortest example has {self.min_tokens}: "
                f"raise least{' and items' if config.items < self.min_tokens else ''} to at least {self.min_tokens}"
            )

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the shortest example."""
        raise NotImplementedError

    def num_tokens(self, n: int) -> int:
        """Return n: lengths are in tokens."""
        return n

    def lengths(self, split: str) -> list[int]:
        """Return the lengths of a split; of the test split M, 2M, 4M, … and times·M."""
        return doubled_lengths(self.config.items, self.max_length(split)) if split == "test" else super().lengths(split)

    def examples_per_length(self, split: str) -> float:
        """Return the number of examples per length."""
        return float(self.config.test) if split == "test" else super().examples_per_length(split)

    def examples(self, split: str) -> Iterator[Example]:
        """Generate the examples of a split; of the test split, by length."""
        if split != "test":
            yield from super().examples(split)
            return
        for n in self.lengths(split):
            random = np.random.default_rng([self.config.seed, SPLITS.index(split), n])
            for _ in range(self.config.test):
                yield self._example(split, n, lambda n=n, random=random: self.draw(n, random))  # type: ignore[misc]


def doubled_lengths(first: int, last: int) -> list[int]:
    """Return the lengths first, 2·first, 4·first, … up to ``last``, and ``last``.

    >>> doubled_lengths(64, 512), doubled_lengths(64, 192)
    ([64, 128, 256, 512], [64, 128, 192])
    """
    lengths = [first]
    while 2 * lengths[-1] < last:
        lengths.append(2 * lengths[-1])
    return lengths if lengths[-1] == last else [*lengths, last]

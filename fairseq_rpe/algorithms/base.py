"""Base class of the algorithmic tasks: random instances of a length with a prompt and one correct answer.

Prompts and answers are words of a closed vocabulary. Instances are generated from a seed. A hash of the prompt assigns
its split, so no prompt appears in two splits.
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
_MAX_TRIES, _MAX_EXAMPLES = 10_000, 10_000_000


@dataclass(frozen=True)
class TaskOptions:
    """Options of every algorithmic task.

    Attributes:
        items: Largest number of items M in training.
        times: The longest test example has times·M items.
        least: Smallest number of items.
        train: Number of training examples.
        valid: Number of validation examples.
        test: Number of test examples.
        seed: Seed of the examples.
    """

    items: int = option(20, "M: training lengths are Uniform(2, M) items", minimum=2, maximum=10_000)
    times: int = option(5, "test lengths are Uniform(2, times·M) items", minimum=1, maximum=100)
    least: int = option(2, "smallest number of items in training and test, in place of 2", minimum=1, maximum=10_000)
    train: int = option(100_000, "training examples", minimum=1, maximum=_MAX_EXAMPLES)
    valid: int = option(2_000, "validation examples, with lengths as in training", minimum=1, maximum=_MAX_EXAMPLES)
    test: int = option(10_000, "test examples", minimum=1, maximum=_MAX_EXAMPLES)
    seed: int = option(1, "seed of the examples; another seed gives other examples", minimum=0, maximum=2**63 - 1)

    def __post_init__(self) -> None:
        if self.least > self.items:
            raise UserError(f"least={self.least} is more than items={self.items}, the most in training: lower least")


@dataclass(frozen=True)
class Example:
    """An instance of a task.

    Attributes:
        length: Number of items (or tokens, see ``Algorithm.length_unit``).
        prompt: Words of the prompt.
        answer: Words of the answer.
        depth: Relative position of the answer in the prompt, from 0 to 1, in tests of tasks with depths.
        label_indices: Indices of the prompt's words at which a model predicts the words of the answer, see
            ``Algorithm.label_indices``; empty if the answer follows the prompt.
        gaps: For each of these indices, the distance in tokens to the word of the prompt that the answer repeats.
        needles: Start and end of the words of the prompt that state the answer, see ``Algorithm.needle_spans``.
    """

    length: int
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    depth: float | None = None
    label_indices: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    needles: tuple[tuple[int, int], ...] = ()


class Algorithm:
    """Base class of the algorithmic tasks. Implement ``draw``, ``prompt``, ``answer`` and ``vocabulary``.

    A model reads ``prompt`` and must generate ``answer`` and the end of the sentence, word for word. All instances of n
    items must have prompts of equal length and answers of equal length, because they are decoded in one batch without
    padding.

    Attributes:
        Config: Dataclass of the options.
        formula: The task in one line.
        paper: Reference.
        length_unit: Unit of lengths.
        variety_option: Option that increases the number of instances of a length.
        has_labels: Whether the examples have labels inside the prompt, see :meth:`label_indices`.
        config: The options.
        spec: Canonical spec, which determines every example.
    """

    Config: ClassVar[type] = TaskOptions
    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    length_unit: ClassVar[str] = "items"
    variety_option: ClassVar[str] = "alphabet"
    has_labels: ClassVar[bool] = False

    def __init__(self, name: str, config: Any) -> None:
        self.config = config
        self.spec = canonical(name, config)

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw a random instance of n items."""
        raise NotImplementedError

    def prompt(self, items: list[int]) -> list[str]:
        """Return the words of the prompt of an instance."""
        raise NotImplementedError

    def answer(self, items: list[int]) -> list[str]:
        """Return the words of the answer of an instance."""
        raise NotImplementedError

    def label_indices(self, items: list[int]) -> list[int]:
        """Return the indices of the prompt's words at which a model predicts the words of the answer, ascending.

        An example with labels asks several questions inside one sequence. The model reads only the prompt, in one
        forward pass. Word k of the answer is the label at the k-th of these indices: the model predicts it from the
        words up to and including that index. Nothing else is learned or scored, not even the end of the sentence. The
        list is empty for tasks whose answer follows the prompt.
        """
        return []

    def gaps(self, items: list[int]) -> list[int]:
        """Return for each of the :meth:`label_indices` the distance in tokens to the word that the answer repeats."""
        return []

    def needle_spans(self, items: list[int]) -> list[tuple[int, int]]:
        """Return where the prompt states the answer: the first index and the index after the last of each run of words.

        The list is ascending; it is empty for tasks that have no needle.
        """
        return []

    def vocabulary(self) -> list[str]:
        """Return the words of the closed vocabulary in the order of their ids."""
        raise NotImplementedError

    def num_tokens(self, n: int) -> int:
        """Return the number of words of prompt and answer of an instance of n items."""
        items = self.draw(n, np.random.default_rng(0))
        return len(self.prompt(items)) + len(self.answer(items))

    def max_length(self, split: str) -> int:
        """Return the largest number of items of a split."""
        return self.config.items * (self.config.times if split == "test" else 1)

    def examples(self, split: str) -> Iterator[Example]:
        """Generate the examples of a split; they are the same in every call.

        Args:
            split: "train", "valid" or "test".

        Yields:
            The examples.

        Raises:
            UserError: There is no such split, or no instance of some length belongs to it (a tiny alphabet).
        """
        if split not in SPLITS:
            raise UserError(f"split '{split}' does not exist: an algorithmic task has {', '.join(SPLITS)}")
        random = np.random.default_rng([self.config.seed, SPLITS.index(split)])
        sizes = random.integers(self.config.least, self.max_length(split) + 1, size=getattr(self.config, split))
        for n in sizes.tolist():
            yield self._example(split, n, functools.partial(self.draw, n, random))

    def lengths(self, split: str) -> list[int]:
        """Return the numbers of items that the examples of a split have, ascending."""
        return sorted({example.length for example in self.examples(split)})

    def depths(self, split: str) -> tuple[float, ...]:
        """Return the depths of a split, from 0 (start of the prompt) to 1 (end); empty for tasks without depths."""
        return ()

    def examples_per_length(self, split: str) -> float:
        """Return the mean number of examples per length, and per depth in tasks with depths."""
        return float(getattr(self.config, split) / (self.max_length(split) - self.config.least + 1))

    def missing_lengths(self, split: str, lengths: Collection[int]) -> str | None:
        """Return a message if a split lacks examples of some of ``lengths``, or None."""
        available = set(self.lengths(split)) if lengths else set()
        missing = next((n for n in lengths if n not in available), None)
        return (
            None
            if missing is None
            else f"no {split} example of {missing} {self.length_unit}: leave {missing} out of --lengths"
        )

    def examples_at_depth(self, split: str, n: int, depth: float) -> Iterator[Example]:
        """Generate the examples of n items at a depth; only tasks with depths implement it."""
        raise NotImplementedError

    def chance_accuracy(self, n: int) -> float | None:
        """Return the accuracy of a random guess at ``n`` items, or None if the task does not define it."""
        return None

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the best answer of a reader who sees only the last words of the prompt of an example of n items.

        Args:
            suffix: The last words of the prompt. For tasks with labels, the last words up to and including the index of
                a label.
            n: Number of items of the example.

        Returns:
            The answer, for tasks with labels the one word of this label; None if the suffix leaves only a guess.
        """
        return None

    def _example(self, split: str, n: int, draw: Callable[[], list[int]], depth: float | None = None) -> Example:
        for _ in range(_MAX_TRIES):
            items = draw()
            prompt = tuple(self.prompt(items))
            # prompts longer than in training cannot appear in it, so every split may have them
            if n > self.config.items or split_of_prompt(prompt) == split:
                return Example(
                    length=n,
                    prompt=prompt,
                    answer=tuple(self.answer(items)),
                    depth=depth,
                    label_indices=tuple(self.label_indices(items)),
                    gaps=tuple(self.gaps(items)),
                    needles=tuple(self.needle_spans(items)),
                )
        message = f"'{self.spec}': none of the few instances of {n} {self.length_unit} belongs to the {split} split"
        raise UserError(f"{message}: raise {self.variety_option}")


registry: Registry[type[Algorithm]] = Registry("algorithmic task", "fairseq_rpe.algorithms")
register = registry.register


def split_of_prompt(prompt: tuple[str, ...]) -> str:
    """Return the only split in which a prompt may appear: a tenth is for validation, a tenth for the test."""
    digest = hashlib.blake2b(" ".join(prompt).encode(), digest_size=8).digest()
    return {0: "valid", 1: "test"}.get(int.from_bytes(digest, "big") % 10, "train")

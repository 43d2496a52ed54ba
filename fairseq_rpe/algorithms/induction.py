"""Induction: continue the second copy of a block of random tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fairseq_rpe.algorithms.base import register
from fairseq_rpe.algorithms.lists import alphabet
from fairseq_rpe.algorithms.needles import DepthOptions, DepthTask, num_before
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option


@register("induction")
class Induction(DepthTask):
    """Continue a copy that begins at a random place of a block of different tokens.

    An example of n tokens has a block of m = n − prefix − answer random tokens without repeats. The prompt repeats
    ``prefix`` tokens of the block, and the answer is the ``answer`` tokens after them. The copy begins at token
    ⌊depth·(m − prefix − answer)⌋, counted from 0. The continuation of a random place is correct with probability
    1/(m − prefix − answer + 1).
    """

    @dataclass(frozen=True)
    class Config(DepthOptions):
        """Options of the task."""

        least: int = option(16, "smallest length in training, in tokens", minimum=1, maximum=10_000)
        prefix: int = option(1, "tokens of the copy in the prompt", minimum=1, maximum=1_000)
        answer: int = option(4, "tokens of the copy in the answer", minimum=1, maximum=1_000)
        alphabet: int = option(512, "number of different tokens", minimum=2, maximum=50_000)

    formula = "t1 … tm ts … tu  →  tu+1 … tv, where all of t1 … tm differ"
    paper = "Olsson et al. 2022, induction heads (arXiv 2209.11895)"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        last = self.max_length("test")
        if self.block_tokens(last) > config.alphabet:
            raise UserError(
                f"'{self.spec}': {last} tokens have a block of {self.block_tokens(last)} different tokens and there "
                f"are {config.alphabet}: raise alphabet or lower times"
            )

    @property
    def copy_tokens(self) -> int:
        """Number of tokens of the copy."""
        return int(self.config.prefix + self.config.answer)

    @property
    def min_tokens(self) -> int:
        """Number of tokens of an example in which the copy may begin at two places."""
        return 2 * self.copy_tokens + 1

    def block_tokens(self, n: int) -> int:
        """Return the number of tokens m of the block in an example of n tokens."""
        return n - self.copy_tokens

    def draw_at_depth(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Draw the first token of the copy, counted from 0, and the tokens of the block."""
        block = self.block_tokens(n)
        last = block - self.copy_tokens
        start = int(random.integers(last + 1)) if depth is None else num_before(depth, last)
        return [start, *random.choice(self.config.alphabet, size=block, replace=False).tolist()]

    def _copy(self, items: list[int]) -> list[str]:
        """Return the words of the copy."""
        start, *tokens = items
        words = alphabet(self.config.alphabet)
        return [words[token] for token in tokens[start : start + self.copy_tokens]]

    def prompt(self, items: list[int]) -> list[str]:
        """Return the block and the start of the copy."""
        words = alphabet(self.config.alphabet)
        return [*(words[token] for token in items[1:]), *self._copy(items)[: self.config.prefix]]

    def answer(self, items: list[int]) -> list[str]:
        """Return the continuation of the copy."""
        return self._copy(items)[self.config.prefix :]

    def needle_spans(self, items: list[int]) -> list[tuple[int, int]]:
        """Return the span of the words that the copy repeats."""
        return [(items[0], items[0] + self.copy_tokens)]

    def vocabulary(self) -> list[str]:
        """Return the tokens."""
        return list(alphabet(self.config.alphabet))

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of continuing at a random place of the block."""
        return 1 / (self.block_tokens(n) - self.copy_tokens + 1)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the tokens after the first copy of the last word, if the suffix shows that copy."""
        block, last = suffix[: -self.config.prefix], suffix[-1]
        if last not in block:
            return None
        start = block.index(last) + 1
        return block[start : start + self.config.answer]

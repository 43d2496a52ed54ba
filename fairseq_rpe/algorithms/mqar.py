"""Multi-query associative recall: pairs of keys and values, and later a question for the value of each key."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fairseq_rpe.algorithms.base import register
from fairseq_rpe.algorithms.token_lengths import TokenOptions, TokenTask
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option

BLANK = "_"


class _Instance(NamedTuple):
    """An instance of the task.

    Attributes:
        length: Number of tokens T.
        keys: Index of each of D keys, in the order of the pairs.
        values: Index of the value of each key.
        slots: Slot g, from 1, in which each key is queried.
    """

    length: int
    keys: list[int]
    values: list[int]
    slots: list[int]


@register("mqar")
class MQAR(TokenTask):
    """Answer a question for the value of each key inside the same sequence.

    The first 2D of T tokens are D pairs ``k v``; keys and values do not repeat. The other tokens are S = ⌊(T − 2D)/2⌋
    slots of two tokens. Each key is queried in one slot, drawn without replacement with p(g) ∝ a·g^(a − 1) for slot g =
    1 … S. The first token of that slot is the key, and the label at this token is the value; all other tokens are
    blanks and have no label. The value itself is never shown, so one forward pass answers all D questions. Accuracy is
    the share of right labels, as in the paper. The value of a random pair is correct with probability 1/D.

    With ``growing=false`` longer tests have the D of training and only the distances grow. With ``growing=true``
    tests of T tokens have ⌊pairs·T/items⌋ pairs, for example T/16 with ``pairs=4`` or T/4 with ``pairs=16``, if
    ``items=64``. The authors' code can also fill the blanks with random tokens, among which keys may appear; the
    published experiments use blanks, as this task does.
    """

    @dataclass(frozen=True)
    class Config(TokenOptions):
        """Options of the task."""

        pairs: int = option(4, "D: number of pairs, at M tokens if growing", minimum=1, maximum=2_500)
        growing: bool = option(False, "whether the number of pairs is proportional to the length: ⌊pairs·T/items⌋")
        alphabet: int = option(64, "number of different keys, and of different values", minimum=2, maximum=50_000)
        power: float = option(0.01, "a: slot g has probability ∝ a·g^(a − 1); 1: uniform", above=0, maximum=10)

    formula = "k1 v1 … kD vD, then in slots _ _ or ki _  →  at each ki of a slot: vi"
    paper = "Arora et al. 2023, Zoology (arXiv 2312.04927)"
    has_labels = True

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if 4 * self.num_pairs(config.items) > config.items:
            raise UserError(
                f"'{self.spec}': {config.pairs} pairs and their questions need {4 * config.pairs} tokens, more than "
                f"items={config.items}: raise items or lower pairs"
            )
        pairs, last = self.num_pairs(self.max_length("test")), self.max_length("test")
        if pairs > config.alphabet:
            raise UserError(
                f"'{self.spec}': {last} tokens have {pairs} pairs and there are {config.alphabet} keys: raise alphabet"
            )

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the shortest example."""
        pairs, items = self.config.pairs, self.config.items
        return max(4, -(-items // pairs)) if self.config.growing else 4 * pairs  # at least one pair

    def num_pairs(self, n: int) -> int:
        """Return the number of pairs D of an example of n tokens."""
        return self.config.pairs * n // self.config.items if self.config.growing else self.config.pairs

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw the keys, the values and the slots of an instance of n tokens."""
        pairs = self.num_pairs(n)
        weights = _slot_weights((n - 2 * pairs) // 2, self.config.power)
        # The order of exponential times with rates w_g is that of draws without replacement with p(g) ∝ w_g.
        times = random.exponential(size=len(weights)) / weights
        keys, values = (random.choice(self.config.alphabet, size=pairs, replace=False) for _ in range(2))
        return [n, *keys.tolist(), *values.tolist(), *(times.argsort()[:pairs] + 1).tolist()]

    def _unpack(self, items: list[int]) -> _Instance:
        """Return the instance that :meth:`draw` has drawn."""
        length, *numbers = items
        pairs = len(numbers) // 3
        return _Instance(length, numbers[:pairs], numbers[pairs : 2 * pairs], numbers[2 * pairs :])

    def _queries(self, items: list[int]) -> list[tuple[int, int]]:
        """Return for each query the index of its word and the number of its pair, in the order of the text."""
        slots = self._unpack(items).slots
        return sorted((2 * len(slots) + 2 * (slot - 1), pair) for pair, slot in enumerate(slots))

    def prompt(self, items: list[int]) -> list[str]:
        """Return the pairs, the queries and the blanks."""
        instance = self._unpack(items)
        pairs = zip(instance.keys, instance.values, strict=True)
        words = [word for key, value in pairs for word in (f"k{key}", f"v{value}")]
        words += [BLANK] * (instance.length - len(words))
        for index, pair in self._queries(items):
            words[index] = f"k{instance.keys[pair]}"
        return words

    def answer(self, items: list[int]) -> list[str]:
        """Return the values of the queried keys in the order of the queries."""
        values = self._unpack(items).values
        return [f"v{values[pair]}" for _, pair in self._queries(items)]

    def label_indices(self, items: list[int]) -> list[int]:
        """Return the indices of the queries."""
        return [index for index, _ in self._queries(items)]

    def gaps(self, items: list[int]) -> list[int]:
        """Return the distance in tokens from each query to the value in its pair."""
        return [index - (2 * pair + 1) for index, pair in self._queries(items)]

    def vocabulary(self) -> list[str]:
        """Return the blank, the keys and the values."""
        return [BLANK, *(f"{kind}{i}" for kind in "kv" for i in range(self.config.alphabet))]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of answering with the value of a random pair."""
        return 1 / self.num_pairs(n)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the value of the last word of the suffix, if the suffix shows the pair."""
        *words, key = suffix
        return [words[words.index(key) + 1]] if key in words else None


@functools.cache
def _slot_weights(num_slots: int, power: float) -> np.ndarray:
    """Return g^(a − 1) for the slots g = 1 … S, shape (S,), to which their probabilities are proportional."""
    weights: np.ndarray = np.arange(1, num_slots + 1) ** (power - 1.0)
    return weights


@register("selective_copy")
class SelectiveCopy(TokenTask):
    """Repeat tokens that lie at random places among blanks, in their order.

    Of n tokens, the first n − K − 1 are K random tokens and blanks, followed by a marker and K blanks. The label at the
    k-th blank after the marker is the k-th token. Accuracy is the share of right labels, as in the paper. Every set of
    places is equally likely, as in Gu & Dao 2023 (arXiv 2312.00752); MAD's code puts each blank before a token that it
    draws uniformly, and therefore never puts a blank after the last token. A random token is correct with probability
    1/alphabet.
    """

    @dataclass(frozen=True)
    class Config(TokenOptions):
        """Options of the task."""

        tokens: int = option(4, "K: number of tokens to copy", minimum=1, maximum=4_999)
        alphabet: int = option(14, "number of different tokens to copy", minimum=2, maximum=50_000)

    formula = "t1 … tK at random places among blanks _, then [COPY] and K blanks  →  at these blanks: t1 … tK"
    paper = "Poli et al. 2024, MAD (arXiv 2403.17844)"
    has_labels = True
    marker: ClassVar[str] = "[COPY]"

    @property
    def min_tokens(self) -> int:
        """Number of tokens of an example without blanks among the tokens to copy."""
        return 2 * int(self.config.tokens) + 1

    def draw(self, n: int, random: np.random.Generator) -> list[int]:
        """Draw the places and the tokens of an instance of n tokens."""
        count = self.config.tokens
        sources = np.sort(random.choice(n - count - 1, size=count, replace=False))
        return [n, *sources.tolist(), *random.integers(self.config.alphabet, size=count).tolist()]

    def prompt(self, items: list[int]) -> list[str]:
        """Return the tokens among blanks, the marker and the blanks to fill."""
        n, *sources = items[: self.config.tokens + 1]
        words = [BLANK] * n
        for source, word in zip(sources, self.answer(items), strict=True):
            words[source] = word
        words[n - self.config.tokens - 1] = self.marker
        return words

    def answer(self, items: list[int]) -> list[str]:
        """Return the tokens in their order."""
        return [f"t{token}" for token in items[self.config.tokens + 1 :]]

    def label_indices(self, items: list[int]) -> list[int]:
        """Return the indices of the blanks after the marker."""
        return list(range(items[0] - self.config.tokens, items[0]))

    def gaps(self, items: list[int]) -> list[int]:
        """Return the distance in tokens from each blank after the marker to its token."""
        sources = items[1 : self.config.tokens + 1]
        return [index - source for index, source in zip(self.label_indices(items), sources, strict=True)]

    def vocabulary(self) -> list[str]:
        """Return the blank, the marker and the tokens."""
        return [BLANK, self.marker, *(f"t{i}" for i in range(self.config.alphabet))]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of a random token."""
        return float(1 / self.config.alphabet)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the token for the last blank, if the suffix shows it; the tokens are counted from the end."""
        if self.marker not in suffix:
            return None
        marker = suffix.index(self.marker)
        shown = [word for word in suffix[:marker] if word != BLANK]
        index = len(suffix) - marker - 2  # of the token among all K
        from_end = self.config.tokens - index
        return [shown[-from_end]] if from_end <= len(shown) else None

"""Tasks of RULER with several needles: lines ``key A is 4 7 .`` at random places of an irrelevant text."""

from dataclasses import dataclass
from math import perm
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fairseq_rpe.algorithms.base import register
from fairseq_rpe.algorithms.lists import alphabet
from fairseq_rpe.algorithms.needles import FILLER, DepthOptions, DepthTask, filler_words, num_before
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option

RULER = "Hsieh et al. 2024, RULER (arXiv 2404.06654)"
_KEY, _ALL, _KEYS, _IS, _OF, _COLON, _END = "key", "all", "keys", "is", "of", ":", "."
_DIGITS = 10  # digits are the first words of the alphabet; keys follow them


class _Line(NamedTuple):
    """A line that states the value of a key.

    Attributes:
        before: Number of words of the filler before the line.
        key: Index of the key.
        value: Number whose decimal digits are the value.
    """

    before: int
    key: int
    value: int


@dataclass(frozen=True)
class LineOptions(DepthOptions):
    """Options of a task with lines.

    Attributes:
        digits: Number of digits m of a value.
        alphabet: Number of different keys.
    """

    digits: int = option(2, "m: number of digits of a value", minimum=1, maximum=9)
    alphabet: int = option(26, "number of different keys", minimum=2, maximum=50_000)


class LineTask(DepthTask):
    """Base class of tasks with lines. Implement ``num_lines``, ``num_needed``, ``draw_keys`` and ``question`` too.

    The values of an example differ. A depth states where the first line stands that the answer needs: ⌊depth·F⌋ of the
    F words of the filler come before it, other needed lines stand at random places behind it, and the lines that are
    not needed anywhere. Without a depth all places are random.

    The items of an instance are the start of the filler, F, the indices of the needed lines in the order of the answer,
    and the three numbers of each line in the order of the text.
    """

    Config: ClassVar[type] = LineOptions
    paper = RULER
    head: ClassVar[str] = ""
    question_tokens: ClassVar[int] = 3

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if self.num_lines > _DIGITS**config.digits:
            raise UserError(
                f"'{self.spec}': {self.num_lines} lines have different values and there are {_DIGITS**config.digits}: "
                "raise digits"
            )
        if self.num_keys > config.alphabet:
            raise UserError(f"'{self.spec}': {self.num_keys} keys are more than alphabet={config.alphabet}: raise it")

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        raise NotImplementedError

    @property
    def num_needed(self) -> int:
        """Number of values of the answer."""
        raise NotImplementedError

    @property
    def num_keys(self) -> int:
        """Number of different keys."""
        return self.num_lines

    def draw_keys(self, random: np.random.Generator) -> list[int]:
        """Draw the key of each line; the first ``num_needed`` lines are the needed ones."""
        return [int(key) for key in random.choice(self.config.alphabet, size=self.num_lines, replace=False)]

    def question(self, items: list[int]) -> list[str]:
        """Return the words of the question."""
        raise NotImplementedError

    @property
    def min_tokens(self) -> int:
        """Number of tokens of an example without filler."""
        m = self.config.digits
        return 1 + self.num_lines * (4 + m) + self.question_tokens + self.num_needed * m

    def draw_places(self, num_filler: int, first: int | None, random: np.random.Generator) -> list[int]:
        """Draw the number of filler words before each line; see :meth:`draw_keys` for their order.

        Args:
            num_filler: Number of words of the filler.
            first: The same number for the first needed line, or None to draw it.
            random: Random generator.
        """
        places = random.integers(num_filler + 1, size=self.num_lines)
        if first is not None:
            places[: self.num_needed] = random.integers(first, num_filler + 1, size=self.num_needed)
            places[0] = first
        return [int(before) for before in places]

    def draw_at_depth(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Draw the filler, the needed lines and all lines."""
        num_filler = n - self.min_tokens
        places = self.draw_places(num_filler, None if depth is None else num_before(depth, num_filler), random)
        keys = self.draw_keys(random)
        values = random.choice(_DIGITS**self.config.digits, size=self.num_lines, replace=False).tolist()
        # Lines between the same words of the filler stand in a random order, except that needed line 0 is the first of
        # the needed ones if a depth states its place.
        order = sorted(random.permutation(self.num_lines).tolist(), key=lambda line: places[line])
        needed = self.order_needed([order.index(line) for line in range(self.num_needed)], random)
        lines = [number for line in order for number in (places[line], keys[line], values[line])]
        return [int(random.integers(len(FILLER))), num_filler, *needed, *lines]

    def order_needed(self, needed: list[int], random: np.random.Generator) -> list[int]:
        """Return the indices of the needed lines in the order of the answer."""
        return needed

    def _lines(self, items: list[int]) -> list[_Line]:
        """Return the lines in the order of the text."""
        numbers = items[2 + self.num_needed :]
        return [_Line(*numbers[start : start + 3]) for start in range(0, len(numbers), 3)]

    def needed_lines(self, items: list[int]) -> list[_Line]:
        """Return the needed lines in the order of the answer."""
        lines = self._lines(items)
        return [lines[index] for index in items[2 : 2 + self.num_needed]]

    def key_word(self, key: int) -> str:
        """Return the word of a key."""
        return alphabet(_DIGITS + self.config.alphabet)[_DIGITS + key]

    def _value_words(self, value: int) -> list[str]:
        """Return the digits of a value, with zeros in front."""
        return list(f"{value:0{self.config.digits}d}")

    def _line_words(self, line: _Line) -> list[str]:
        return [_KEY, self.key_word(line.key), _IS, *self._value_words(line.value), _END]

    def prompt(self, items: list[int]) -> list[str]:
        """Return the filler with the lines, and the question."""
        start, num_filler, *_ = items
        filler = filler_words(start, num_filler)
        words, taken = [self.head], 0
        for line in self._lines(items):
            words += filler[taken : line.before] + self._line_words(line)
            taken = line.before
        return [*words, *filler[taken:], *self.question(items)]

    def answer(self, items: list[int]) -> list[str]:
        """Return the digits of the values."""
        return [digit for line in self.needed_lines(items) for digit in self._value_words(line.value)]

    def needle_spans(self, items: list[int]) -> list[tuple[int, int]]:
        """Return the spans of the needed lines."""
        size = 4 + self.config.digits
        starts = sorted(1 + self._lines(items)[index].before + size * index for index in items[2 : 2 + self.num_needed])
        return [(start, start + size) for start in starts]

    def vocabulary(self) -> list[str]:
        """Return the words of the filler, the lines and the question, the digits and the keys."""
        words = [self.head, *FILLER, _KEY, _ALL, _KEYS, _IS, _OF, _COLON, _END]
        return list(dict.fromkeys([*words, *alphabet(_DIGITS + self.config.alphabet)]))

    def queried_keys(self, question: list[str]) -> list[str]:
        """Return the words of the keys that a question names, once for each value of the answer."""
        raise NotImplementedError

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the values, if the suffix shows all needed lines from their keys on."""
        words, question = suffix[: -self.question_tokens], suffix[-self.question_tokens :]
        if len(question) < self.question_tokens:
            return None
        answer = []
        shown = {key: self._shown_values(words, key) for key in self.queried_keys(question)}
        for key in reversed(self.queried_keys(question)):  # the last value of a key comes first
            if not shown[key]:
                return None
            answer.append(shown[key].pop())
        return [digit for value in reversed(answer) for digit in value]

    def _shown_values(self, words: list[str], key: str) -> list[list[str]]:
        """Return the values of a key that complete lines among the words state, in the order of the text."""
        m = self.config.digits
        starts = [i + 2 for i, word in enumerate(words[:-1]) if word == key and words[i + 1] == _IS]
        return [words[start : start + m] for start in starts]


@register("multikey")
class MultiKey(LineTask):
    """Return the value of one of several keys.

    The text has k lines with different keys, of which one is queried. The value of a random line is correct with
    probability 1/k. An example has 1 + k(4 + m) + F + 3 + m tokens with F words of the filler.
    """

    @dataclass(frozen=True)
    class Config(LineOptions):
        """Options of the task."""

        keys: int = option(4, "k: number of lines", minimum=1, maximum=1_000)

    formula = "Multikey: filler key A is d1 … dm . filler key B is … . filler key A is  →  d1 … dm"
    head = "Multikey:"
    num_needed = 1

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return int(self.config.keys)

    def question(self, items: list[int]) -> list[str]:
        """Return the start of the queried line."""
        return [_KEY, self.key_word(self.needed_lines(items)[0].key), _IS]

    def queried_keys(self, question: list[str]) -> list[str]:
        """Return the queried key."""
        return [question[1]]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of answering with the value of a random line."""
        return 1 / self.num_lines


@register("multivalue")
class MultiValue(LineTask):
    """Return all values of a key in the order of the text.

    The text has v lines with the same key. Random values are correct with probability 1/(10^m · (10^m − 1) · …), with
    one factor for each of v values. An example has 1 + v(4 + m) + F + 3 + v·m tokens.
    """

    @dataclass(frozen=True)
    class Config(LineOptions):
        """Options of the task."""

        values: int = option(3, "v: number of values", minimum=2, maximum=1_000)

    formula = "Multivalue: filler key A is d1 … dm . filler key A is … . filler all of A  →  d1 … dm …"
    head = "Multivalue:"
    num_keys = 1

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return int(self.config.values)

    @property
    def num_needed(self) -> int:
        """Number of values of the answer."""
        return self.num_lines

    def draw_keys(self, random: np.random.Generator) -> list[int]:
        """Draw the key of all lines."""
        return [int(random.integers(self.config.alphabet))] * self.num_lines

    def order_needed(self, needed: list[int], random: np.random.Generator) -> list[int]:
        """Return the indices of all lines."""
        return sorted(needed)

    def question(self, items: list[int]) -> list[str]:
        """Return the question for all values."""
        return [_ALL, _OF, self.key_word(self.needed_lines(items)[0].key)]

    def queried_keys(self, question: list[str]) -> list[str]:
        """Return the queried key, once for each value."""
        return [question[2]] * self.num_lines

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of different random values."""
        return 1 / perm(_DIGITS**self.config.digits, self.num_lines)


@register("multiquery")
class MultiQuery(LineTask):
    """Return the values of several keys in the order of the question.

    The text has k lines with different keys, of which q are queried in a random order. Values of different random
    lines are correct with probability 1/(k·(k − 1) · … · (k − q + 1)). An example has 1 + k(4 + m) + F + 2 + q + q·m
    tokens.
    """

    @dataclass(frozen=True)
    class Config(LineOptions):
        """Options of the task."""

        keys: int = option(4, "k: number of lines", minimum=1, maximum=1_000)
        queries: int = option(2, "q: number of queried keys", minimum=1, maximum=1_000)

    formula = "Multiquery: filler key A is d1 … dm . filler key B is … . filler keys B A :  →  … d1 … dm"
    head = "Multiquery:"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if config.queries > config.keys:
            raise UserError(f"'{self.spec}': {config.queries} queries are more than {config.keys} keys: lower queries")

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return int(self.config.keys)

    @property
    def num_needed(self) -> int:
        """Number of values of the answer."""
        return int(self.config.queries)

    @property
    def question_tokens(self) -> int:  # type: ignore[override]
        """Number of words of the question."""
        return 2 + self.num_needed

    def order_needed(self, needed: list[int], random: np.random.Generator) -> list[int]:
        """Return the indices of the needed lines in a random order."""
        return [needed[index] for index in random.permutation(len(needed))]

    def question(self, items: list[int]) -> list[str]:
        """Return the queried keys."""
        return [_KEYS, *(self.key_word(line.key) for line in self.needed_lines(items)), _COLON]

    def queried_keys(self, question: list[str]) -> list[str]:
        """Return the queried keys."""
        return question[1:-1]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of answering with the values of different random lines."""
        return 1 / perm(self.num_lines, self.num_needed)


@register("update")
class Update(LineTask):
    """Return the last value of a key that changes.

    The text has a line for each of k keys, and a second line for u of them. The queried key is one of these u keys, and
    the answer is the value of its second line. A model that cannot order two lines answers with the first value in half
    of the examples. The value of a random line is correct with probability 1/(k + u). A depth states the place of the
    second line, and the first line stands at a random place before it. An example has 1 + (k + u)(4 + m) + F + 3 + m
    tokens.
    """

    @dataclass(frozen=True)
    class Config(LineOptions):
        """Options of the task."""

        keys: int = option(3, "k: number of keys", minimum=1, maximum=1_000)
        updates: int = option(1, "u: number of keys with a second line", minimum=1, maximum=1_000)

    formula = "Update: filler key A is … . filler key A is d1 … dm . filler key A is  →  d1 … dm, the last value"
    paper = "Arora et al. 2023, Zoology (arXiv 2312.04927), MQAR with repeated keys"
    head = "Update:"
    num_needed = 1

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if config.updates > config.keys:
            raise UserError(f"'{self.spec}': {config.updates} updates are more than {config.keys} keys: lower updates")

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return int(self.config.keys + self.config.updates)

    @property
    def num_keys(self) -> int:
        """Number of different keys."""
        return int(self.config.keys)

    def draw_keys(self, random: np.random.Generator) -> list[int]:
        """Draw the keys: those with two lines, the queried one first, twice; then the others."""
        keys = random.choice(self.config.alphabet, size=self.config.keys, replace=False).tolist()
        return [*keys[: self.config.updates], *keys]

    def draw_places(self, num_filler: int, first: int | None, random: np.random.Generator) -> list[int]:
        """Draw the places; the queried key's first line, line ``updates``, is not behind its second one, line 0."""
        places = super().draw_places(num_filler, first, random)
        earlier = self.config.updates
        if first is None:
            places[earlier], places[0] = sorted((places[0], places[earlier]))
        else:
            places[earlier] = int(random.integers(first + 1))
        return places

    def draw_at_depth(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Draw the filler, the needed line and all lines; the needed line is the last one of its key."""
        items = super().draw_at_depth(n, depth, random)
        key = self.needed_lines(items)[0].key
        items[2] = max(index for index, line in enumerate(self._lines(items)) if line.key == key)
        return items

    def question(self, items: list[int]) -> list[str]:
        """Return the start of the queried line."""
        return [_KEY, self.key_word(self.needed_lines(items)[0].key), _IS]

    def queried_keys(self, question: list[str]) -> list[str]:
        """Return the queried key."""
        return [question[1]]

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of answering with the value of a random line."""
        return 1 / self.num_lines

"""Variable tracking: find all variables that have a value through chains of assignments."""

from dataclasses import dataclass
from math import perm
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fairseq_rpe.algorithms.base import register
from fairseq_rpe.algorithms.lists import alphabet
from fairseq_rpe.algorithms.needle_lines import RULER
from fairseq_rpe.algorithms.needles import FILLER, DepthOptions, DepthTask, filler_words, num_before
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option

_EQUALS, _END, _ASK, _COLON = "=", ";", "?", ":"
_DIGITS = 10  # digits are the first words of the alphabet; names of variables follow them


class _Instance(NamedTuple):
    """An instance of the task.

    Attributes:
        start: First word of the filler.
        num_filler: Number of words of the filler.
        queried: Index of the queried chain.
        values: Value of each chain.
        names: Names of the variables of each chain, in the order of the chain.
        statements: Words of the filler before each statement and its chain, in the order of the text.
    """

    start: int
    num_filler: int
    queried: int
    values: list[int]
    names: list[list[int]]
    statements: list[tuple[int, int]]


@register("tracking")
class Tracking(DepthTask):
    """Find all variables that have a value, in the order of their assignments.

    Each of c chains assigns a number to a variable and then passes it on h times: ``a = 4 7 ;``, ``b = a ;``,
    ``e = b ;``. The statements of a chain stand in this order at random places of an irrelevant text, between those of
    the other chains. The question names the number of one chain, and the answer is its h + 1 variables. RULER has one
    chain, so that every variable of the text is right; with c ≥ 2 chains the links matter. Different random variables
    are correct with probability 1/(v·(v − 1) · … ) with h + 1 factors and v = c(h + 1). A depth states the place of the
    first statement of the queried chain; its other statements follow at random places. An example has 1 + c(3 + m)
    + 4·c·h + F + 2 + m + h + 1 tokens with F words of the irrelevant text.
    """

    @dataclass(frozen=True)
    class Config(DepthOptions):
        """Options of the task."""

        chains: int = option(2, "c: number of chains", minimum=2, maximum=100)
        hops: int = option(2, "h: number of assignments of one variable to the next one", minimum=1, maximum=100)
        digits: int = option(2, "m: number of digits of a number", minimum=1, maximum=9)
        alphabet: int = option(26, "number of different variables", minimum=2, maximum=50_000)

    formula = "Tracking: filler a = d1 … dm ; filler b = a ; … filler ? d1 … dm :  →  a b …"
    paper = RULER
    head: ClassVar[str] = "Tracking:"

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        if self.num_variables > config.alphabet:
            raise UserError(
                f"'{self.spec}': {self.num_variables} variables are more than alphabet={config.alphabet}: raise it"
            )
        if config.chains > _DIGITS**config.digits:
            raise UserError(
                f"'{self.spec}': {config.chains} chains are more than {_DIGITS**config.digits} values: raise digits"
            )

    @property
    def num_variables(self) -> int:
        """Number of variables."""
        return int(self.config.chains * (self.config.hops + 1))

    @property
    def min_tokens(self) -> int:
        """Number of tokens of an example without filler."""
        c, h, m = self.config.chains, self.config.hops, self.config.digits
        return int(1 + c * (3 + m) + 4 * c * h + 2 + m + h + 1)

    def draw_at_depth(self, n: int, depth: float | None, random: np.random.Generator) -> list[int]:
        """Draw the filler, the queried chain, the values, the variables and the places of all statements."""
        config = self.config
        num_filler, length = n - self.min_tokens, config.hops + 1
        queried = int(random.integers(config.chains))
        places = np.sort(random.integers(num_filler + 1, size=(config.chains, length)), axis=1)
        if depth is not None:
            first = num_before(depth, num_filler)
            places[queried] = np.sort(random.integers(first, num_filler + 1, size=length))
            places[queried, 0] = first
        # (c·(h + 1),): chains in a random order at equal places; the statements of a chain are in order by definition
        chains = np.repeat(np.arange(config.chains), length)
        order = np.lexsort((random.random(len(chains)), places.ravel()))
        values = random.choice(_DIGITS**config.digits, size=config.chains, replace=False).tolist()
        names = random.choice(config.alphabet, size=self.num_variables, replace=False).tolist()
        statements = [int(number) for k in order for number in (places.ravel()[k], chains[k])]
        return [int(random.integers(len(FILLER))), num_filler, queried, *values, *names, *statements]

    def _unpack(self, items: list[int]) -> _Instance:
        """Return the instance that :meth:`draw_at_depth` has drawn."""
        start, num_filler, queried, *numbers = items
        c, length = self.config.chains, self.config.hops + 1
        names, statements = numbers[c : c + c * length], numbers[c + c * length :]
        return _Instance(
            start=start,
            num_filler=num_filler,
            queried=queried,
            values=numbers[:c],
            names=[names[k : k + length] for k in range(0, c * length, length)],
            statements=list(zip(statements[::2], statements[1::2], strict=True)),
        )

    def _name(self, variable: int) -> str:
        return alphabet(_DIGITS + self.config.alphabet)[_DIGITS + variable]

    def _value_words(self, value: int) -> list[str]:
        return list(f"{value:0{self.config.digits}d}")

    def _statements(self, instance: _Instance) -> list[tuple[int, int, list[str]]]:
        """Return the filler words before each statement, its chain and its words, in the order of the text."""
        done = [0] * self.config.chains
        statements = []
        for before, chain in instance.statements:
            names, step = instance.names[chain], done[chain]
            right = [self._name(names[step - 1])] if step else self._value_words(instance.values[chain])
            statements.append((before, chain, [self._name(names[step]), _EQUALS, *right, _END]))
            done[chain] += 1
        return statements

    def prompt(self, items: list[int]) -> list[str]:
        """Return the filler with the statements, and the question."""
        instance = self._unpack(items)
        filler = filler_words(instance.start, instance.num_filler)
        words, taken = [self.head], 0
        for before, _, statement in self._statements(instance):
            words += filler[taken:before] + statement
            taken = before
        return [*words, *filler[taken:], _ASK, *self._value_words(instance.values[instance.queried]), _COLON]

    def answer(self, items: list[int]) -> list[str]:
        """Return the variables of the queried chain."""
        instance = self._unpack(items)
        return [self._name(variable) for variable in instance.names[instance.queried]]

    def needle_spans(self, items: list[int]) -> list[tuple[int, int]]:
        """Return the spans of the statements of the queried chain."""
        instance, spans, statement_words = self._unpack(items), [], 0
        for before, chain, statement in self._statements(instance):
            start = 1 + before + statement_words
            statement_words += len(statement)
            if chain == instance.queried:
                spans.append((start, start + len(statement)))
        return spans

    def vocabulary(self) -> list[str]:
        """Return the words of the filler, the signs, the digits and the variables."""
        words = [self.head, *FILLER, _EQUALS, _END, _ASK, _COLON]
        return list(dict.fromkeys([*words, *alphabet(_DIGITS + self.config.alphabet)]))

    def chance_accuracy(self, n: int) -> float:
        """Return the accuracy of different random variables of the text."""
        return 1 / perm(self.num_variables, self.config.hops + 1)

    def answer_from_suffix(self, suffix: list[str], n: int) -> list[str] | None:
        """Return the variables, if the suffix shows all statements of the queried chain."""
        m = self.config.digits
        words, question = suffix[: -2 - m], suffix[-2 - m :]
        if len(question) < 2 + m:
            return None
        successors: dict[tuple[str, ...], str] = {}  # right side of a statement -> variable
        for i in range(1, len(words)):
            if words[i] == _EQUALS and _END in words[i:]:
                right = words[i + 1 : i + words[i:].index(_END)]
                successors[tuple(right)] = words[i - 1]
        answer: list[str] = []
        key = tuple(question[1:-1])
        while key in successors and len(answer) <= self.config.hops:
            answer.append(successors[key])
            key = (answer[-1],)
        return answer if len(answer) == self.config.hops + 1 else None

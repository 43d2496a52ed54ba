"""Patterns of layers such as ``3*rope:local=128|nope``: which encoding each layer of a model has.

::

    pattern := part ("|" part)*
    part    := SPEC | COUNT "*" SPEC | "start=" SPEC | "end=" SPEC

The parts without ``start=`` and ``end=`` form the period. It is repeated over the layers from the first layer on, and
cut off at the last layer. ``start=`` replaces the first layer, ``end=`` the last layer.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from fairseq_rpe.core.arguments import check_text
from fairseq_rpe.core.errors import UserError

MAX_PERIOD = 1024  # layers, in a pattern that a user or a checkpoint names
_COUNT = re.compile(r"(\d+)\s*\*(.*)", re.DOTALL)
_ENDS = re.compile(r"(start|end)\s*=(.*)", re.DOTALL)


@dataclass(frozen=True)
class LayerGroup:
    """The layers that have the same encoding.

    Attributes:
        spec: Spec of the encoding.
        layers: Indices of the layers, from 0, ascending.
    """

    spec: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class LayerPattern:
    """A pattern of layers; :meth:`reduced` and :func:`parse_pattern` return the shortest one with the same layers.

    Attributes:
        period: Specs of the layers of one period.
        start: Spec of the first layer, or "" for that of the period.
        end: Spec of the last layer, or "" for that of the period.
    """

    period: tuple[str, ...]
    start: str = ""
    end: str = ""

    @classmethod
    def reduced(cls, period: Sequence[str], start: str = "", end: str = "") -> Self:
        """Return the pattern with the shortest period, without a ``start`` or an ``end`` that changes no layer."""
        length = next(n for n in range(1, len(period) + 1) if len(period) % n == 0 and _has_period(period, n))
        shortest = tuple(period[:length])
        return cls(shortest, "" if start == shortest[0] else start, "" if (end,) == shortest else end)

    @property
    def specs(self) -> tuple[str, ...]:
        """The distinct specs in the order of the pattern."""
        return tuple(dict.fromkeys(spec for spec in (self.start, *self.period, self.end) if spec))

    @property
    def shortest_model(self) -> int:
        """The number of layers of one period, with a further layer for each of ``start`` and ``end``."""
        return len(self.period) + bool(self.start) + bool(self.end)

    @property
    def last_specs(self) -> tuple[str, ...]:
        """The specs that the last layer may have, in a model of any depth."""
        return (self.end,) if self.end else self.period

    def expand(self, layers: int) -> tuple[str, ...]:
        """Return the spec of each of ``layers`` layers.

        Raises:
            UserError: There are fewer layers than the pattern describes, so that one of its parts is never used.
        """
        specs = [self.period[layer % len(self.period)] for layer in range(layers)]
        for index, spec in ((0, self.start), (-1, self.end)):
            specs[index] = spec or specs[index]
        unused = [spec for spec in self.specs if spec not in specs]
        if unused or len(self.period) > layers:
            why = f"its part '{unused[0]}' is never used" if unused else f"it repeats after {len(self.period)} layers"
            raise UserError(f"'{self}' has more layers than the {layers} of the model: {why}; shorten the pattern")
        return tuple(specs)

    def groups(self, layers: int) -> tuple[LayerGroup, ...]:
        """Return the distinct encodings of a model with ``layers`` layers, in the order of their first layers.

        Raises:
            UserError: As :meth:`expand`.
        """
        specs = self.expand(layers)
        return tuple(
            LayerGroup(spec, tuple(layer for layer, other in enumerate(specs) if other == spec))
            for spec in dict.fromkeys(specs)
        )

    def pairs(self, other: "LayerPattern") -> list[tuple[str, str]]:
        """Return the distinct specs (of this pattern, of ``other``) that a layer may have, in a model of any depth."""
        count = math.lcm(len(self.period), len(other.period))
        pairs = [(self.period[n % len(self.period)], other.period[n % len(other.period)]) for n in range(count)]
        pairs.append((self.start or self.period[0], other.start or other.period[0]))
        if self.end or other.end:
            pairs += itertools.product(self.last_specs, other.last_specs)
        return list(dict.fromkeys(pairs))

    def map(self, function: Callable[[str], str]) -> "LayerPattern":
        """Return the pattern with each spec replaced by ``function(spec)``, reduced."""
        new = {spec: function(spec) for spec in self.specs}
        return LayerPattern.reduced([new[spec] for spec in self.period], new.get(self.start, ""), new.get(self.end, ""))

    def __str__(self) -> str:
        runs = ((spec, len(list(group))) for spec, group in itertools.groupby(self.period))
        words = [f"{count}*{spec}" if count > 1 else spec for spec, count in runs]
        start, end = ([f"{name}={spec}"] if spec else [] for name, spec in (("start", self.start), ("end", self.end)))
        return "|".join([*start, *words, *end])


def _has_period(specs: Sequence[str], length: int) -> bool:
    return all(spec == specs[index % length] for index, spec in enumerate(specs))


def is_pattern(text: str) -> bool:
    """Return whether a text names a pattern of layers rather than one encoding.

    >>> is_pattern("3*rope|nope"), is_pattern("2*rope"), is_pattern("rope:base=500000")
    (True, True, False)
    """
    return isinstance(text, str) and ("|" in text or bool(_COUNT.match(text.strip()) or _ENDS.match(text.strip())))


def parse_pattern(text: str) -> LayerPattern:
    """Parse a pattern of layers, or one spec as the pattern of which it is the only part.

    >>> parse_pattern("3*rope|nope").period
    ('rope', 'rope', 'rope', 'nope')
    >>> str(parse_pattern("alibi | alibi | nope | 2*alibi | nope | end=rope"))
    '2*alibi|nope|end=rope'

    Args:
        text: The pattern; its specs may be unknown or wrong.

    Returns:
        The pattern, reduced.

    Raises:
        UserError: It is malformed.
    """
    check_text("a pattern of layers", text, "3*rope|nope")
    if not is_pattern(text):
        return LayerPattern((text,))
    period: list[str] = []
    replaced = {"start": "", "end": ""}
    for item in (item.strip() for item in text.split("|")):
        if match := _ENDS.fullmatch(item):
            name, spec = match[1], match[2].strip()
            if replaced[name]:
                raise UserError(f"pattern '{text}' has two parts {name}=: leave one out")
            replaced[name] = _single_spec(text, spec)
            continue
        match = _COUNT.fullmatch(item)
        count, spec = (int(match[1][:10]), match[2].strip()) if match else (1, item)
        if not 1 <= count <= MAX_PERIOD - len(period):
            raise UserError(f"pattern '{text}': the layers of its parts add up to a number from 1 to {MAX_PERIOD}")
        period += [_single_spec(text, spec)] * count
    if not period:
        raise UserError(f"pattern '{text}' names only the first or last layer: add the encoding of the other layers")
    return LayerPattern.reduced(period, replaced["start"], replaced["end"])


def _single_spec(pattern: str, spec: str) -> str:
    """Return the spec of a part, checked not to be empty and to have no second count, start= or end=."""
    if not spec or is_pattern(spec):
        wrong = f"'{spec}' is no encoding" if spec else "a part is empty"
        raise UserError(f"pattern '{pattern}': {wrong}; write SPEC, N*SPEC, start=SPEC or end=SPEC between the signs |")
    return spec


def normalise_pattern(text: str, normalise: Callable[[str], str]) -> str:
    """Return the canonical form of a pattern.

    Its specs are canonical, equal neighbours are counted, and the period is the shortest one. A pattern with one spec
    becomes that spec.

    Args:
        text: The pattern, or one spec.
        normalise: Function that returns the canonical form of one spec.

    Raises:
        UserError: The pattern or one of its specs is not valid.
    """
    return str(parse_pattern(text).map(normalise))


def refuse_pattern(text: str, user: str) -> None:
    """Raise UserError if ``text`` is a pattern of layers.

    Args:
        text: A spec or a pattern.
        user: What takes one encoding only, as the subject of a sentence, such as "longrope-search".
    """
    if is_pattern(text):
        raise UserError(f"'{text}' is a pattern of layers, and {user} takes one encoding: name one of its parts")


def format_layers(layers: Sequence[int]) -> str:
    """Format ascending indices of layers.

    >>> format_layers([0, 1, 2, 4, 5, 7])
    '0-2, 4-5, 7'
    """
    ranges = []
    for _, group in itertools.groupby(enumerate(layers), lambda item: item[1] - item[0]):
        numbers = [layer for _, layer in group]
        ranges.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(ranges)

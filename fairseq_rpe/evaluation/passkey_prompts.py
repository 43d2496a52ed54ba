"""Texts that hide a pass key at a depth, with exact numbers of tokens of any tokenizer.

The sentences are those of Mohtashami and Jaggi, Landmark Attention (2023), arXiv 2305.16300.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.data.tokenization import EOS, UNK
from fairseq_rpe.utils.files import read_input

_HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)
FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
_QUESTION = "What is the pass key? The pass key is"
_DIGITS = 5
_TRIED_KEYS = 200  # keys whose numbers of tokens are counted
_ANCHOR = "."  # text before a part while it is encoded


@dataclass(frozen=True)
class PasskeyExample:
    """A text that asks for its pass key.

    Attributes:
        prompt: token ids, ``</s>`` first.
        keys: pass keys as text, the right one first; the others are wrong choices.
        answers: token ids of each key, all of one length.
    """

    prompt: tuple[int, ...]
    keys: tuple[str, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PasskeyPrompts:
    """Prompts for one tokenizer.

    Attributes:
        encode: returns the token ids of a text.
        sentences: sentences of the filler, repeated in order.
        is_varied: whether each example begins at another sentence.
    """

    encode: Callable[[str], Sequence[int]]
    sentences: tuple[str, ...] = FILLER
    is_varied: bool = False

    def _encode_part(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text, without a blank that a tokenizer adds at a start."""
        anchor, whole = list(self.encode(_ANCHOR)), list(self.encode(_ANCHOR + text))
        return whole[len(anchor) :] if whole[: len(anchor)] == anchor else list(self.encode(text))

    @cached_property
    def _head(self) -> list[int]:
        return [EOS, *self.encode(_HEAD), *self._encode_part("\n")]

    @cached_property
    def _question(self) -> list[int]:
        return self._encode_part("\n" + _QUESTION)

    @cached_property
    def _filler(self) -> list[list[int]]:
        """Token ids of each sentence with the blank before it."""
        return [tokens for sentence in self.sentences if (tokens := self._encode_part(" " + sentence))]

    @cached_property
    def answer_tokens(self) -> int:
        """Number of tokens of a key: the most frequent one, which all keys then have.

        Raises:
            UserError: the tokenizer lacks digits.
        """
        keys = [_draw_key(np.random.default_rng(number)) for number in range(_TRIED_KEYS)]
        encoded = [self._encode_part(" " + key) for key in keys]
        if any(UNK in tokens for tokens in encoded):
            raise UserError("the vocabulary lacks digits, so there are no pass keys: use a model of text with digits")
        return Counter(map(len, encoded)).most_common(1)[0][0]

    @cached_property
    def min_length(self) -> int:
        """Number of tokens of the shortest text and its answer, which has no filler, over some keys."""
        keys = [_draw_key(np.random.default_rng(number)) for number in range(_TRIED_KEYS)]
        needle = max(len(self._needle(key)) for key in keys)
        return len(self._head) + needle + len(self._question) + self.answer_tokens

    def _needle(self, key: str) -> list[int]:
        return self._encode_part("\n" + _NEEDLE.format(key=key) + "\n")

    def _draw_keys(self, random: np.random.Generator, count: int) -> dict[str, tuple[int, ...]]:
        """Return different keys with their token ids, all of :attr:`answer_tokens` tokens."""
        keys: dict[str, tuple[int, ...]] = {}
        while len(keys) < count:
            key = _draw_key(random)
            tokens = tuple(self._encode_part(" " + key))
            if len(tokens) == self.answer_tokens:
                keys[key] = tokens
        return keys

    def example(self, length: int, depth: float, number: int, choices: int, seed: int) -> PasskeyExample:
        """Return an example whose prompt and answer have exactly ``length`` tokens.

        The filler has whole sentences, and then the first tokens of the next sentence. The pass key follows after
        ``depth`` of the whole sentences, rounded, and at depth 1 after the whole filler. Examples of one length and
        number differ at no other place between depths.

        Args:
            length: tokens of prompt and answer together.
            depth: relative position of the pass key, from 0 for the start to 1 for the end of the filler.
            number: number of the example, from 0.
            choices: number of keys, the right one included.
            seed: seed of the keys.

        Raises:
            UserError: ``length`` is too short.
        """
        random = np.random.default_rng([seed, length, number])
        answers = self._draw_keys(random, choices)
        needle = self._needle(next(iter(answers)))
        missing = length - len(self._head) - len(needle) - len(self._question) - self.answer_tokens
        if missing < 0:
            raise UserError(f"length {length} is too short for the question: give at least {self.min_length}")
        first = int(random.integers(len(self._filler))) if self.is_varied else 0
        filler: list[int] = []
        ends = [0]  # tokens of the filler up to the end of each whole sentence
        for sentence in itertools.islice(itertools.cycle(self._filler), first, None):
            filler += sentence
            if len(filler) > missing:
                break
            ends.append(len(filler))
        cut = missing if depth == 1 else ends[round(depth * (len(ends) - 1))]
        prompt = [*self._head, *filler[:cut], *needle, *filler[cut:missing], *self._question]
        return PasskeyExample(tuple(prompt), tuple(answers), tuple(answers.values()))


def _draw_key(random: np.random.Generator) -> str:
    return str(random.integers(10 ** (_DIGITS - 1), 10**_DIGITS))


def read_sentences(path: Path) -> tuple[str, ...]:
    """Return the sentences of a text file: runs of characters that end with ``.``, ``!`` or ``?`` before white space.

    Args:
        path: file in UTF-8.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or has no text.
    """
    try:
        text = read_input(path).decode()
    except UnicodeDecodeError:
        raise UserError(f"--filler {shorten_path(path)} is not UTF-8: convert it") from None
    sentences = tuple(filter(None, re.split(r"(?<=[.!?])\s+", " ".join(text.split()))))
    if not sentences:
        raise UserError(f"--filler {shorten_path(path)} has no text: name another file")
    return sentences

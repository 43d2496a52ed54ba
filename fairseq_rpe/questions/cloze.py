"""Questions made of a text without any model: which name fills the gap, where the name stands far back.

A sentence with a name is asked for: the name is taken out, and the text before the sentence is what is read. The name
occurs there, last at a known distance. Neither the name that was there last nor the one that is there most often may
be the answer by itself: three others must be nearer, or be there as often.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fairseq_rpe.questions.text_hash import chance_of, unit

BLANK = "____"
WHERE = ("last", "first", "both")
SENTENCES = ("next", "earlier")
FORMS = ("gap", "completion")
ANSWER_TOKENS = 16  # of a name, its end symbol included
BINS = 8  # of distance, equally wide
RECENT, FREQUENT, RANDOM = "the most recent name", "the most frequent name", "a name at random"

_MENTIONS = 5  # of a name in a document
_TITLED = 3  # names that follow a title in a document
_RIVALS = 3  # other names that are nearer or as frequent
_FEWEST_WORDS, _MOST_WORDS = 8, 60  # of a sentence that is asked for
_BEGUN = 4  # words of a sentence that is to be completed
# A blank and what follows it are one word for every tokenizer, a newline is one by itself.
_WORD = re.compile(r"[ \n]*[^ \n]+")
LETTERS = re.compile(r"[^\W\d_]+")
_SHORT = r"(?:Mrs?|Ms|Dr|St|Mme|Mlle|Messrs|Capt|Col|Gen|Lieut|Rev|Hon|Prof|Esq|Jr|Sr|No|Vol|[A-Z])"
_INSIDE = re.compile(rf"(?:[^\W\d_]|,|;|\b{_SHORT}\.)[ \n]$")
_BORDER = re.compile(r"[.!?…][\"'”’»)\]]*[ \n]+|\n[ \t\r]*\n\s*")
_ABBREVIATION = re.compile(rf"\b{_SHORT}\.$")
_WHOLE = re.compile(r"[\"'“‘«(\[_]*[^\W\d_].*[.!?…][\"'”’»)\]_]*", re.DOTALL)
_APART = set("-_'’‐‑")


@dataclass(frozen=True)
class Gap:
    """A question of a document, whose passage is its characters from ``begin`` to ``end``."""

    begin: int
    end: int
    place: int  # of the gap: a character of the document
    prompt: str
    cue: str
    answer: str
    choices: tuple[str, ...]  # the names in the passage, in their order
    beside: tuple[str, ...]  # the names that the question alone has
    distance: int  # words between the last of the answer's mentions in the passage and its end
    guesses: Mapping[str, str]
    bin: int  # of the distance in tokens, of BINS


def question_text(sentence: str, where: str, form: str = "gap") -> tuple[str, str]:
    """What stands before and after the passage, where the question is first, last or both.

    ``sentence``: with a gap; the answer to a ``completion`` is what comes next in a sentence that breaks off.
    """
    if form == "completion":
        return "", f"\n\n{sentence.partition(BLANK)[0].rstrip()}"
    before = "" if where == "last" else f"{sentence}\n\n"
    after = "" if where == "first" else f"{sentence}\n\n"
    return before, f"\n\n{after}{BLANK} ="


class _Asked(NamedTuple):
    """A sentence with a gap, without a passage."""

    begin: int  # of the sentence
    mention: int
    answer: int  # the number of its name
    prompt: str
    cue: str
    room: int  # tokens of a passage
    chance: int  # by which its passages and guesses are chosen


class Passages:
    """A document in words, sentences and names.

    Args:
        text: the document.
        encode: a tokenizer, (tokens,) ids of a text.
        known: whether a name can be an answer.
        shortest: tokens of a passage; None: all are as long as they can be.
    """

    def __init__(
        self, text: str, encode: Callable[[str], np.ndarray], known: Callable[[str], bool], shortest: int | None = None
    ) -> None:
        self._text, self._encode, self._shortest = text, encode, shortest
        found = list(_WORD.finditer(text))
        self._words = [match.start() for match in found]  # with the white space before
        self._ends = [match.end() for match in found]
        sizes: dict[str, int] = {}
        self._before = [0]  # tokens before each word
        for match in found:
            word = match[0]
            if word not in sizes:
                sizes[word] = len(encode(word))
            self._before.append(self._before[-1] + sizes[word])
        self._find_names(known)

    @property
    def tokens(self) -> int:
        """Of the whole document."""
        return self._before[-1]

    @property
    def names(self) -> list[str]:
        """Words that are capitalised also within sentences and nearly nowhere else in lower case."""
        return self._names

    def _find_names(self, known: Callable[[str], bool]) -> None:
        text = self._text
        words = [(match[0], match.start(), match.end()) for match in LETTERS.finditer(text)]
        all_of, inside, before_another = Counter(word for word, *_ in words), Counter[str](), Counter[str]()
        followers = defaultdict[str, set[str]](set)
        for (word, start, end), (after, then, _) in pairwise([*words, ("", len(text), len(text))]):
            if word[0].isupper() and len(word) > 2 and word[1:].islower():
                inside[word] += bool(_INSIDE.search(text, max(start - 12, 0), start))
                gap = text[end:then]
                if after[:1].isupper() and gap.lstrip(".") in (" ", "\n"):
                    before_another[word] += 1
                    followers[word].add(after)
        self._names = [
            word
            for word, count in inside.items()
            if all_of[word] >= _MENTIONS
            and 4 * count >= all_of[word]
            and 50 * all_of[word.lower()] <= all_of[word]
            and 2 * before_another[word] <= all_of[word]  # otherwise a title or a part of a name
            and known(word)
        ]
        # A title goes before many names, a part of a name before few.
        rare = {word for word, after in followers.items() if len(after) < _TITLED and not all_of[word.lower()]}
        self._joined = rare | set(self._names)
        numbers = {name: number for number, name in enumerate(self._names)}
        self._mentions = [
            (start, end, numbers[word])
            for word, start, end in words
            if word in numbers
            and (text[end : end + 2] in ("'s", "’s") or not {text[start - 1], text[end : end + 1]} & _APART)
        ]
        self._of = np.array([number for *_, number in self._mentions], np.int64)
        self._words_at = [bisect_left(self._ends, end) for _, end, _ in self._mentions]
        self._at = np.array(self._words_at, np.int64)

    def sentences(self) -> list[tuple[int, int]]:
        """Where each begins and ends: characters of the document."""
        text, start, found = self._text, 0, []
        for border in _BORDER.finditer(text):
            sign, after = border.start(), LETTERS.search(text, border.end(), border.end() + 4)
            if text[sign] != "\n":
                short = text[sign] == "." and _ABBREVIATION.search(text, max(start, sign - 8), sign + 1)
                if short or (after and after[0][0].islower()):
                    continue
            sentence = text[start : border.end()].rstrip()
            if _WHOLE.fullmatch(sentence):
                found.append((start, start + len(sentence)))
            start = border.end()
        return found

    def gaps(self, tokens: int, where: str, sentence: str, form: str = "gap") -> Iterator[Gap]:
        """All questions that with their passage, and room for the answer, fill a context of ``tokens``.

        Args:
            where: the question stands; one of :data:`WHERE`.
            sentence: ``next``, the one that follows the passage; ``earlier``, one of the passage itself, each in a
                passage for each bin of distance.
            form: one of :data:`FORMS`; the sentence of a ``completion`` ends before the name, and is asked last.
        """
        starts, found = [start for start, *_ in self._mentions], self.sentences()
        ends = [bisect_left(self._ends, end) + 1 for _, end in found]  # in words
        for begin, end in found:
            first, last = bisect_left(starts, begin), bisect_left(starts, end)
            if not first < last or not _FEWEST_WORDS <= len(self._text[begin:end].split()) <= _MOST_WORDS:
                continue
            word = bisect_left(self._ends, begin + 1)
            there = Counter(int(number) for number in self._of[first:last])
            for mention in range(first, last):
                if there[int(self._of[mention])] > 1 or self._part_of_a_name(mention):
                    continue
                if form == "completion" and len(self._text[begin : starts[mention]].split()) < _BEGUN:
                    continue
                asked = self._ask(begin, end, mention, tokens, where, form)
                if sentence == "next":
                    stops = [word] if asked.room > 0 else []
                else:
                    stops = self.stops(self._words_at[asked.mention], asked.room, asked.chance, ends)
                shown = set(map(int, self._of[first : mention + 1])) if form == "completion" else set(there)
                found_gaps = (self._gap(asked, stop, shown, sentence == "earlier") for stop in stops)
                yield from (gap for gap in found_gaps if gap is not None)

    def _ask(self, begin: int, end: int, mention: int, tokens: int, where: str, form: str) -> _Asked:
        start, stop, answer = self._mentions[mention]
        sentence = " ".join(f"{self._text[begin:start]}{BLANK}{self._text[stop:end]}".split())
        prompt, cue = question_text(sentence, where, form)
        room = tokens - ANSWER_TOKENS - len(self._encode(prompt)) - len(self._encode(cue))
        chance = chance_of(f"{start} {sentence}")
        return _Asked(begin, mention, answer, prompt, cue, self._drawn(room, chance), chance)

    def _drawn(self, room: int, chance: int) -> int:
        """The tokens of a passage for which there are so many: of any length, drawn evenly by its logarithm."""
        if self._shortest is None or room <= self._shortest:
            return room
        share = chance * 0x9E3779B97F4A7C15 % (1 << 64) / (1 << 64)  # other digits than those that choose its end
        return int(self._shortest * (room / self._shortest) ** share)

    def stops(self, at: int, room: int, chance: int, ends: Sequence[int]) -> list[int]:
        """The words before which passages end that have the word ``at`` in them, one for each bin of distance."""
        found = []
        for number in range(BINS if room > 0 else 0):
            share = (number + unit(chance, number)) / BINS
            place = bisect_left(ends, bisect_left(self._before, self._before[at + 1] + share * room))
            if place < len(ends) and self._bin(at, ends[place], room) == number:
                found.append(ends[place])
        return found

    def _bin(self, at: int, stop: int, room: int) -> int:
        return BINS * (self._before[stop] - self._before[at + 1]) // room

    def _gap(self, asked: _Asked, stop: int, there: set[int], inside: bool) -> Gap | None:
        """The question on the passage that ends before the word ``stop``; ``there``: the names in the question."""
        if (since := self._since(stop, asked.room)) is None:
            return None
        if inside and self._first_sign(since) > asked.begin:
            return None
        low, high = bisect_left(self._words_at, since), bisect_left(self._words_at, stop)
        of, at = self._of[low:high], self._at[low:high]
        counts = np.bincount(of, minlength=len(self._names))
        if not counts[asked.answer]:
            return None
        lasts = np.full(len(self._names), -1)
        lasts[of] = at
        answer, place = asked.answer, self._words_at[asked.mention] if inside else int(lasts[asked.answer])
        others = np.array([n for n in np.unique(of) if n not in there], np.int64)
        rivals = others[(lasts[others] > lasts[answer]) | (counts[others] >= counts[answer])]
        if len(rivals) < _RIVALS:
            return None
        open_to = np.sort(np.append(others, answer))
        guesses = {
            RECENT: open_to[np.argmax(lasts[open_to])],
            FREQUENT: open_to[np.lexsort((lasts[open_to], counts[open_to]))[-1]],
            RANDOM: open_to[asked.chance % len(open_to)],
        }
        return Gap(
            begin=self._first_sign(since),
            end=self._ends[stop - 1],
            place=self._mentions[asked.mention][0],
            prompt=asked.prompt,
            cue=asked.cue,
            answer=self._names[answer],
            choices=tuple(self._names[number] for number in dict.fromkeys(of.tolist())),
            beside=tuple(self._names[number] for number in sorted(there.difference(of.tolist()))),
            distance=stop - 1 - place,
            guesses={guess: self._names[number] for guess, number in guesses.items()},
            bin=self._bin(place, stop, asked.room),
        )

    def _part_of_a_name(self, mention: int) -> bool:
        """Whether the words beside a name tell it: those of one name are capitalised and always together."""
        start, stop, _ = self._mentions[mention]
        after = re.match(r"[ \n]+([^\W\d_])", self._text[stop : stop + 4])
        if after and after[1].isupper():
            return True
        before = re.search(r"([^\W\d_]+)\.?[ \n]+$", self._text[max(start - 24, 0) : start])
        return before is not None and before[1] in self._joined

    def _since(self, word: int, room: int) -> int | None:
        """The first word of a passage of at most ``room`` tokens before ``word``; none where there are fewer."""
        since = bisect_left(self._before, self._before[word] - room)
        if not since:
            return None
        while since < word:
            alone = len(self._encode(self._text[self._first_sign(since) : self._ends[since]]))
            if alone + self._before[word] - self._before[since + 1] <= room:
                return since
            since += 1
        return None

    def _first_sign(self, word: int) -> int:
        return self._ends[word] - len(self._text[self._words[word] : self._ends[word]].lstrip(" \n"))


def quotas(questions: int) -> Sequence[int]:
    """How many of so many questions each bin of distance gets."""
    return [questions // BINS + (number < questions % BINS) for number in range(BINS)]

"""Cloze questions about names, made from any text without a model.

A sentence that mentions a name is asked about with the name taken out; the model reads a passage that mentions the same
name at a known distance. Questions that a simple guess would always answer are left out: at least three other names
must be mentioned later in the passage, or as often, as the answer.

Four kinds of index occur, and their names say which one is meant:

- ``..._start``, ``..._end``: characters of the document;
- ``word_index``: words of the document, as :data:`_WORD` finds them;
- ``mention_index``: mentions of names, in the order of the document;
- ``name_index``: different names of the document.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

BLANK = "____"
QUESTION_POSITIONS = ("last", "first", "both")  # of the question, relative to the passage
SENTENCE_SOURCES = ("next", "earlier")  # the sentence after the passage, or a sentence of the passage
QUESTION_FORMATS = ("gap", "completion")
ANSWER_TOKENS = 16  # most tokens of a name, the end symbol included
BINS = 8  # equally wide bins of the distance between answer and end of the passage
RECENT, FREQUENT, RANDOM = "the most recent name", "the most frequent name", "a name at random"

_MIN_MENTIONS = 5  # of a name in a document
_MIN_NAME_LETTERS = 3
_MIN_TITLE_FOLLOWERS = 3  # different names after a word that make it a title
_MIN_RIVALS = 3  # other names that are mentioned later than the answer, or as often
_MIN_SENTENCE_WORDS, _MAX_SENTENCE_WORDS = 8, 60
_MIN_COMPLETION_WORDS = 4  # before the name, in a sentence to be completed
# Every tokenizer takes a blank and the letters after it as one word, and a newline as a word by itself.
_WORD = re.compile(r"[ \n]*[^ \n]+")
LETTERS = re.compile(r"[^\W\d_]+")
_SHORT = r"(?:Mrs?|Ms|Dr|St|Mme|Mlle|Messrs|Capt|Col|Gen|Lieut|Rev|Hon|Prof|Esq|Jr|Sr|No|Vol|[A-Z])"
_BEFORE_INNER_WORD = re.compile(rf"(?:[^\W\d_]|,|;|\b{_SHORT}\.)[ \n]$")  # the next word begins no sentence
_SENTENCE_BORDER = re.compile(r"[.!?…][\"'”’»)\]]*[ \n]+|\n[ \t\r]*\n\s*")
_ABBREVIATION = re.compile(rf"\b{_SHORT}\.$")
_WHOLE_SENTENCE = re.compile(r"[\"'“‘«(\[_]*[^\W\d_].*[.!?…][\"'”’»)\]_]*", re.DOTALL)
_JOINERS = set("-_'’‐‑")  # characters that join letters into a longer word


def hash64(text: str) -> int:
    """Return the 64-bit BLAKE2b hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def uniform(seed_hash: int, k: int) -> float:
    """Return the k-th of several uniform numbers in [0, 1) that a 64-bit hash determines.

    Args:
        seed_hash: Hash of 64 bits.
        k: Index from 0 to 7. The numbers are the 12 bits from bit 7·k on, so that neighbours share 5 bits.
    """
    return (seed_hash >> 7 * k) % 4096 / 4096


def seeded_generator(text: str) -> np.random.Generator:
    """Return a NumPy generator that is seeded by the hash of a text."""
    return np.random.default_rng(hash64(text))


@dataclass(frozen=True)
class ClozeQuestion:
    """A question about a document and the passage that the model reads.

    Attributes:
        passage_start: First character of the passage, in the document.
        passage_end: End of the passage, in characters of the document.
        gap_start: Character of the document where the gap is, or before which a needle is inserted.
        prompt: Text before the passage: the question, or nothing if the question comes after the passage.
        cue: Text after the passage, to which the model adds the answer.
        answer: The name that was taken out.
        choices: The names in the passage, in the order of their first mention.
        question_names: Names that occur in the question but not in the passage.
        distance: Words between the last mention of the answer in the passage and the end of the passage.
        guesses: Answers of simple strategies, by the name of the strategy.
        distance_bin: Bin of the distance in tokens, from 0 to ``BINS - 1``.
    """

    passage_start: int
    passage_end: int
    gap_start: int
    prompt: str
    cue: str
    answer: str
    choices: tuple[str, ...]
    question_names: tuple[str, ...]
    distance: int
    guesses: Mapping[str, str]
    distance_bin: int


def question_text(sentence: str, question_position: str, question_format: str = "gap") -> tuple[str, str]:
    """Return the text before and the text after a passage.

    Args:
        sentence: The question, with :data:`BLANK` in place of the name.
        question_position: Where the question is, relative to the passage; one of :data:`QUESTION_POSITIONS`.
        question_format: ``gap`` asks for the name in the blank; ``completion`` ends the sentence before the name.

    Returns:
        The prompt and the cue; see :class:`ClozeQuestion`.
    """
    if question_format == "completion":
        return "", f"\n\n{sentence.partition(BLANK)[0].rstrip()}"
    before = "" if question_position == "last" else f"{sentence}\n\n"
    after = "" if question_position == "first" else f"{sentence}\n\n"
    return before, f"\n\n{after}{BLANK} ="


class _Mention(NamedTuple):
    """A mention of a name: characters of the document, and the index of the name."""

    start: int
    end: int
    name_index: int


@dataclass(frozen=True)
class _WordCounts:
    """Counts over a document of each run of letters, upper and lower case apart.

    Attributes:
        occurrences: How often a word occurs.
        within_sentence: How often a capitalised word occurs where no sentence can begin.
        before_capital: How often a capitalised word stands directly before another one.
        followers: The different capitalised words directly after a capitalised word.
    """

    occurrences: Counter[str]
    within_sentence: Counter[str]
    before_capital: Counter[str]
    followers: Mapping[str, set[str]]

    @classmethod
    def from_words(cls, text: str, words: Sequence[tuple[str, int, int]]) -> Self:
        """Count the words (word, start, end) of a text."""
        within_sentence, before_capital = Counter[str](), Counter[str]()
        followers = defaultdict[str, set[str]](set)
        text_end = ("", len(text), len(text))  # so that the last word has a next one, too
        for (word, start, end), (next_word, next_start, _) in pairwise([*words, text_end]):
            if word[0].isupper() and len(word) >= _MIN_NAME_LETTERS and word[1:].islower():
                # 12 characters hold what the pattern may match
                within_sentence[word] += bool(_BEFORE_INNER_WORD.search(text, max(start - 12, 0), start))
                if next_word[:1].isupper() and text[end:next_start].lstrip(".") in (" ", "\n"):
                    before_capital[word] += 1
                    followers[word].add(next_word)
        return cls(Counter(word for word, *_ in words), within_sentence, before_capital, followers)

    def names(self) -> list[str]:
        """Return the words that are taken for names, in the order of their first capitalised occurrence."""
        count = self.occurrences
        return [
            word
            for word, within_sentence in self.within_sentence.items()
            if count[word] >= _MIN_MENTIONS
            and 4 * within_sentence >= count[word]  # capitalised not only because a sentence begins
            and 50 * count[word.lower()] <= count[word]  # hardly ever in lower case
            and 2 * self.before_capital[word] <= count[word]  # otherwise a title, or a first name
        ]

    def first_names(self) -> set[str]:
        """Return the words that begin longer names; a title stands before many different names, a first name not."""
        return {
            word
            for word, followers in self.followers.items()
            if len(followers) < _MIN_TITLE_FOLLOWERS and not self.occurrences[word.lower()]
        }


class Sentence(NamedTuple):
    """A sentence: characters of the document."""

    start: int
    end: int


class _GapSentence(NamedTuple):
    """A sentence with a gap, before a passage is chosen for it."""

    sentence_start: int
    mention_index: int  # of the name that is taken out
    answer_index: int  # name_index of the answer
    question_names: set[int]  # name indices in the question, which are neither rivals nor guesses
    prompt: str
    cue: str
    passage_budget: int  # most tokens of a passage
    seed_hash: int  # decides which passages and guesses are chosen


class _PassageNames(NamedTuple):
    """The names in a passage."""

    mention_names: np.ndarray  # (mentions,) name_index of each mention
    counts: np.ndarray  # (names,) number of mentions of each name
    last_words: np.ndarray  # (names,) word_index of each name's last mention, -1 without one


class ClozeDocument:
    """A document, indexed by words, sentences and mentions of names.

    Args:
        text: Text of the document.
        encode: Tokenizer that returns the (tokens,) ids of a text.
        is_possible_answer: Whether a name can be an answer.
        min_tokens: Shortest passage, in tokens. Lengths are log-uniform from there to the token budget. None makes
            every passage as long as its budget allows.
    """

    def __init__(
        self,
        text: str,
        encode: Callable[[str], np.ndarray],
        is_possible_answer: Callable[[str], bool],
        min_tokens: int | None = None,
    ) -> None:
        self._text, self._encode, self._min_tokens = text, encode, min_tokens
        words = list(_WORD.finditer(text))
        # By word_index: characters where words start (white space before them included) and end.
        self._word_starts = [match.start() for match in words]
        self._word_ends = [match.end() for match in words]
        # By word_index: tokens of all words before. Words are encoded one by one, each different word once.
        word_sizes: dict[str, int] = {}
        self._tokens_before = [0]
        for match in words:
            word = match[0]
            if word not in word_sizes:
                word_sizes[word] = len(encode(word))
            self._tokens_before.append(self._tokens_before[-1] + word_sizes[word])
        self._find_names(is_possible_answer)

    @property
    def token_count(self) -> int:
        """Tokens of the whole document."""
        return self._tokens_before[-1]

    @property
    def names(self) -> list[str]:
        """Words that are capitalised within sentences too, and hardly ever written in lower case."""
        return self._names

    def _find_names(self, is_possible_answer: Callable[[str], bool]) -> None:
        """Set the names, their mentions and the words that are parts of longer names."""
        words = [(match[0], match.start(), match.end()) for match in LETTERS.finditer(self._text)]
        counts = _WordCounts.from_words(self._text, words)
        self._names = [word for word in counts.names() if is_possible_answer(word)]
        self._joined_words = counts.first_names() | set(self._names)
        name_indices = {name: name_index for name_index, name in enumerate(self._names)}
        self._mentions = [
            _Mention(start, end, name_indices[word])
            for word, start, end in words
            if word in name_indices and not self._is_part_of_word(start, end)
        ]
        # By mention_index: where the mention starts, its name, and the word that contains it. Lists are for bisect,
        # arrays for counting.
        self._mention_starts = [mention.start for mention in self._mentions]
        self._mention_names = np.array([mention.name_index for mention in self._mentions], np.int64)  # (mentions,)
        self._mention_words = [bisect_left(self._word_ends, mention.end) for mention in self._mentions]
        self._mention_words_array = np.array(self._mention_words, np.int64)  # (mentions,)

    def _is_part_of_word(self, start: int, end: int) -> bool:
        """Return whether letters are part of a word such as Jean-Paul; a genitive's 's is no part."""
        text = self._text
        is_genitive = text[end : end + 2] in ("'s", "’s")
        is_joined_after = not is_genitive and text[end : end + 1] in _JOINERS
        return is_joined_after or text[max(start - 1, 0) : start] in _JOINERS

    def sentences(self) -> list[Sentence]:
        """Return the sentences of the document."""
        text, start, sentences = self._text, 0, []
        for border in _SENTENCE_BORDER.finditer(text):
            if not self._is_sentence_end(start, border):
                continue
            sentence = text[start : border.end()].rstrip()
            if _WHOLE_SENTENCE.fullmatch(sentence):
                sentences.append(Sentence(start, start + len(sentence)))
            start = border.end()
        return sentences

    def _is_sentence_end(self, start: int, border: re.Match[str]) -> bool:
        """Return whether the sentence from ``start`` ends at a border, and not after an abbreviation such as Mr."""
        text, sign = self._text, border.start()
        if text[sign] == "\n":  # an empty line always ends a sentence
            return True
        if text[sign] == "." and _ABBREVIATION.search(text, max(start, sign - 8), sign + 1):
            return False
        next_word = LETTERS.search(text, border.end(), border.end() + 4)
        return next_word is None or not next_word[0][0].islower()

    def questions(
        self, context_tokens: int, question_position: str, source: str, question_format: str = "gap"
    ) -> Iterator[ClozeQuestion]:
        """Find every question whose passage, together with question and answer, fills a context.

        Args:
            context_tokens: Tokens of the context: prompt, passage, cue and answer.
            question_position: One of :data:`QUESTION_POSITIONS`.
            source: ``next`` asks about the sentence after the passage; ``earlier`` about a sentence of the passage,
                with one passage for each bin of distance.
            question_format: One of :data:`QUESTION_FORMATS`. A ``completion`` is always asked after the passage.

        Yields:
            The questions, in the order of their sentences.
        """
        sentences = self.sentences()
        sentence_end_words = self._end_words(sentences)
        for sentence in filter(self._is_askable, sentences):
            for mention_index in self._possible_gaps(sentence, question_format):
                gap = self._gap_sentence(sentence, mention_index, context_tokens, question_position, question_format)
                if source == "next":
                    sentence_word = bisect_left(self._word_ends, sentence.start + 1)
                    passage_ends = [sentence_word] if gap.passage_budget > 0 else []
                else:
                    answer_word = self._mention_words[mention_index]
                    passage_ends = self.passage_ends(answer_word, gap.passage_budget, gap.seed_hash, sentence_end_words)
                for end_word in passage_ends:
                    question = self._question(gap, end_word, source == "earlier")
                    if question is not None:
                        yield question

    def _mention_indices(self, sentence: Sentence) -> range:
        """Return the indices of the mentions in a sentence."""
        return range(bisect_left(self._mention_starts, sentence.start), bisect_left(self._mention_starts, sentence.end))

    def _is_askable(self, sentence: Sentence) -> bool:
        """Return whether a sentence has the length of a question."""
        word_count = len(self._text[sentence.start : sentence.end].split())
        return _MIN_SENTENCE_WORDS <= word_count <= _MAX_SENTENCE_WORDS

    def _possible_gaps(self, sentence: Sentence, question_format: str) -> Iterator[int]:
        """Yield the mentions of a sentence whose name may be taken out: the sentence must not give it away."""
        mention_indices = self._mention_indices(sentence)
        name_counts = Counter(self._mention_names[mention_indices.start : mention_indices.stop].tolist())
        for mention_index in mention_indices:
            mention = self._mentions[mention_index]
            if name_counts[mention.name_index] > 1 or self._is_within_name(mention_index):
                continue
            words_before = self._text[sentence.start : mention.start].split()
            if question_format == "completion" and len(words_before) < _MIN_COMPLETION_WORDS:
                continue
            yield mention_index

    def _end_words(self, sentences: Sequence[Sentence]) -> list[int]:
        """Return for each sentence the index of the first word after it."""
        return [bisect_left(self._word_ends, sentence.end) + 1 for sentence in sentences]

    def _gap_sentence(
        self, sentence: Sentence, mention_index: int, context_tokens: int, question_position: str, question_format: str
    ) -> _GapSentence:
        """Return a sentence with a gap in place of a mention, and the tokens that its passage may have."""
        mention = self._mentions[mention_index]
        before, after = self._text[sentence.start : mention.start], self._text[mention.end : sentence.end]
        text = " ".join(f"{before}{BLANK}{after}".split())
        prompt, cue = question_text(text, question_position, question_format)
        budget = context_tokens - ANSWER_TOKENS - len(self._encode(prompt)) - len(self._encode(cue))
        seed_hash = hash64(f"{mention.start} {text}")
        mention_indices = self._mention_indices(sentence)
        # A completion ends at the gap, so the names after it stay unseen.
        end_mention = mention_index + 1 if question_format == "completion" else mention_indices.stop
        return _GapSentence(
            sentence_start=sentence.start,
            mention_index=mention_index,
            answer_index=mention.name_index,
            question_names=set(self._mention_names[mention_indices.start : end_mention].tolist()),
            prompt=prompt,
            cue=cue,
            passage_budget=self._sample_budget(budget, seed_hash),
            seed_hash=seed_hash,
        )

    def _sample_budget(self, budget: int, seed_hash: int) -> int:
        """Return the passage length in tokens: ``budget``, or log-uniform in [min_tokens, budget]."""
        if self._min_tokens is None or budget <= self._min_tokens:
            return budget
        # Fibonacci hashing: independent of the bits of the hash that choose the end of the passage.
        share = seed_hash * 0x9E3779B97F4A7C15 % (1 << 64) / (1 << 64)
        return int(self._min_tokens * (budget / self._min_tokens) ** share)

    def passage_ends(
        self, answer_word: int, budget: int, seed_hash: int, sentence_end_words: Sequence[int]
    ) -> list[int]:
        """Return where passages may end that contain a word: at most one end for each bin of distance.

        Args:
            answer_word: Index of the word that contains the answer.
            budget: Most tokens of a passage.
            seed_hash: 64-bit hash that decides the distance within each bin.
            sentence_end_words: For each sentence, the index of the first word after it.

        Returns:
            Indices of the first word after each passage. A bin in which no sentence ends is left out.
        """
        end_words = []
        for distance_bin in range(BINS if budget > 0 else 0):
            share = (distance_bin + uniform(seed_hash, distance_bin)) / BINS
            target_word = bisect_left(self._tokens_before, self._tokens_before[answer_word + 1] + share * budget)
            sentence_index = bisect_left(sentence_end_words, target_word)
            if sentence_index < len(sentence_end_words):
                end_word = sentence_end_words[sentence_index]
                if self._distance_bin(answer_word, end_word, budget) == distance_bin:
                    end_words.append(end_word)
        return end_words

    def _distance_bin(self, answer_word: int, end_word: int, budget: int) -> int:
        """Return the bin of the tokens after a word and before the end of a passage, as a share of the budget."""
        return BINS * (self._tokens_before[end_word] - self._tokens_before[answer_word + 1]) // budget

    def _question(self, gap: _GapSentence, end_word: int, in_passage: bool) -> ClozeQuestion | None:
        """Return the question on the passage that ends before ``end_word``, or None if it would be too easy.

        Args:
            gap: The sentence with the gap.
            end_word: Index of the first word after the passage.
            in_passage: Whether the sentence is a sentence of the passage itself.
        """
        start_word = self._passage_start_word(end_word, gap.passage_budget)
        if start_word is None or (in_passage and self._word_text_start(start_word) > gap.sentence_start):
            return None
        passage = self._passage_names(start_word, end_word)
        others = [n for n in np.unique(passage.mention_names).tolist() if n not in gap.question_names]
        if not self._has_rivals(passage, gap.answer_index, np.array(others, np.int64)):
            return None
        guesses = self._guesses(passage, np.array(sorted([*others, gap.answer_index])), gap.seed_hash)
        unseen = gap.question_names.difference(passage.mention_names.tolist())
        last_answer_word = int(passage.last_words[gap.answer_index])
        answer_word = self._mention_words[gap.mention_index] if in_passage else last_answer_word
        return ClozeQuestion(
            passage_start=self._word_text_start(start_word),
            passage_end=self._word_ends[end_word - 1],
            gap_start=self._mentions[gap.mention_index].start,
            prompt=gap.prompt,
            cue=gap.cue,
            answer=self._names[gap.answer_index],
            choices=self._names_in_order(passage.mention_names),
            question_names=tuple(self._names[n] for n in sorted(unseen)),
            distance=end_word - 1 - answer_word,
            guesses=guesses,
            distance_bin=self._distance_bin(answer_word, end_word, gap.passage_budget),
        )

    def _passage_names(self, start_word: int, end_word: int) -> _PassageNames:
        """Count the names in the words ``start_word`` to ``end_word - 1``."""
        mention_names, mention_words = self._mentions_between(start_word, end_word)
        counts = np.bincount(mention_names, minlength=len(self._names))
        last_words = np.full(len(self._names), -1)
        last_words[mention_names] = mention_words  # later mentions overwrite earlier ones
        return _PassageNames(mention_names, counts, last_words)

    def _has_rivals(self, passage: _PassageNames, answer: int, others: np.ndarray) -> bool:
        """Return whether a passage mentions the answer, and enough ``others`` later or as often (name indices)."""
        counts, last_words = passage.counts, passage.last_words
        is_rival = (last_words[others] > last_words[answer]) | (counts[others] >= counts[answer])
        return bool(counts[answer]) and int(is_rival.sum()) >= _MIN_RIVALS

    def _guesses(self, passage: _PassageNames, candidates: np.ndarray, seed_hash: int) -> dict[str, str]:
        """Return the names that simple strategies choose among candidates, (candidates,) sorted name indices."""
        counts, last_words = passage.counts[candidates], passage.last_words[candidates]
        name_indices = {
            RECENT: candidates[np.argmax(last_words)],
            FREQUENT: candidates[np.lexsort((last_words, counts))[-1]],  # ties: the latest
            RANDOM: candidates[seed_hash % len(candidates)],
        }
        return {guess: self._names[name_index] for guess, name_index in name_indices.items()}

    def _mentions_between(self, start_word: int, end_word: int) -> tuple[np.ndarray, np.ndarray]:
        """Return name indices and word indices, each (mentions,), of the mentions in the words start to end - 1."""
        first, end = bisect_left(self._mention_words, start_word), bisect_left(self._mention_words, end_word)
        return self._mention_names[first:end], self._mention_words_array[first:end]

    def _names_in_order(self, mention_names: np.ndarray) -> tuple[str, ...]:
        """Return the different names of (mentions,) name indices, in the order of their first mention."""
        return tuple(self._names[name_index] for name_index in dict.fromkeys(mention_names.tolist()))

    def _is_within_name(self, mention_index: int) -> bool:
        """Return whether a mention is part of a longer name, whose other words would give the answer away."""
        start, end, _ = self._mentions[mention_index]
        after = re.match(r"[ \n]+([^\W\d_])", self._text[end : end + 4])
        if after and after[1].isupper():
            return True
        before = re.search(r"([^\W\d_]+)\.?[ \n]+$", self._text[max(start - 24, 0) : start])
        return before is not None and before[1] in self._joined_words

    def _passage_start_word(self, end_word: int, budget: int) -> int | None:
        """Return the first word of the longest passage before ``end_word`` that has at most ``budget`` tokens.

        None if the whole text before ``end_word`` has fewer tokens.
        """
        start_word = bisect_left(self._tokens_before, self._tokens_before[end_word] - budget)
        if not start_word:
            return None
        while start_word < end_word:
            # The passage begins without the white space of its first word, which may then have more tokens.
            first_word = self._text[self._word_text_start(start_word) : self._word_ends[start_word]]
            other_tokens = self._tokens_before[end_word] - self._tokens_before[start_word + 1]
            if len(self._encode(first_word)) + other_tokens <= budget:
                return start_word
            start_word += 1
        return None

    def _word_text_start(self, word_index: int) -> int:
        """Return the character where a word starts, without the white space before it."""
        word = self._text[self._word_starts[word_index] : self._word_ends[word_index]]
        return self._word_ends[word_index] - len(word.lstrip(" \n"))


def bin_quotas(questions: int) -> Sequence[int]:
    """Return how many of ``questions`` questions each bin of distance gets, as equally as possible."""
    return [questions // BINS + (distance_bin < questions % BINS) for distance_bin in range(BINS)]

"""Variants of cloze questions: names replaced by other names, and needles (inserted sentences with the answer)."""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.questions.cloze import (
    ANSWER_TOKENS,
    LETTERS,
    RANDOM,
    RECENT,
    ClozeDocument,
    ClozeQuestion,
    hash64,
    seeded_generator,
)

_ATTEMPTS = 16  # draws of names, until the question takes no more tokens than the context has
NEEDLE = "The keeper of the key is"  # followed by a name that the passage does not mention elsewhere
NEEDLE_NAMES = 64  # most frequent names of the training texts: so few that a small model soon knows them all


class NamePermutation:
    """Replaces the names of a question by other names, drawn for each question, so that none can be memorised.

    Hermann et al. 2015, Teaching Machines to Read and Comprehend (arXiv 1506.03340), Section 3.2, permute entity
    markers in the same way; here names are replaced by names, so that the text stays readable.

    Args:
        names: Names of the training texts, from which new names are drawn.
        encode: Tokenizer that returns the (tokens,) ids of a text.
        seed: Seed of all draws, together with document and question.
    """

    def __init__(self, names: Collection[str], encode: Callable[[str], np.ndarray], seed: int) -> None:
        self._encode, self._seed = encode, seed
        self._sizes: dict[str, int] = {}
        self._names_by_size = defaultdict[int, list[str]](list)
        for name in sorted(names):
            self._names_by_size[self._name_size(name)].append(name)

    def __call__(
        self, question: ClozeQuestion, passage: str, max_tokens: int, document_digest: str
    ) -> tuple[ClozeQuestion, str]:
        """Return the question and its passage with other names.

        Args:
            question: Question with the names of the text.
            passage: Text of its passage, with the same names.
            max_tokens: Most tokens of prompt, passage and cue together.
            document_digest: Part of the seed of the draw.

        Raises:
            UserError: There are too few names that are short enough.
        """
        names = list(dict.fromkeys((*question.choices, *question.question_names)))
        pattern = re.compile(rf"(?<![^\W\d_])(?:{'|'.join(map(re.escape, names))})(?![^\W\d_])")
        seed_text = f"{self._seed}\0{document_digest}\0{question.gap_start}\0{question.passage_end}"
        # rare names are words of the passage that are not exchanged: a new name must be none of them
        words = {word[0] for word in LETTERS.finditer(passage)}.difference(names)
        for new_names in self._draw(names, words, seed_text):
            renamed, new_passage = _rename(question, passage, new_names, pattern)
            if self._token_count(renamed, new_passage) <= max_tokens:
                return renamed, new_passage
        raise UserError(
            f"the training texts have too few short names to exchange {len(names)} of a passage for: give more texts, "
            "or leave out --entity-names exchanged"
        )

    def _draw(self, names: list[str], words: set[str], seed_text: str) -> Iterator[Mapping[str, str]]:
        """Yield new names by old name, none of ``words``, each of as many tokens as the old one, or else of fewer."""
        for attempt in range(_ATTEMPTS):
            generator = seeded_generator(f"{seed_text}\0{attempt}")
            new_names: dict[str, str] = {}
            for name in names:
                candidates = self._longest_unused({name, *new_names.values()}, self._name_size(name))
                if words.issuperset(candidates):
                    return
                new_names[name] = _draw_other(candidates, words, generator)
            yield new_names

    def _longest_unused(self, used: set[str], max_size: int) -> list[str]:
        """Return the names of equal size that are not used, of the largest size up to ``max_size`` that has any."""
        for size in range(max_size, 0, -1):
            if unused := [name for name in self._names_by_size.get(size, ()) if name not in used]:
                return unused
        return []

    def _name_size(self, name: str) -> int:
        """Return the tokens of a name after a space and after a quotation mark, where tokenizers cut differently."""
        if name not in self._sizes:
            self._sizes[name] = len(self._encode(f" {name}, “{name}"))
        return self._sizes[name]

    def _token_count(self, question: ClozeQuestion, passage: str) -> int:
        return sum(len(self._encode(text)) for text in (question.prompt, passage, question.cue) if text)


def _draw_other(names: Sequence[str], words: set[str], generator: np.random.Generator) -> str:
    """Draw one of ``names`` that is none of ``words``, of which there is at least one."""
    while (name := names[int(generator.integers(len(names)))]) in words:
        pass
    return name


def _rename(
    question: ClozeQuestion, passage: str, new_names: Mapping[str, str], pattern: re.Pattern[str]
) -> tuple[ClozeQuestion, str]:
    def rename(text: str) -> str:
        return pattern.sub(lambda match: new_names[match[0]], text)

    renamed = replace(
        question,
        prompt=rename(question.prompt),
        cue=rename(question.cue),
        answer=new_names[question.answer],
        choices=tuple(new_names[name] for name in question.choices),
        question_names=tuple(new_names[name] for name in question.question_names),
        guesses={guess: new_names[name] for guess, name in question.guesses.items()},
    )
    return renamed, rename(passage)


class NeedleDocument(ClozeDocument):
    """A document into which needles can be inserted: sentences that contain the answer."""

    def name_counts(self) -> Counter[str]:
        """Return how often each name is mentioned."""
        return Counter(self._names[name_index] for name_index in self._mention_names.tolist())

    def needle_questions(self, context_tokens: int) -> Iterator[ClozeQuestion]:
        """Yield, for each sentence and bin of distance, a question whose needle goes before that sentence.

        The answer is still empty: :func:`insert_needle` draws it.

        Args:
            context_tokens: Most tokens of passage, needle, question and answer together.
        """
        cue = f"\n\n{NEEDLE}"
        # Needle and question are the same sentence, each followed by the answer.
        max_budget = context_tokens - 2 * (ANSWER_TOKENS + len(self._encode(cue)))
        sentences = self.sentences()
        sentence_end_words = self._end_words(sentences)
        for sentence_start in (sentence.start for sentence in sentences):
            needle_word = bisect_left(self._word_ends, sentence_start + 1)
            seed_hash = hash64(f"{sentence_start} {NEEDLE}")
            budget = self._sample_budget(max_budget, seed_hash)
            for end_word in self.passage_ends(needle_word, budget, seed_hash, sentence_end_words):
                start_word = self._passage_start_word(end_word, budget)
                if start_word is None or self._word_text_start(start_word) > sentence_start:
                    continue
                mention_names, _ = self._mentions_between(start_word, end_word)
                yield ClozeQuestion(
                    passage_start=self._word_text_start(start_word),
                    passage_end=self._word_ends[end_word - 1],
                    gap_start=sentence_start,
                    prompt="",
                    cue=cue,
                    answer="",
                    choices=self._names_in_order(mention_names),
                    question_names=(),
                    distance=end_word - needle_word,
                    guesses={},
                    distance_bin=self._distance_bin(needle_word, end_word, budget),
                )


def insert_needle(
    question: ClozeQuestion, passage: str, names: Collection[str], seed_text: str
) -> tuple[ClozeQuestion, str]:
    """Draw an answer and insert the sentence that contains it.

    Args:
        question: A question of :meth:`NeedleDocument.needle_questions`.
        passage: Text of the passage, without the needle.
        names: Names from which the answer is drawn.
        seed_text: Seed of the draw, together with the question.

    Returns:
        The question with its answer, and the passage with the needle.

    Raises:
        UserError: The passage already mentions all the names.
    """
    generator = seeded_generator(f"{seed_text}\0{question.gap_start}\0{question.passage_end}")
    unused = sorted(set(names).difference(question.choices))
    words = {word[0] for word in LETTERS.finditer(passage)}  # rare names of the passage are no choices
    if words.issuperset(unused):
        raise UserError("the training texts have too few names to plant another one: give more texts")
    answer = _draw_other(unused, words, generator)
    needle_start = question.gap_start - question.passage_start  # character of the passage
    text = f"{passage[:needle_start]}{NEEDLE} {answer}. {passage[needle_start:]}"
    choices = (*question.choices, answer)
    last_starts = {word[0]: word.start() for word in LETTERS.finditer(text)}
    guesses = {
        RECENT: max(choices, key=last_starts.__getitem__),
        RANDOM: choices[int(generator.integers(len(choices)))],
    }
    return replace(question, answer=answer, choices=choices, guesses=guesses), text

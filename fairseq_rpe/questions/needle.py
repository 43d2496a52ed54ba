"""Questions whose answer is put into a passage of any text: one sentence, the same each time but for its name."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.questions.cloze import ANSWER_TOKENS, LETTERS, RANDOM, RECENT, Gap, Passages
from fairseq_rpe.questions.text_hash import chance_of, generator

PLANTED = "The keeper of the key is"  # and a name that the passage has nowhere else
FREQUENT = 64  # of the training's names, which are planted: so few that a small model soon knows them all


class Places(Passages):
    """A document in words, sentences and names, in which sentences can be planted."""

    def counts(self) -> Counter[str]:
        """How often each name is mentioned."""
        return Counter(self._names[number] for number in self._of.tolist())

    def places(self, tokens: int) -> Iterator[Gap]:
        """Before each sentence, for each bin of distance: questions whose answer is to be drawn (:func:`plant`).

        With their passage, what is planted there and room for the answer they take at most ``tokens``.
        """
        cue = f"\n\n{PLANTED}"
        most = tokens - 2 * (ANSWER_TOKENS + len(self._encode(cue)))  # of the text, beside both sentences
        found = self.sentences()
        ends = [bisect_left(self._ends, end) + 1 for _, end in found]  # in words
        for begin, _ in found:
            at = bisect_left(self._ends, begin + 1)
            chance = chance_of(f"{begin} {PLANTED}")
            room = self._drawn(most, chance)
            for stop in self.stops(at, room, chance, ends):
                since = self._since(stop, room)
                if since is None or self._first_sign(since) > begin:
                    continue
                low, high = bisect_left(self._words_at, since), bisect_left(self._words_at, stop)
                own = (self._names[number] for number in dict.fromkeys(self._of[low:high].tolist()))
                yield Gap(
                    begin=self._first_sign(since),
                    end=self._ends[stop - 1],
                    place=begin,
                    prompt="",
                    cue=cue,
                    answer="",
                    choices=tuple(own),
                    beside=(),
                    distance=stop - at,
                    guesses={},
                    bin=self._bin(at, stop, room),
                )


def plant(gap: Gap, passage: str, names: Collection[str], chance: str) -> tuple[Gap, str]:
    """The question with an answer among ``names``, drawn by ``chance``, and its passage with the sentence that has it.

    Raises UserError: the passage has all of the names.
    """
    draw, free = generator(f"{chance}\0{gap.place}\0{gap.end}"), sorted(set(names).difference(gap.choices))
    if not free:
        raise UserError("the training texts have too few names to plant another one: give more texts")
    answer, at = free[int(draw.integers(len(free)))], gap.place - gap.begin
    found = f"{passage[:at]}{PLANTED} {answer}. {passage[at:]}"
    choices = (*gap.choices, answer)
    last = {word[0]: word.start() for word in LETTERS.finditer(found)}
    guesses = {RECENT: max(choices, key=last.__getitem__), RANDOM: choices[int(draw.integers(len(choices)))]}
    return replace(gap, answer=answer, choices=choices, guesses=guesses), found

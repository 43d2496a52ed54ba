"""Questions whose names are exchanged for others, so that a model has to read them: no name can be known by heart.

The idea is that of Hermann et al., Teaching Machines to Read and Comprehend (arXiv 1506.03340), Section 3.2, whose
markers are permuted for each question; here names take the place of names, so that the text reads on.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.questions.cloze import Gap
from fairseq_rpe.questions.text_hash import generator

_DRAWS = 16  # before it is given up to find names that take no more tokens than there are


class Exchange:
    """Names in place of names, drawn for each question alone.

    Args:
        names: those to draw from.
        encode: a tokenizer, (tokens,) ids of a text.
        seed: of the draws.
    """

    def __init__(self, names: Collection[str], encode: Callable[[str], np.ndarray], seed: int) -> None:
        self._encode, self._seed = encode, seed
        self._sizes: dict[str, int] = {}
        self._by_tokens = defaultdict[int, list[str]](list)
        for name in sorted(names):
            self._by_tokens[self._tokens(name)].append(name)

    def __call__(self, gap: Gap, passage: str, most: int, source: str) -> tuple[Gap, str]:
        """The question with other names, and its passage, together in at most so many tokens.

        Args:
            source: names the document, for the draw.

        Raises UserError: there are too few names.
        """
        own = list(dict.fromkeys((*gap.choices, *gap.beside)))
        whole = re.compile(rf"(?<![^\W\d_])(?:{'|'.join(map(re.escape, own))})(?![^\W\d_])")
        for others in self._draws(own, f"{self._seed}\0{source}\0{gap.place}\0{gap.end}"):
            changed, text = _renamed(gap, passage, others, whole)
            if self._length(changed, text) <= most:
                return changed, text
        raise UserError(
            f"the training texts have too few short names to exchange {len(own)} of a passage for: give more texts, or "
            "leave out --names exchanged"
        )

    def _draws(self, own: list[str], chance: str) -> Iterator[Mapping[str, str]]:
        """Other names, of as many tokens each where there are such, or fewer."""
        for attempt in range(_DRAWS):
            draw, taken, found = generator(f"{chance}\0{attempt}"), set[str](), {}
            for name in own:
                sizes = range(self._tokens(name), 0, -1)
                free = ([n for n in self._by_tokens.get(k, ()) if n not in taken and n != name] for k in sizes)
                there = next((names for names in free if names), None)
                if there is None:
                    return
                found[name] = there[int(draw.integers(len(there)))]
                taken.add(found[name])
            yield found

    def _tokens(self, name: str) -> int:
        if name not in self._sizes:
            # after a space, and after a sign: not every name is one piece of a tokenizer there
            self._sizes[name] = len(self._encode(f" {name}, “{name}"))
        return self._sizes[name]

    def _length(self, gap: Gap, passage: str) -> int:
        return sum(len(self._encode(part)) for part in (gap.prompt, passage, gap.cue) if part)


def _renamed(gap: Gap, passage: str, others: Mapping[str, str], whole: re.Pattern[str]) -> tuple[Gap, str]:
    def put(text: str) -> str:
        return whole.sub(lambda found: others[found[0]], text)

    changed = replace(
        gap,
        prompt=put(gap.prompt),
        cue=put(gap.cue),
        answer=others[gap.answer],
        choices=tuple(others[name] for name in gap.choices),
        beside=tuple(others[name] for name in gap.beside),
        guesses={guess: others[name] for guess, name in gap.guesses.items()},
    )
    return changed, put(passage)

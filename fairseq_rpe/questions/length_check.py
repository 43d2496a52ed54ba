"""Whether all questions of a folder can be learned, or asked, in so many tokens: known before anything is trained."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.questions.dataset import Prepared, load
from fairseq_rpe.questions.prompt import check_room, room


@dataclass
class _Most:
    """What the questions of a set need at most: tokens, and the ids of those that need them."""

    read: tuple[int, str] = (0, "")  # of prompt and cue, which are never cut
    compared: tuple[int, int, str] = (0, 0, "")  # of prompt, cue and longest choice; of prompt and cue of that question
    without_choices: str | None = None


def check(
    folder: Prepared, split: str, lengths: Sequence[int], sets: Collection[str] | None = None, compared: bool = False
) -> None:
    """Refuse questions of a split that cannot be read in one of ``lengths``, which bound what is read and written.

    Args:
        sets: those that count; None: all that have the split.
        compared: choices are compared, instead of answers written: all questions must have some.

    Raises UserError: a set has no room beside its answers, a question's prompt and cue alone take more than is left,
    or it has no choices.
    """
    for name in folder.sets if sets is None else sets:
        info = folder.sets[name]
        if split not in info.splits:
            continue
        rooms = [room(length, info.answer_tokens, name) for length in lengths]
        longest = info.splits[split].longest  # with the document; 0 where it is not on record
        if not compared and longest and all(longest <= left for left in rooms):
            continue
        most = _most(folder.folder, split, _stamp(folder.folder, split))[name]
        if compared and most.without_choices is not None:
            remedy = "use --by generation, in a recipe asking.by"
            raise UserError(f"question '{most.without_choices}' of {name} has no choices to compare: {remedy}")
        for length, left in zip(lengths, rooms, strict=True):
            tokens, question = most.read
            check_room(tokens, left, question, name)
            whole, tokens, question = most.compared
            if compared:
                check_room(tokens, length - 1 - (whole - tokens), question, name)


def _stamp(folder: Path, split: str) -> tuple[int, ...]:
    there = [
        (folder / f"{split}{end}").stat() for end in (".idx", ".rows.jsonl") if (folder / f"{split}{end}").exists()
    ]
    return tuple(number for one in there for number in (one.st_size, one.st_mtime_ns))


@lru_cache(maxsize=64)
def _most(folder: Path, split: str, _: tuple[int, ...]) -> dict[str, _Most]:
    """Of each set; a sweep asks for the same folder again and again."""
    found: dict[str, _Most] = {}
    rows = load(folder).split(split)
    for row in rows:
        most = found.setdefault(row.set, _Most())
        tokens = rows.lengths(row)[0]
        choice = max((int(rows.sizes[item]) for item in row.choices), default=0)
        most.read = max(most.read, (tokens, row.id), key=lambda one: one[0])
        most.compared = max(most.compared, (tokens + choice, tokens, row.id), key=lambda one: one[0])
        if not row.choices and most.without_choices is None:
            most.without_choices = row.id
    return found

"""What a model reads of a question: prompt, document and cue, the document shortened where all does not fit."""

from typing import Literal, TypeAlias, get_args

import numpy as np

from fairseq_rpe.core.errors import UserError

Tokens: TypeAlias = np.ndarray
Cut = Literal["end", "start", "middle"]  # where a document loses tokens; "end" keeps its beginning
CUTS: tuple[Cut, ...] = get_args(Cut)
_NONE = np.empty(0, np.int64)


def check_cut(cut: str) -> None:
    """Raises UserError: there is no such way to shorten a document."""
    if cut not in CUTS:
        raise UserError(f"--cut {cut} is not one of {', '.join(CUTS)}: say where a document is shortened")


def room(length: int, answer_tokens: int, name: str) -> int:
    """Tokens that may be read where ``length`` bounds what is read and written, ``answer_tokens`` of it the answer.

    The end of the answer, ``</s>``, is one of its tokens. Raises UserError: nothing is left for the set ``name``.
    """
    if length <= answer_tokens:
        raise UserError(
            f"{length} tokens leave no room for a question: answers of {name} take up to {answer_tokens} of them; "
            "give a greater length"
        )
    return length - answer_tokens


def fitted(
    prompt: Tokens | None, document: Tokens | None, cue: Tokens | None, room: int, cut: str = "end", name: str = ""
) -> tuple[Tokens, int]:
    """Prompt, document and cue, each (tokens,) or None, in at most ``room`` tokens; and how many were left out.

    Prompt and cue stay whole. The document loses tokens at its ``end``, at its ``start``, or in its ``middle``, where
    of an odd number the first half keeps one more. ``name``: the question's id, for the message.

    Raises UserError: prompt and cue alone take more than ``room``, or there is no such ``cut``.

    >>> fitted(np.array([1, 2]), np.array([5, 6, 7, 8, 9]), np.array([3]), 6, "middle")
    (array([1, 2, 5, 6, 9, 3]), 2)
    """
    first, text, last = (_NONE if part is None else part for part in (prompt, document, cue))
    left = check_room(len(first) + len(last), room, name)
    lost = max(0, len(text) - left)
    if lost:
        check_cut(cut)
        kept = {"end": left, "start": 0, "middle": (left + 1) // 2}[cut]
        text = np.concatenate((text[:kept], text[len(text) - (left - kept) :]))
    return np.concatenate((first, text, last)).astype(np.int64), lost


def check_room(tokens: int, room: int, name: str, of: str = "") -> int:
    """What is left for a document beside so many ``tokens`` of prompt and cue. Raises UserError: less than nothing.

    ``name``: the question's id; ``of``: its set.
    """
    if tokens > room:
        which = f"question '{name}'" + (f" of {of}" if of else "")
        raise UserError(
            f"{which} takes {tokens} tokens without its document, where {max(0, room)} may be read: give a greater "
            "length, or leave it out"
        )
    return room - tokens

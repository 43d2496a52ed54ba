"""Digits and numbers in rows of tokens, for encodings that depend on the digits of numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions

_DIGITS = "0123456789"
_SPACE_MARKS = "Ġ▁"  # how byte-level BPE and SentencePiece write a space before a token


def digit_ids(name: str, symbols: Sequence[str]) -> list[int]:
    """Return the ids of the symbols that are a digit, ascending.

    Args:
        name: name of the encoding, for messages.
        symbols: symbols of the dictionary by id.

    Raises:
        UserError: no symbol is a digit, or a symbol consists of several digits or of a space and digits.
    """
    ids = []
    for index, symbol in enumerate(symbols):
        digits = symbol.lstrip(_SPACE_MARKS)
        if not digits or digits.strip(_DIGITS):
            continue
        if len(symbol) > 1:
            raise UserError(
                f"'{name}' numbers the digits of a number, and the symbol '{symbol}' of the dictionary is not a single "
                "digit: use a dictionary in which each digit is a token, such as that of the task 'addition'"
            )
        ids.append(index)
    if not ids:
        raise UserError(
            f"'{name}' numbers the digits of a number, and no symbol of the dictionary is a digit: use a dictionary in "
            "which each digit is a token, such as that of the task 'addition'"
        )
    return ids


def token_ids(name: str, pos: Positions, digits: Tensor) -> Tensor:
    """Return the ids (B, m) of all tokens, negative at padding.

    Args:
        name: name of the encoding, for messages.
        pos: positions of the tokens.
        digits: (N,) int64 ids of digits, empty if the encoding was built without a dictionary.

    Raises:
        UserError: the tokens or the dictionary are not known.
    """
    if pos.tokens is None:
        raise UserError(
            f"'{name}' reads the tokens, which are not available here: train and evaluate it as a model, or pass "
            "positions=Positions(..., tokens=ids)"
        )
    if not len(digits):
        raise UserError(f"'{name}' does not know which tokens are digits: pass symbols=… to build(...)")
    return pos.tokens


def digit_indices(tokens: Tensor, digits: Tensor) -> Tensor:
    """Return the index of each digit within its number.

    A number is a run of digits that no other token interrupts. Padding is not counted and does not interrupt a number.

    Args:
        tokens: (B, m) int64 ids, negative at padding.
        digits: (N,) int64 ids of digits.

    Returns:
        (B, m) int64: 1, 2, 3 … for the digits of each number from its first digit on, 0 for all other tokens.
    """
    is_digit = torch.isin(tokens, digits)
    count = is_digit.long().cumsum(1)
    # digits before the last token that is neither a digit nor padding, (B, m)
    before = torch.where(is_digit | (tokens < 0), 0, count).cummax(1).values
    return (count - before) * is_digit


def empty_digits_like(digits: Tensor, state_dict: Mapping[str, Any], name: str) -> Tensor:
    """Return a buffer for the ids of digits in a state dict, since loading needs equal shapes.

    Args:
        digits: (N,) int64 ids of digits, N = 0 if the encoding was built without a dictionary.
        state_dict: state dict that is to be loaded.
        name: name of the ids in it.

    Returns:
        ``digits``, or zeros (N',) int64 if the state dict has N' ids.
    """
    loaded = state_dict.get(name)
    if not isinstance(loaded, Tensor) or loaded.dim() != 1 or loaded.dtype != torch.int64:
        return digits
    return torch.zeros_like(loaded, device=digits.device)

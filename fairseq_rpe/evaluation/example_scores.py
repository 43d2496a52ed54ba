"""Scores of single examples as short text for records, so that two runs can be compared example by example."""

from collections.abc import Sequence

import numpy as np

# A score from 0 to 100 percent is stored as a whole number of hundredths of a percent in two bytes.
_HUNDREDTHS = 100


def pack_hits(is_right: np.ndarray) -> str:
    """Pack one bit for each example into hexadecimal text; the inverse of :func:`unpack_hits`.

    Args:
        is_right: (N,) bool, in the order of the examples.

    Returns:
        The bytes of :func:`numpy.packbits` in hexadecimal: the first example is the highest bit of the first byte, and
        zeros fill the last byte.

    >>> pack_hits(np.array([True, False, True]))
    'a0'
    """
    return np.packbits(is_right).tobytes().hex()


def unpack_hits(text: str, count: int) -> np.ndarray:
    """Return the bits (count,) bool that :func:`pack_hits` has packed.

    Args:
        text: packed bits in hexadecimal.
        count: number of examples.

    Raises:
        ValueError: ``text`` is not hexadecimal, or does not hold this number of bits.
    """
    packed = np.frombuffer(bytes.fromhex(text), np.uint8)
    if len(packed) != -(-count // 8):
        raise ValueError(f"{len(packed)} bytes do not hold {count} bits")
    return np.unpackbits(packed, count=count).astype(bool)


def pack_scores(scores: Sequence[float]) -> str:
    """Pack one score in percent for each question into hexadecimal text; the inverse of :func:`unpack_scores`.

    Args:
        scores: scores from 0 to 100 in the order of the questions.

    Returns:
        Four hexadecimal digits for each question: the score in hundredths of a percent, rounded.

    >>> pack_scores([100.0, 33.3333])
    '27100d05'
    """
    return np.rint(np.asarray(scores) * _HUNDREDTHS).astype(">u2").tobytes().hex()


def unpack_scores(text: str, count: int) -> np.ndarray:
    """Return the scores (count,) float64 in percent that :func:`pack_scores` has packed, to 0.005 percent.

    Args:
        text: packed scores in hexadecimal.
        count: number of questions.

    Raises:
        ValueError: ``text`` is not hexadecimal, or does not hold this number of scores.
    """
    packed = bytes.fromhex(text)
    if len(packed) != 2 * count:
        raise ValueError(f"{len(packed)} bytes do not hold {count} scores")
    return np.frombuffer(packed, ">u2").astype(float) / _HUNDREDTHS

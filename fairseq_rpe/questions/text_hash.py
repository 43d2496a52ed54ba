"""Draws that depend on nothing but a text, so that the same questions are chosen and made each time."""

from hashlib import blake2b

import numpy as np


def chance_of(text: str) -> int:
    """A number of 64 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def unit(chance: int, number: int) -> float:
    """One of several numbers from 0 to below 1 that a large number stands for."""
    return (chance >> 7 * number) % 4096 / 4096


def generator(text: str) -> np.random.Generator:
    """Any number of draws."""
    return np.random.default_rng(chance_of(text))

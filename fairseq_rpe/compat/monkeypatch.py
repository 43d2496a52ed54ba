"""A function of fairseq's in whose place one of ours is put."""

import functools
from collections.abc import Callable
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the decorated function, which is given the original before all arguments, in the place of ``owner.name``."""
    original = getattr(owner, name)

    def install(ours: Callable[..., Any]) -> Callable[..., Any]:
        setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: ours(original, *args, **kwargs)))
        return ours

    return install

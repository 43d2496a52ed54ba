"""A function of fairseq's in whose place one of ours is put."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Put the decorated function, which is given the original before all arguments, in the place of ``owner.name``."""
    original = getattr(owner, name)

    def install(ours: Callable[..., Any]) -> None:
        setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: ours(original, *args, **kwargs)))

    return install

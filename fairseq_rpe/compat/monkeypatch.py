"""Replaces functions of other modules."""

import functools
from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that replaces ``owner.name``; the decorated function gets the original as first argument.

    Args:
        owner: module or class.
        name: function or method of it.
    """
    original = getattr(owner, name)

    def install(replacement: Callable[..., Any]) -> Callable[..., Any]:
        setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: replacement(original, *args, **kwargs)))
        return replacement

    return install

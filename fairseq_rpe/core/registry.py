"""Names to classes. A name registered twice is an error; an unknown one suggests the nearest."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import UserError
from .spec import nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named classes that other packages extend through entry points.

    Args:
        kind: what is registered, in words ("encoding"); used in messages.
        group: entry-point group that is loaded before a name is looked up.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._table: dict[str, T] = {}
        self._entry_points_loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator: ``@registry.register("alibi")``."""

        def add(item: T) -> T:
            if name in self._table and self._table[name] is not item:
                raise UserError(f"{self.kind} '{name}' is registered twice: rename one of them")
            self._table[name] = item
            return item

        return add

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load_entry_points()
        return sorted(self._table)

    def get(self, name: str, hint: str = "") -> T:
        """The class called ``name``.

        Raises:
            UserError: there is none; the message lists the names, the nearest one and ``hint``.
        """
        if name not in self._table:
            self._load_entry_points()
        if name not in self._table:
            known = ", ".join(self.names())
            raise UserError(f"unknown {self.kind} '{name}'{nearest(name, self._table)}; known: {known}{hint}")
        return self._table[name]

    def _load_entry_points(self) -> None:
        if not self._entry_points_loaded:
            self._entry_points_loaded = True
            for point in entry_points(group=self.group):
                point.load()

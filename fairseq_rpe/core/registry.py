"""Names to classes. A name registered twice is an error; an unknown one suggests the nearest."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from fairseq_rpe.core.arguments import described
from fairseq_rpe.core.errors import UserError, shown
from fairseq_rpe.core.spec import Option, canonical, configure, nearest, options_of, parse

T = TypeVar("T")


def _place(item: Any) -> str:
    """A class, function or other object by its kind, its name and where it begins."""
    if not isinstance(item, type) and not inspect.isfunction(item):
        return described(item)
    kind = "the class" if isinstance(item, type) else "the function"
    try:
        place = f" ({shown(inspect.getsourcefile(item) or '')}:{inspect.getsourcelines(item)[1]})"
    except (OSError, TypeError):  # typed into an interpreter
        place = ""
    return f"{kind} {item.__name__}{place}"


@dataclass(frozen=True)
class Description:
    """One registered name as a user sees it."""

    name: str
    summary: str
    formula: str
    paper: str
    options: list[Option]


class Registry(Generic[T]):
    """A table of named classes that other packages extend through entry points.

    A class has a docstring, ``formula``, ``paper`` and a dataclass ``Config`` of its options.

    Args:
        kind: what is registered, in words ("encoding"); used in messages.
        group: entry-point group that is loaded before a name is looked up.
        hint: ends the message about an unknown name.
    """

    def __init__(self, kind: str, group: str, hint: str = "") -> None:
        self.kind, self.group, self.hint = kind, group, hint
        self._table: dict[str, T] = {}
        self._entry_points_loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator: ``@registry.register("alibi")``."""

        def add(item: T) -> T:
            if not isinstance(item, type) or not hasattr(item, "Config"):
                raise UserError(
                    f"@register('{shown(name)}') is on {_place(item)}, which is no {self.kind}: put it on a class that "
                    f"is derived from one of the base classes of {self.group}"
                )
            if name in self._table and self._table[name] is not item:
                raise UserError(f"{self.kind} '{name}' is registered twice: rename one of them")
            self._table[name] = item
            return item

        return add

    def names(self) -> list[str]:
        """All names, sorted; the first call loads what other packages register."""
        if not self._entry_points_loaded:
            self._entry_points_loaded = True
            for point in entry_points(group=self.group):
                point.load()
        return sorted(self._table)

    def describe(self) -> list[Description]:
        """What is registered, for lists and docs."""
        rows = []
        for name in self.names():
            cls: Any = self._table[name]
            summary = (inspect.getdoc(cls) or "").strip().split("\n")[0]
            rows.append(Description(name, summary, cls.formula, cls.paper, options_of(cls.Config)))
        return rows

    def resolve(self, spec: str) -> tuple[T, str, Any]:
        """The class, the name and the config that a spec string stands for."""
        name, given = parse(spec)
        cls: Any = self.get(name)
        return cls, name, configure(cls.Config, name, given)

    def normalise(self, spec: str) -> str:
        """The spec with defaults left out and values in one spelling; raises UserError where it is wrong."""
        _, name, config = self.resolve(spec)
        return canonical(name, config)

    def get(self, name: str) -> T:
        """The class called ``name``.

        Raises UserError: there is none; the message lists the names, the nearest one and the hint.
        """
        if name not in self._table and name not in self.names():
            known, near = ", ".join(self.names()), nearest(name, self._table)
            raise UserError(f"unknown {self.kind} '{shown(name)}'{near}; known: {known}{self.hint}")
        return self._table[name]

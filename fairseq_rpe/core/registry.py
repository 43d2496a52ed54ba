"""Registries of named classes, which other packages extend through entry points."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, Generic, TypeVar

from fairseq_rpe.core.arguments import describe_value
from fairseq_rpe.core.contract import is_shipped
from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.core.layer_pattern import is_pattern, normalise_pattern
from fairseq_rpe.core.looks import RegisteredLook, make_look
from fairseq_rpe.core.spec import Option, canonical, configure, did_you_mean, list_options, parse

T = TypeVar("T")
MAX_LISTED = 30  # names in a message about an unknown name


def _describe_item(item: Any) -> str:
    """Name a class or function with its file and line, and any other object by its type."""
    if not isinstance(item, type) and not inspect.isfunction(item):
        return describe_value(item)
    kind = "the class" if isinstance(item, type) else "the function"
    try:
        location = f" ({shorten_path(inspect.getsourcefile(item) or '')}:{inspect.getsourcelines(item)[1]})"
    except (OSError, TypeError):  # defined in an interactive session
        location = ""
    return f"{kind} {item.__name__}{location}"


@dataclass(frozen=True)
class Description:
    """A registered class as shown to a user.

    Attributes:
        name: Name of the class in specs.
        summary: First line of its docstring.
        formula: Mathematical formula in one line.
        paper: Authors, year and arXiv number of the paper.
        options: Options of its specs.
    """

    name: str
    summary: str
    formula: str
    paper: str
    options: list[Option]


class Registry(Generic[T]):
    """A table of named classes that other packages extend through entry points.

    A registered class has a docstring, ``formula``, ``paper`` and ``Config``, a dataclass of its options.

    Args:
        kind: Kind of the classes, such as "encoding", for messages.
        group: Entry-point group that is loaded before a name is looked up.
        hint: End of the message about an unknown name.
        configure: Function of a class's ``Config``, the name and the options as text that returns the config.
        has_patterns: Whether a model may have different ones in its layers, so that patterns of layers are valid.

    Attributes:
        num_foreign: Number of classes in all registries that do not belong to this package.
    """

    num_foreign: ClassVar[int] = 0

    def __init__(
        self,
        kind: str,
        group: str,
        hint: str = "",
        configure: Callable[[type, str, dict[str, str]], Any] = configure,
        has_patterns: bool = False,
    ) -> None:
        self.kind, self.group, self.hint, self._configure = kind, group, hint, configure
        self.has_patterns = has_patterns
        self._table: dict[str, T] = {}
        self._looks: dict[str, RegisteredLook | None] = {}
        self._entry_points_loaded = False

    def register(self, name: str, *, colour: str | None = None, marker: str | None = None) -> Callable[[T], T]:
        """Return a class decorator that registers a class: ``@registry.register("alibi")``.

        Args:
            name: Name of the class in specs.
            colour: Colour of its lines in figures, a key of ``core.looks.COLOURS``; None: chosen by the name.
            marker: Marker of its points in figures, one of ``core.looks.MARKERS``; given together with ``colour``.

        Returns:
            The decorator, which returns the class unchanged.

        Raises:
            UserError: The name is registered for another class, the decorated object is not such a class, or the
                colour or the marker is unknown.
        """
        look = make_look(name, colour, marker)

        def add(item: T) -> T:
            if not isinstance(item, type) or not hasattr(item, "Config"):
                raise UserError(
                    f"@register('{shorten_path(name)}') is on {_describe_item(item)}, which is no {self.kind}: put it "
                    f"on a class that is derived from one of the base classes of {self.group}"
                )
            if name in self._table and self._table[name] is not item:
                raise UserError(f"{self.kind} '{name}' is registered twice: rename one of them")
            Registry.num_foreign += name not in self._table and not is_shipped(item)
            self._table[name] = item
            self._looks[name] = look
            return item

        return add

    def names(self) -> list[str]:
        """Return all names, sorted; the first call loads the entry points."""
        if not self._entry_points_loaded:
            self._entry_points_loaded = True
            for point in entry_points(group=self.group):
                point.load()
        return sorted(self._table)

    def looks(self) -> dict[str, RegisteredLook]:
        """Return the looks in figures of the classes that are registered with one, by name."""
        return {name: look for name in self.names() if (look := self._looks.get(name)) is not None}

    def describe(self) -> list[Description]:
        """Return a description of every registered class, sorted by name."""
        descriptions = []
        for name in self.names():
            cls: Any = self._table[name]
            summary = (inspect.getdoc(cls) or "").strip().split("\n")[0]
            descriptions.append(Description(name, summary, cls.formula, cls.paper, list_options(cls.Config)))
        return descriptions

    def resolve(self, spec: str) -> tuple[T, str, Any]:
        """Parse a spec string.

        Returns:
            The class, its name and its config.

        Raises:
            UserError: The spec is malformed, its name is unknown, an option is wrong, or it is a pattern of layers.
        """
        if is_pattern(spec):
            raise UserError(f"'{spec}' is a pattern of layers, and one {self.kind} is expected here: name one spec")
        name, options = parse(spec)
        cls: Any = self.get(name)
        return cls, name, self._configure(cls.Config, name, options)

    def normalise(self, spec: str) -> str:
        """Return the canonical form of a spec: without defaults, with values in one spelling.

        A registry with ``has_patterns`` also takes a pattern of layers; see ``layer_pattern.normalise_pattern``.

        Raises:
            UserError: As :meth:`resolve`, or the pattern is malformed.
        """
        if self.has_patterns and is_pattern(spec):
            return normalise_pattern(spec, self.normalise)
        _, name, config = self.resolve(spec)
        return canonical(name, config)

    def get(self, name: str) -> T:
        """Return the class with this name.

        Raises:
            UserError: There is none; the message suggests the closest name and lists up to ``MAX_LISTED`` names.
        """
        if name not in self._table and name not in self.names():  # names() loads the entry points
            names, hint = self.names(), did_you_mean(name, self._table)
            listed = ", ".join(names[:MAX_LISTED])
            if len(names) > MAX_LISTED:
                listed += f" and {len(names) - MAX_LISTED} more"
            raise UserError(f"unknown {self.kind} '{shorten_path(name)}'{hint}; known: {listed}{self.hint}")
        return self._table[name]

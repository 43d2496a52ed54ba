"""Published experiments by name: which methods to compare, on what, at which size. ``fairseq_rpe/recipes/*.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
IDENTITY = "identity"
KINDS = ("text", "algorithms")
SCHEDULES = ("inverse_sqrt", "linear")
SHARES = ("auto", "model", "layer")
MEASURES = ("ppl", "log_ppl")


def _number(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _count(value: Any) -> bool:
    return _number(value, int) and value >= 1


def _counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_count, value)) and len(set(value)) == len(value)


# What a scale may fix, how it is told from nonsense, and what it is in words. Each is also an option of ``sweep``,
# which wins.
SCALE_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data": (lambda v: isinstance(v, str) and bool(v), "a folder"),
    "algorithms": (lambda v: _words(v) and bool(v), "a list of tasks"),
    "methods": (lambda v: _words(v) and bool(v), "a list of methods"),
    "arch": (lambda v: isinstance(v, str), "a name"),
    **dict.fromkeys(
        ("tokens", "updates", "batch_sentences", "update_freq", "warmup"), (_count, "a whole number above 0")
    ),
    "lr": (lambda v: _number(v, float) and v > 0, "a number above 0 with a decimal point"),
    "schedule": (lambda v: v in SCHEDULES, " or ".join(SCHEDULES)),
    "rpe_share": (lambda v: v in SHARES, ", ".join(SHARES)),
    "dropout": (lambda v: _number(v, float) and 0 <= v < 1, "a number with a decimal point from 0 to below 1"),
    "lengths": (_counts, "a list of different whole numbers above 0"),
    "seeds": (_counts, "a list of different whole numbers above 0"),
    "extra": (_words, "a list of flags"),
}

# What a recipe may say of the published runs; a page puts it beside what was done here.
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("data", "tokeniser", "model"), (lambda v: isinstance(v, str), "words")),
    "arch": SCALE_KEYS["arch"],
    "vocabulary": (_count, "a whole number above 0"),
    **{key: SCALE_KEYS[key] for key in ("tokens", "batch_sentences", "updates", "lr", "warmup", "schedule")},
}
_ABOUT = ("source", "url", "settings", "measure")


@dataclass(frozen=True)
class Method:
    """What a sweep compares: an encoding with its position transforms; ``name`` is its label everywhere."""

    name: str
    rpe: str
    positions_train: str = IDENTITY
    positions_eval: str | None = None


@dataclass(frozen=True)
class Recipe:
    """One published experiment.

    ``published`` has the source (and its ``url``), what is known of the published runs (``settings``, of ``SETTINGS``)
    and, per method, its values: by length for text (perplexities, or their natural logarithms where ``measure`` is
    ``log_ppl``), by task for algorithms.
    """

    name: str
    title: str
    paper: str
    kind: str
    methods: tuple[Method, ...]
    scales: dict[str, dict[str, Any]]
    published: dict[str, Any] = field(default_factory=dict)

    def scale(self, name: str) -> dict[str, Any]:
        """The settings of one scale."""
        if name not in self.scales:
            known = ", ".join(self.scales)
            raise UserError(f"recipe '{self.name}' has no scale '{name}'{nearest(name, self.scales)}; it has: {known}")
        return self.scales[name]

    def choose(self, names: list[str]) -> list[Method]:
        """The methods called ``names``, or all of them for ``all``."""
        table = {m.name: m for m in self.methods}
        if names == ["all"]:
            return list(table.values())
        for name in names:
            if name not in table:
                raise UserError(
                    f"recipe '{self.name}' has no method '{name}'{nearest(name, table)}; "
                    f"it has: {', '.join(table)}, or all"
                )
        if len(set(names)) < len(names):
            raise UserError("--methods names one twice: leave one out")
        return [table[name] for name in names]


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Recipe:
    """The recipe called ``name``, or the one in a TOML file of that path.

    One that says ``base = "NAME"`` (or a file beside it) is that recipe with its own keys in their place.

    Raises:
        UserError: there is none, or it does not say what a recipe must.
    """
    path, text = _read(name, ())
    return _recipe(path, text)


def values(published: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The published values by method, without what is said about them."""
    return {name: given for name, given in published.items() if name not in _ABOUT}


def decimals(published: dict[str, Any]) -> str:
    """How to print its values: with as many decimals as the most precise of them, at least two."""
    given = [str(value) for row in values(published).values() for value in row.values()]
    return f".{max([2, *(len(text.partition('.')[2]) for text in given)])}f"


def _read(name: str, above: tuple[Path, ...]) -> tuple[Path, dict[str, Any]]:
    """The text of a recipe with what it takes over from its base; ``above``: those that it is a base of."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise UserError(f"--recipe {name} does not exist")
        raise UserError(
            f"unknown recipe '{name}'{nearest(name, names())}; known: {', '.join(names())}, or a .toml file"
        )
    if path in above:
        raise UserError(f"recipe {path} is a base of itself: drop one of the base lines")
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not TOML: {error}") from None
    if "base" not in text:
        return path, text
    base = text.pop("base")
    if not isinstance(base, str):
        raise UserError(f"recipe {path}: base must be the name of a recipe, not {base!r}")
    if base.endswith(".toml"):
        base = str(path.parent / base)
    _, under = _read(base, (*above, path))
    # what was published belongs to one experiment; everything else is a change of single keys
    return path, {**_over(under, text), "published": text["published"]} if "published" in text else _over(under, text)


def _over(under: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """``under`` with the keys of ``text`` in their place, tables key by key."""
    both = dict(under)
    for key, value in text.items():
        there = both.get(key)
        both[key] = _over(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return both


def _recipe(path: Path, text: dict[str, Any]) -> Recipe:
    wanted = {"title": str, "paper": str, "kind": str, "methods": dict, "scales": dict, "published": dict}
    _check(path, "the recipe", text, wanted)
    for key in wanted:
        if key not in text and key != "published":
            raise UserError(f"recipe {path}: the recipe lacks {key}")
    if text["kind"] not in KINDS:
        raise UserError(f"recipe {path}: kind is {' or '.join(KINDS)}, not '{text['kind']}'")
    methods = []
    for name, given in text["methods"].items():
        _check(path, f"method '{name}'", given, dict.fromkeys(("rpe", "positions_train", "positions_eval"), str))
        if "rpe" not in given:
            raise UserError(f"recipe {path}: method '{name}' lacks rpe")
        if any(blank in name for blank in " \t,"):
            raise UserError(f"recipe {path}: method '{name}' has a blank or comma in its name")
        methods.append(Method(name, **given))
    for name, given in text["scales"].items():
        _check_keys(path, f"scale '{name}'", given, SCALE_KEYS)
    if not methods or not text["scales"]:
        raise UserError(f"recipe {path} needs at least one method and one scale")
    if "published" in text:
        _check_published(path, text["published"], [m.name for m in methods])
    return Recipe(path.stem, methods=tuple(methods), **{k: v for k, v in text.items() if k != "methods"})


def _check_published(path: Path, given: dict[str, Any], methods: list[str]) -> None:
    if not isinstance(given.get("source"), str):
        raise UserError(f"recipe {path}: published lacks source, the name of the table")
    if not isinstance(given.get("url", ""), str) or not given.get("url", "https://").startswith("https://"):
        raise UserError(f"recipe {path}: url of published must begin with https://, not {given['url']!r}")
    if given.get("measure", "ppl") not in MEASURES:
        raise UserError(f"recipe {path}: measure of published is {' or '.join(MEASURES)}, not {given['measure']!r}")
    _check_keys(path, "settings of published", given.get("settings", {}), SETTINGS)
    for name, found in values(given).items():
        if name not in methods:
            raise UserError(f"recipe {path}: published has an unknown method '{name}'{nearest(name, methods)}")
        if not isinstance(found, dict) or not all(_number(v, (int, float)) for v in found.values()):
            raise UserError(f"recipe {path}: published values of '{name}' must be a table of numbers, not {found!r}")


def _check_keys(path: Path, what: str, given: Any, known: dict[str, tuple[Callable[[Any], bool], str]]) -> None:
    """Refuse unknown keys and values that are not what ``known`` says."""
    _check(path, what, given, dict.fromkeys(known, object))
    for key, value in given.items():
        right, words = known[key]
        if not right(value):
            raise UserError(f"recipe {path}: {key} of {what} must be {words}, not {value!r}")


def _check(path: Path, what: str, given: Any, wanted: dict[str, type]) -> None:
    """Refuse unknown keys and values of another type."""
    if not isinstance(given, dict):
        raise UserError(f"recipe {path}: {what} is no table")
    for key, value in given.items():
        if key not in wanted:
            raise UserError(f"recipe {path}: {what} has an unknown key '{key}'{nearest(key, wanted)}")
        if not isinstance(value, wanted[key]):
            raise UserError(f"recipe {path}: {key} of {what} must be of type {wanted[key].__name__}, not {value!r}")

"""Published experiments by name: which methods to compare, on what, at which size. ``fairseq_rpe/recipes/*.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
IDENTITY = "identity"
KINDS = ("text", "algorithms")
# What a scale may fix; every one is also an option of ``sweep``, which wins.
SCALE_KEYS = {
    "data": str,
    "algorithms": list,
    "methods": list,
    "arch": str,
    "tokens": int,
    "updates": int,
    "batch_sentences": int,
    "update_freq": int,
    "lr": float,
    "warmup": int,
    "schedule": str,
    "dropout": float,
    "lengths": list,
    "seeds": list,
    "extra": list,
}


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

    ``published`` has the source and, per method, its values: by length for text, by task for algorithms.
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

    Raises:
        UserError: there is none, or it does not say what a recipe must.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise UserError(f"--recipe {name} does not exist")
        raise UserError(
            f"unknown recipe '{name}'{nearest(name, names())}; known: {', '.join(names())}, or a .toml file"
        )
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not TOML: {error}") from None
    return _recipe(path, text)


def _recipe(path: Path, text: dict[str, Any]) -> Recipe:
    wanted = {"title": str, "paper": str, "kind": str, "methods": dict, "scales": dict, "published": dict}
    _check(path, "the recipe", text, wanted, optional=("published",))
    if text["kind"] not in KINDS:
        raise UserError(f"recipe {path}: kind is {' or '.join(KINDS)}, not '{text['kind']}'")
    methods = []
    for name, given in text["methods"].items():
        _check(path, f"method '{name}'", given, dict.fromkeys(("rpe", "positions_train", "positions_eval"), str), None)
        if "rpe" not in given:
            raise UserError(f"recipe {path}: method '{name}' lacks rpe")
        if any(blank in name for blank in " \t,"):
            raise UserError(f"recipe {path}: method '{name}' has a blank or comma in its name")
        methods.append(Method(name, **given))
    for name, given in text["scales"].items():
        _check(path, f"scale '{name}'", given, SCALE_KEYS, None)
    if not methods or not text["scales"]:
        raise UserError(f"recipe {path} needs at least one method and one scale")
    return Recipe(path.stem, methods=tuple(methods), **{k: v for k, v in text.items() if k != "methods"})


def _check(path: Path, what: str, given: Any, wanted: dict[str, type], optional: tuple[str, ...] | None) -> None:
    """Refuse unknown keys and values of another type; ``optional`` None: every key is."""
    if not isinstance(given, dict):
        raise UserError(f"recipe {path}: {what} is no table")
    for key, value in given.items():
        if key not in wanted:
            raise UserError(f"recipe {path}: {what} has an unknown key '{key}'{nearest(key, wanted)}")
        if not isinstance(value, wanted[key]) or isinstance(value, bool):
            raise UserError(f"recipe {path}: {key} of {what} must be of type {wanted[key].__name__}, not {value!r}")
    for key in wanted if optional is not None else ():
        if key not in given and key not in optional:
            raise UserError(f"recipe {path}: {what} lacks {key}")

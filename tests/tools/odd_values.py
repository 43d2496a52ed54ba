"""Draws odd numbers, paths, specs, records and combinations of options from a seed, for ``odd_inputs.py``.

A :class:`Case` is a command line, and a change of the fixtures before it runs. The generator itself decides whether the
command must refuse it; it never calls the parsers of the package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odd_fixtures import BINARIES, COMMANDS, READERS, RECORDS, words

from fairseq_rpe import algorithms, encodings, positions
from fairseq_rpe.cli.main import build_parser

Change = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """A command line and a change of the fixtures.

    Attributes:
        words: the command line.
        about: what is odd, in words.
        invalid: whether the command must refuse it.
        valid: whether the command must not refuse it.
        change: edits the folder of fixtures before the command runs.
    """

    words: list[str]
    about: str
    invalid: bool = False
    valid: bool = False
    change: Change | None = field(default=None, compare=False)


# neither whole numbers nor other numbers
NOT_NUMBERS = ("", " ", "nan", "abc", "--", "0x10", "1e", "½", "∞", "None", "true", "1;2", "[1]", "\u200b")
NOT_WHOLE = (*NOT_NUMBERS, "-1", "1.5", "inf", "-inf", "1e3", "1e400", "٣", "-99999999999999999999", "9" * 5000)
NOT_FINITE = (*NOT_NUMBERS, "inf", "-inf", "1e400")
EXTREME = ("0", "-0.0", "1", "2", "7", "1e-320", "1e308", "-1e308", "99999999999999999999", "1000000000", "0.5", "-1")
PATHS = ("absent", "folder", "empty", "text", "binary", "cut.pt", "loop", "nothing", "pipe", "unreadable", "text/below")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "/proc/nothing")
WORDS = ("", " ", "x" * 300, "a\nb", "ä 🙂", "-", "--", "../..", "~", "%s", "{0}", "a:b", "a=b", ",", "\udcff", "$HOME")
# Options that decide how long a command works: with a large value it works, and takes long.
LONG = {"updates", "repeats", "iterations", "samples", "population", "blocks", "first_tokens", "position_samples"}
LONG |= {"quantised", "length", "lengths", "tokens", "batch", "batch_sentences", "update_freq", "width", "heads"}
LONG |= {"vocabulary", "beam", "train_length", "windows", "head_width", "max_tokens", "rows", "questions", "nproc"}
LONG |= {"nodes", "jobs", "encodings", "specs", "backends", "model", "arch", "workers", "stride", "shared"}
LONG |= {"answer_tokens"}
SPECS = {"rpe": encodings, "positions": positions, "algorithm": algorithms}
# names of options and arguments (``dest``): input files, and those that take a spec of a registry
_INPUTS = {"checkpoint", "checkpoints", "data", "finetune_from", "vocab_from", "rpe_module", "sweep", "sweeps"}
_SPEC_OF = {
    **dict.fromkeys(("rpe", "spec", "specs", "encodings", "shared"), "rpe"),
    **dict.fromkeys(("positions", "positions_train", "positions_eval"), "positions"),
    **dict.fromkeys(("algorithm", "algorithms"), "algorithm"),
}


class Generator:
    """Draws cases.

    Args:
        folder: the fixtures.
        pristine: a copy of the fixtures that no command changes.
        out: output folder of commands, which does not exist when a case starts.
        seed: seed of all cases.
        commands: commands to draw; empty: all.
    """

    def __init__(self, folder: Path, pristine: Path, out: Path, seed: int, commands: tuple[str, ...] = ()) -> None:
        self._folder, self._pristine, self._out, self._seed = folder, pristine, out, seed
        self._commands = self.names = commands or tuple(COMMANDS)
        [table] = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
        self._actions = {name: [a for a in p._actions if a.dest != "help"] for name, p in table.choices.items()}

    def case(self, number: int) -> Case:
        """Draw the case of this number; it depends on the seed and the number alone."""
        self._random = random.Random(f"{self._seed}:{number}")
        kinds = {
            self._odd_option: 6,
            self._odd_positional: 3,
            self._many_options: 4,
            self._odd_syntax: 2,
            self._odd_record: 5,
            self._odd_bytes: 2,
            self._odd_spec: 3,
            self._good: 1,
        }
        while True:
            [kind] = self._random.choices(list(kinds), list(kinds.values()))
            if (case := kind()) is not None:
                return case

    def _good(self) -> Case | None:
        return Case(self._line()[1], "nothing is odd", valid=True)

    def _line(self) -> tuple[str, list[str]]:
        """Draw a command and a valid command line of it."""
        command = self._random.choice(self._commands)
        return command, [command, *words(self._random.choice(COMMANDS[command]), self._folder, self._out)]

    def _options(self, command: str) -> list[argparse.Action]:
        return [a for a in self._actions[command] if a.option_strings]

    def _odd_option(self) -> Case | None:
        command, line = self._line()
        options = [a for a in self._options(command) if a.nargs != 0]
        if not options:
            return None
        action = self._random.choice(options)
        value, invalid = self._odd_value(action)
        return Case(_with(line, action, value), f"{action.option_strings[0]}={value[:60]!r}", invalid)

    def _odd_value(self, action: argparse.Action) -> tuple[str, bool]:
        """Draw an odd value of an option; also return whether it is certainly invalid."""
        draw, kind = self._random.choice, _kind(action)
        if action.choices is not None:
            return draw((*WORDS, *NOT_NUMBERS)), True
        if kind == "whole":
            return (draw(NOT_WHOLE), True) if self._random.random() < 0.6 else (draw(EXTREME), False)
        if kind == "whole list":
            bad = draw(NOT_WHOLE)
            # a blank after the comma is no further number, so the list is valid
            text, invalid = draw(((bad, True), ("4,,8", True), ("4,4", True), (f"4,{bad}", bool(bad.strip()))))
            return (text, invalid) if self._random.random() < 0.7 else (draw(EXTREME), False)
        if kind == "number":
            return (draw(NOT_NUMBERS), True) if self._random.random() < 0.5 else (draw((*EXTREME, *NOT_FINITE)), False)
        if kind == "path":
            return self._odd_path(action.dest)
        if (registry := _SPEC_OF.get(action.dest)) and self._random.random() < 0.8:
            return self._spec(registry)
        return draw((*WORDS, *NOT_NUMBERS)), False

    def _odd_path(self, dest: str) -> tuple[str, bool]:
        """Draw an odd path for an option; also return whether it is certainly invalid."""
        odd = self._folder / "odd"
        drawn = self._random.random()
        if drawn < 0.7:
            path = str(odd / self._random.choice(PATHS))
        elif drawn < 0.85:
            path = self._random.choice(DEVICES)
        else:
            path = self._random.choice(WORDS)
        return path, dest in _INPUTS

    def _odd_positional(self) -> Case | None:
        """Replace, drop or repeat a path of the fixtures."""
        command, line = self._line()
        indices = [i for i, word in enumerate(line) if i and word.startswith(f"{self._folder}/")]
        operation = self._random.choice(("replace", "replace", "replace", "drop", "twice", "another"))
        if not indices:
            return Case([*line, self._random.choice(WORDS)], "one word more")
        index = self._random.choice(indices)
        before, word, after = line[:index], line[index], line[index + 1 :]
        if operation == "replace":
            path, _ = self._odd_path("data")
            takes_any_text = command.startswith("prepare")
            return Case([*before, path, *after], f"{word} is {path!r}", not takes_any_text and bool(path.strip()))
        if operation == "drop":
            return Case([*before, *after], f"without {word}")
        if operation == "twice":
            return Case([*before, word, word, *after], f"{word} twice")
        other = self._random.choice(self._fixtures())
        return Case([*before, other, *after], f"{other} for {word}")

    def _many_options(self) -> Case | None:
        """Add several options with plausible values, many of which contradict each other."""
        command, line = self._line()
        options = self._options(command)
        about = []
        for action in self._random.sample(options, min(len(options), self._random.randint(2, 5))):
            if action.nargs == 0:
                line, text = _with(line, action, None), ""
            else:
                text = self._plausible(action)
                line = _with(line, action, text)
            about.append(f"{action.option_strings[-1]} {text}".strip())
        return Case(line, f"together: {' '.join(about)}")

    def _plausible(self, action: argparse.Action) -> str:
        draw, kind = self._random.choice, _kind(action)
        if action.choices is not None:
            return str(draw(list(action.choices)))
        if kind == "whole":
            return draw(("1", "2", "3", "4", "8", "16", "17", "64"))
        if kind == "whole list":
            return draw(("1", "2,4", "8,16", "7", "16,96"))
        if kind == "number":
            return draw(("0", "0.1", "0.5", "0.9", "1", "2"))
        if kind == "path":
            return str(draw((draw(self._fixtures()), self._out / "new", self._out / "new.csv", self._out / "new.png")))
        if registry := _SPEC_OF.get(action.dest):
            return str(draw(SPECS[registry].names()))
        return draw(("own", "test", "valid", "sdpa", "fp32", "f1", "alibi"))

    def _fixtures(self) -> list[str]:
        return [str(self._folder / name) for name in sorted(path.name for path in self._pristine.iterdir())]

    def _odd_syntax(self) -> Case | None:
        command, line = self._line()
        options = [o for a in self._options(command) for o in a.option_strings if o.startswith("--")]
        kind = self._random.choice(("unknown", "missing", "short", "after", "command", "nothing"))
        if kind == "unknown":
            return Case([command, "--no-such-option", *line[1:]], "an unknown option", True)
        if kind == "missing" and options:
            valued = [o for a in self._options(command) if a.nargs is None for o in a.option_strings]
            return Case([command, self._random.choice(valued)], "an option without its value", True) if valued else None
        if kind == "short" and options:
            option = self._random.choice(options)
            cut = option[: self._random.randint(3, max(3, len(option) - 1))]
            names = {o for a in self._options(command) for o in a.option_strings}
            before, after = _split_at_dashes(line)
            return Case([*before, cut, *after], "an option cut short", cut not in names)
        if kind == "after":
            invalid = command not in ("train", "sweep")
            flag = self._random.choice(("--no-such-flag", "x", "--arch"))
            return Case([*_split_at_dashes(line)[0], "--", flag], "after --", invalid)
        if kind == "command":
            return Case([self._random.choice((*WORDS, command[:-1], command.upper())), *line[1:]], "another command")
        return Case([command], "no arguments")

    def _odd_record(self) -> Case | None:
        """Change one field of a record: left out, of another type, twice, or extreme."""
        names = [n for n, readers in RECORDS.items() if set(readers) & set(self._commands)]
        if not names:
            return None
        name = self._random.choice(names)
        lines = [READERS[name]] if name in READERS and self._random.random() < 0.5 else []
        readers = [c for c in RECORDS[name] if c in self._commands]
        if not lines:
            command = self._random.choice(readers)
            fitting = [c for c in COMMANDS[command] if "{f}/" + name.partition("/")[0] in c]
            if not fitting:
                return None
            lines = [f"{command} {self._random.choice(fitting)}"]
        state = self._random.getrandbits(64)
        about = edit_record(self._pristine / name, random.Random(state), write=False)
        line = words(lines[0], self._folder, self._out)
        return Case(line, f"{name}: {about}", change=lambda f: edit(f / name, state))

    def _odd_bytes(self) -> Case | None:
        """Damage a file."""
        name = self._random.choice(BINARIES)
        path = "{f}/" + name.partition("/")[0]
        lines = [f"{command} {rest}" for command in self._commands for rest in COMMANDS[command] if path in rest]
        if name == "module.py":
            lines = [f"{line} --rpe-module {{f}}/module.py" for line in ("list", "bias own", "verdict own")]
            lines = [line for line in lines if line.split()[0] in self._commands]
        if not lines:
            return None
        state = self._random.getrandbits(64)
        line = words(self._random.choice(lines), self._folder, self._out)
        return Case(line, f"{name}: other bytes", change=lambda f: damage(f / name, random.Random(state)))

    def _odd_spec(self) -> Case | None:
        commands = [c for c in self._commands if any(_SPEC_OF.get(a.dest) for a in self._actions[c])]
        if not commands:
            return None
        command = self._random.choice(commands)
        line = [command, *words(self._random.choice(COMMANDS[command]), self._folder, self._out)]
        action = self._random.choice([a for a in self._actions[command] if _SPEC_OF.get(a.dest)])
        spec, invalid = self._spec(_SPEC_OF[action.dest])
        if action.option_strings:
            return Case(_with(line, action, spec), f"spec {spec[:80]!r}", invalid)
        return Case([command, spec], f"spec {spec[:80]!r}", invalid)

    def _spec(self, registry: str) -> tuple[str, bool]:
        """Draw a spec with a mistake or an extreme option; also return whether it is certainly invalid."""
        draw, package = self._random.choice, SPECS[registry]
        name = draw(package.names())
        [described] = [d for d in package.describe() if d.name == name]
        mistakes = (f"{name}x_", f"{name}:", f"{name}:=", f"{name}:no_such=1", f":{name}", f"{name}:a=1,a=1", "no_such")
        if not described.options or self._random.random() < 0.25:
            return draw(mistakes), True
        option = draw(described.options)
        value = draw((*(w for w in NOT_NUMBERS if w.strip() and "," not in w), *EXTREME, "-inf", name))
        spec = f"{name}:{option.key}={value}"
        if self._random.random() < 0.3:
            spec += f",{option.key}={value}" if self._random.random() < 0.5 else f",x={spec}"
            return spec, True
        whole = isinstance(option.default, int) and not isinstance(option.default, bool)
        return spec, whole and value in NOT_NUMBERS and value != "None"


def _kind(action: argparse.Action) -> str:
    """Return the kind of an option's value: whole, whole list, number, number list, path or word."""
    kind: Any = action.type
    if kind is Path:
        return "path"
    if kind is float:
        return "number"
    if kind is int:
        return "whole"
    name = getattr(getattr(kind, "func", None), "__name__", "")
    if name == "_list":
        return "number list" if kind.keywords["item"].func.__name__ == "_number" else "whole list"
    return {"_whole": "whole", "_number": "number"}.get(name, "word")


def _split_at_dashes(line: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before ``--``, and those from ``--`` on."""
    end = line.index("--") if "--" in line else len(line)
    return line[:end], line[end:]


def _with(line: list[str], action: argparse.Action, value: str | None) -> list[str]:
    """Return a line in which an option has this value instead of the one that it had; None: an option without value."""
    before, after = _split_at_dashes(line)
    others: list[str] = []
    index = 0
    while index < len(before):
        word = before[index]
        index += 1
        if word not in action.option_strings:
            others.append(word)
            continue
        # skip the values of the option: none, one, or all words up to the next option
        while index < len(before) and action.nargs != 0 and not before[index].startswith("--"):
            index += 1
            if action.nargs is None:
                break
    option = action.option_strings[0]
    return [*others, option if value is None else f"{option}={value}", *after]


def edit(path: Path, state: int) -> None:
    """Edit a record as :func:`edit_record` does, and correct the digests of a question dataset, so that it is read."""
    edit_record(path, random.Random(state))
    folder = path.parent
    if folder.name == "asked" and path.name != "answers.json":
        manifest = json.loads((folder / "answers.json").read_text())
        content = path.read_bytes()
        manifest["files"][path.name] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "answers.json").write_text(json.dumps(manifest))


def edit_record(path: Path, draw: random.Random, write: bool = True) -> str:
    """Change one value of a JSON, JSON-lines or TOML file, and return in words which.

    Args:
        path: the file.
        draw: generator that draws the change.
        write: whether to write the file.
    """
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = draw.randrange(len(lines))
    record = tomllib.loads(text) if path.suffix == ".toml" else json.loads(lines[number])
    about = _edit_value(record, draw)
    if path.suffix == ".toml":
        written = _toml(record)
    else:
        lines[number] = json.dumps(record)
        if path.suffix == ".jsonl" and draw.random() < 0.1:
            lines.insert(number, lines[number])
            about += ", the line twice"
        written = "\n".join(lines) + "\n"
    if write:
        path.write_text(written, errors="surrogatepass")
    return about


_OTHERS: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1 << 70, 0.5, -0.5, 1e308, math.inf, -math.inf, math.nan),
    *("", "x", "\ud800", "🙂" * 99, "x" * 100_000, [], [[]], [None], {}, {"": {}}, {"a": [1]}, [1, "x"], [-1]),
    [1 << 40],
)


def _edit_value(record: Any, draw: random.Random) -> str:
    """Change one value at any depth of a record, and return in words which."""
    path: list[str] = []
    value = record
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        path.append(str(key))
        inner = value[key]
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.75:
            value = inner
            continue
        break
    operation = draw.choice(("drop", "other", "other", "other", "list", "more", "far"))
    if operation == "drop":
        del value[key]
    elif operation == "other":
        value[key] = draw.choice(_OTHERS)
    elif operation == "list":
        value[key] = [inner, inner]
    elif operation == "far":
        value[key] = inner * 1000 + 7 if isinstance(inner, (int, float)) else [inner] * 3
    elif isinstance(value, dict):
        value["no_such_key"] = inner
    else:
        value.append(inner)
    new_value = f" = {str(value[key])[:40]!r}" if operation in ("other", "far") else ""
    return f"{operation} {'.'.join(path)}{new_value}"


def _toml(record: dict[str, Any]) -> str:
    """Return a table as TOML; a value that TOML lacks, such as null, is written as JSON, so the file is invalid."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        return json.dumps(item, ensure_ascii=False)

    return "".join(f"{json.dumps(k)} = {value(v)}\n" for k, v in record.items())


def damage(path: Path, draw: random.Random) -> None:
    """Cut a file short, overwrite some of its bytes, add some, or replace it by a folder, a pipe or a device."""
    if (kind := draw.choice(("bytes", "bytes", "folder", "pipe", "device"))) != "bytes":
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(draw.choice(DEVICES))
        return
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    kind = draw.choice(("cut", "bytes", "more", "nothing", "zeros", "line"))
    if kind == "cut":
        del content[start:]
    elif kind == "bytes":
        for _ in range(draw.choice((1, 8, 64))):
            content[draw.randrange(len(content))] = draw.randrange(256)
    elif kind == "more":
        content += draw.randbytes(100)
    elif kind == "nothing":
        content.clear()
    elif kind == "zeros":
        content[start:] = bytes(len(content) - start)
    else:
        content[start:start] = b"\n\xff" + b"word " * 50
    path.write_bytes(content)

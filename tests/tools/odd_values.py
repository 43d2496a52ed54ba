"""Odd numbers, paths, specs, records and combinations of options, drawn with a seed, for ``odd_inputs.py``.

A :class:`Case` is a command line and what it changes in the fixtures before. Whether it must be refused is what the
generator itself knows; the program is never asked.
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
    """A command line; ``about`` says what is odd.

    ``change`` edits the folder of fixtures before it runs. ``invalid``: it must be refused; ``valid``: it must not.
    """

    words: list[str]
    about: str
    invalid: bool = False
    valid: bool = False
    change: Change | None = field(default=None, compare=False)


# Neither whole numbers nor any others.
NOT_NUMBERS = ("", " ", "nan", "abc", "--", "0x10", "1e", "½", "∞", "None", "true", "1;2", "[1]", "\u200b")
NOT_WHOLE = (*NOT_NUMBERS, "-1", "1.5", "inf", "-inf", "1e3", "1e400", "٣", "-99999999999999999999", "9" * 5000)
NOT_FINITE = (*NOT_NUMBERS, "inf", "-inf", "1e400")
EXTREME = ("0", "-0.0", "1", "2", "7", "1e-320", "1e308", "-1e308", "99999999999999999999", "1000000000", "0.5", "-1")
PATHS = ("absent", "folder", "empty", "text", "binary", "cut.pt", "loop", "nothing", "pipe", "unreadable", "text/below")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "/proc/nothing")
WORDS = ("", " ", "x" * 300, "a\nb", "ä 🙂", "-", "--", "../..", "~", "%s", "{0}", "a:b", "a=b", ",", "\udcff", "$HOME")
# Options that decide how long a command works: a large value is obeyed, and takes that long.
LONG = {
    *(
        "updates",
        "repeats",
        "iterations",
        "samples",
        "population",
        "blocks",
        "first_tokens",
        "position_samples",
        "quantised",
    ),
    *("length", "lengths", "tokens", "batch", "batch_sentences", "update_freq", "width", "heads", "vocabulary", "beam"),
    *("train_length", "windows", "target", "head_width", "max_tokens", "rows", "questions", "nproc", "nodes", "jobs"),
    *("encodings", "specs", "backends", "items", "model", "arch", "workers", "stride", "shared", "answer_tokens"),
}
SPECS = {"rpe": encodings, "positions": positions, "algorithm": algorithms}
_INPUTS = {"checkpoint", "checkpoints", "data", "finetune_from", "vocab_from", "rpe_module", "sweep", "sweeps"}
_SPEC_OF = {
    **dict.fromkeys(("rpe", "spec", "specs", "encodings", "shared"), "rpe"),
    **dict.fromkeys(("positions", "positions_train", "positions_eval"), "positions"),
    **dict.fromkeys(("algorithm", "algorithms"), "algorithm"),
}


class Generator:
    """Draws cases over the fixtures in ``folder``.

    Args:
        pristine: the same files, which no command changes.
        out: a folder that no case finds there.
        commands: those to draw; none: all.
    """

    def __init__(self, folder: Path, pristine: Path, out: Path, seed: int, commands: tuple[str, ...] = ()) -> None:
        self._folder, self._pristine, self._out, self._seed = folder, pristine, out, seed
        self._commands = self.names = commands or tuple(COMMANDS)
        [table] = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
        self._actions = {name: [a for a in p._actions if a.dest != "help"] for name, p in table.choices.items()}

    def case(self, number: int) -> Case:
        """The case of this number: the same for a seed, whichever others are drawn."""
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
        """An odd value of an option and whether it is certainly invalid."""
        draw, kind = self._random.choice, _kind(action)
        if action.choices is not None:
            return draw((*WORDS, *NOT_NUMBERS)), True
        if kind == "whole":
            return (draw(NOT_WHOLE), True) if self._random.random() < 0.6 else (draw(EXTREME), False)
        if kind == "whole list":
            bad = draw(NOT_WHOLE)
            text, certain = draw(((bad, True), ("4,,8", True), ("4,4", True), (f"4,{bad}", bool(bad.strip()))))
            return (text, certain) if self._random.random() < 0.7 else (draw(EXTREME), False)
        if kind == "number":
            return (draw(NOT_NUMBERS), True) if self._random.random() < 0.5 else (draw((*EXTREME, *NOT_FINITE)), False)
        if kind == "path":
            return self._odd_path(action.dest)
        if (registry := _SPEC_OF.get(action.dest)) and self._random.random() < 0.8:
            return self._spec(registry)
        return draw((*WORDS, *NOT_NUMBERS)), False

    def _odd_path(self, dest: str) -> tuple[str, bool]:
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
        command, line = self._line()
        places = [i for i, word in enumerate(line) if i and word.startswith(f"{self._folder}/")]
        operation = self._random.choice(("replace", "replace", "replace", "drop", "twice", "another"))
        if not places:
            return Case([*line, self._random.choice(WORDS)], "one word more")
        place = self._random.choice(places)
        if operation == "replace":
            path, _ = self._odd_path("data")
            about, sources = f"{line[place]} is {path!r}", command.startswith("prepare")
            return Case([*line[:place], path, *line[place + 1 :]], about, not sources and bool(path.strip()))
        if operation == "drop":
            return Case([*line[:place], *line[place + 1 :]], f"without {line[place]}")
        if operation == "twice":
            return Case([*line[:place], line[place], *line[place:]], f"{line[place]} twice")
        other = self._random.choice(self._fixtures())
        return Case([*line[:place], other, *line[place + 1 :]], f"{other} for {line[place]}")

    def _many_options(self) -> Case | None:
        """Several options, each with a value that could be meant: many contradict each other."""
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
            known = {o for a in self._options(command) for o in a.option_strings}
            return Case([*_ours(line)[0], cut, *_ours(line)[1]], "an option cut short", cut not in known)
        if kind == "after":
            certain = command not in ("train", "sweep")
            flag = self._random.choice(("--no-such-flag", "x", "--arch"))
            return Case([*_ours(line)[0], "--", flag], "after --", certain)
        if kind == "command":
            return Case([self._random.choice((*WORDS, command[:-1], command.upper())), *line[1:]], "another command")
        return Case([command], "no arguments")

    def _odd_record(self) -> Case | None:
        """A record with a field left out, of another type, twice, or extreme."""
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
        said = edit_record(self._pristine / name, random.Random(state), write=False)
        line = words(lines[0], self._folder, self._out)
        return Case(line, f"{name}: {said}", change=lambda f: edit(f / name, state))

    def _odd_bytes(self) -> Case | None:
        """A file cut short, or with other bytes in it."""
        name = self._random.choice(BINARIES)
        lines = [f"{c} {one}" for c in self._commands for one in COMMANDS[c] if "{f}/" + name.partition("/")[0] in one]
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
        """A spec with a mistake, or with an option at an extreme."""
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
    """whole, whole list, number, path or word."""
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


def _ours(line: list[str]) -> tuple[list[str], list[str]]:
    """A line before and from a lone -- on."""
    cut = line.index("--") if "--" in line else len(line)
    return line[:cut], line[cut:]


def _with(line: list[str], action: argparse.Action, value: str | None) -> list[str]:
    """A line in which an option has this value, in place of the one that it had; ``None``: it takes none."""
    ours, rest = _ours(line)
    kept: list[str] = []
    position = 0
    while position < len(ours):
        word = ours[position]
        if word in action.option_strings:
            position += 1
            while position < len(ours) and action.nargs != 0 and not ours[position].startswith("--"):
                position += 1
                if action.nargs is None:
                    break
            continue
        kept.append(word)
        position += 1
    option = action.option_strings[0]
    return [*kept, option if value is None else f"{option}={value}", *rest]


def edit(path: Path, state: int) -> None:
    """Carry out what ``edit_record`` says, and correct the digests of a folder of questions, so that it is read."""
    edit_record(path, random.Random(state))
    folder = path.parent
    if folder.name == "asked" and path.name != "answers.json":
        manifest = json.loads((folder / "answers.json").read_text())
        content = path.read_bytes()
        manifest["files"][path.name] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "answers.json").write_text(json.dumps(manifest))


def edit_record(path: Path, draw: random.Random, write: bool = True) -> str:
    """Change one value of a JSON, JSON-lines or TOML file; says which."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = draw.randrange(len(lines))
    record = tomllib.loads(text) if path.suffix == ".toml" else json.loads(lines[number])
    said = _edit_value(record, draw)
    if path.suffix == ".toml":
        written = _toml(record)
    else:
        lines[number] = json.dumps(record)
        if path.suffix == ".jsonl" and draw.random() < 0.1:
            lines.insert(number, lines[number])
            said += ", the line twice"
        written = "\n".join(lines) + "\n"
    if write:
        path.write_text(written, errors="surrogatepass")
    return said


_OTHERS: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1 << 70, 0.5, -0.5, 1e308, math.inf, -math.inf, math.nan),
    *("", "x", "\ud800", "🙂" * 99, "x" * 100_000, [], [[]], [None], {}, {"": {}}, {"a": [1]}, [1, "x"], [-1]),
    [1 << 40],
)


def _edit_value(record: Any, draw: random.Random) -> str:
    where: list[str] = []
    value = record
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        where.append(str(key))
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
    said = f" = {str(value[key])[:40]!r}" if operation in ("other", "far") else ""
    return f"{operation} {'.'.join(where)}{said}"


def _toml(record: dict[str, Any]) -> str:
    """A table as TOML; what TOML lacks, such as null, is left as it is in JSON, which is then no TOML."""

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
    """Cut a file short, overwrite some of its bytes, add some, or put a folder, a pipe or a device in its place."""
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
    place = draw.randrange(len(content))
    kind = draw.choice(("cut", "bytes", "more", "nothing", "zeros", "line"))
    if kind == "cut":
        del content[place:]
    elif kind == "bytes":
        for _ in range(draw.choice((1, 8, 64))):
            content[draw.randrange(len(content))] = draw.randrange(256)
    elif kind == "more":
        content += draw.randbytes(100)
    elif kind == "nothing":
        content.clear()
    elif kind == "zeros":
        content[place:] = bytes(len(content) - place)
    else:
        content[place:place] = b"\n\xff" + b"word " * 50
    path.write_bytes(content)

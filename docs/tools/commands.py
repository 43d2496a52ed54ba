"""The commands and Python examples of README.md, CONTRIBUTING.md and docs/*.md: checked, or run in a clone.

    python docs/tools/commands.py                       # check: real parsers, files, extras; nothing is run
    python docs/tools/commands.py --run /tmp/clone      # run, in order, what is not marked; a table of seconds

A block is run unless an HTML comment on the line before it, which readers do not see, says otherwise:

    <!-- not run: a GPU -->              no command of the block
    <!-- not run 1,3: 18 minutes -->     not these, counted from 1
    <!-- small: quickstart,kerple -->    makes these of ``SMALL`` before, small stand-ins for what takes longer
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.cli.main import COMMANDS, _formulas, build_parser
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import normalise
from fairseq_rpe.sweeps import recipes

ROOT = Path(__file__).resolve().parents[2]
FAIRSEQ = ("fairseq-train", "fairseq-eval-lm")
PROGRAMS = ("bash", "python", "pip", "git", "fairseq-rpe", ".venv/bin/tensorboard", *FAIRSEQ)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S+")
MARK = re.compile(r"<!-- (not run|small)( [\d,]+)?: (.*?) -->")
SPAN = re.compile(r"`([^`\n]+)`")
# what a call of a script that has options of its own becomes
OWN = {
    "quickstart.sh": (
        "sweep",
        "data-bin/stdlib",
        "--encodings",
        "alibi",
        "--lengths",
        "64",
        "--out",
        "runs/quickstart",
    ),
    "algorithmic.sh": ("sweep", "--recipe", "warping-algorithmic"),
}
SMALL = {
    "texts": 'mkdir -p my-texts && cp "$(dirname "$(python -c \'import os; print(os.__file__)\')")"/*.py my-texts',
    "type1": "scripts/train.sh data-bin/stdlib --rpe type1 --updates 20 --save-dir runs/type1",
    "kerple": "scripts/train.sh data-bin/stdlib --rpe kerple_log --updates 20 --save-dir runs/kerple",
    "quickstart": "scripts/sweep.sh data-bin/stdlib --encodings 'sinusoidal alibi' --lengths 64,128 --updates 20"
    " --out runs/quickstart",
    "wikitext103": "scripts/sweep.sh --recipe extrapolation-wikitext103 --methods 'alibi type1 type2 fire' --updates 20"
    " --lengths 64,128",
    "warping": "scripts/sweep.sh --recipe warping-lm --methods rope --updates 20 --lengths 64,128",
}
LIMIT = 600.0  # seconds for a command


@dataclass(frozen=True)
class Example:
    """A shell command of one line, or a Python example, and whether it is run.

    Attributes:
        page: path below the repository.
        line: where it begins, from 1.
        reason: why it is not run; empty: it is.
        small: what of ``SMALL`` is made before it.
        settings: assignments of its block that stand before it.
    """

    page: str
    line: int
    text: str
    python: bool = False
    reason: str = ""
    small: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def is_command(text: str) -> bool:
    words = [word for word in text.split() if not ASSIGNMENT.fullmatch(word)]
    return bool(words and words[0] in PROGRAMS) or bool(not words and ASSIGNMENT.match(text))


def blocks(text: str) -> Iterator[tuple[int, str, list[str], str]]:
    """Line, language, lines and marks of every block of code; the language of an indented one is ``bash``."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        before = next((line for line in reversed(lines[:at]) if line.strip()), "")
        start = at + 1
        if lines[at].startswith("```"):
            end = lines.index("```", start)
            yield start + 1, lines[at][3:], lines[start:end], before
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip() or "-->" in lines[at - 1]):
            end = next((n for n in range(at, len(lines)) if not lines[n].startswith("    ")), len(lines))
            yield start, "bash", [line[4:] for line in lines[at:end]], before
            at = end
        else:
            at += 1


def examples(path: Path) -> Iterator[Example]:
    page = str(path.relative_to(ROOT))
    for start, language, lines, before in blocks(path.read_text(encoding="utf-8")):
        marks = [(found[1], found[2] or "", found[3]) for found in MARK.finditer(before)]
        small = tuple(name for kind, _, text in marks if kind == "small" for name in text.split(","))
        reasons = [(numbers, text) for kind, numbers, text in marks if kind == "not run"]
        if language == "python":
            yield Example(page, start, "\n".join(lines), True, reasons[0][1] if reasons else "", small)
        elif language == "bash" and is_command(lines[0]):
            settings: list[str] = []
            for number, (line, text) in enumerate(_joined(start, lines), 1):
                if all(ASSIGNMENT.fullmatch(word) for word in shlex.split(text, comments=True)):
                    settings.append(text)
                    continue
                left = [why for numbers, why in reasons if not numbers or str(number) in numbers.strip().split(",")]
                yield Example(page, line, text, False, left[0] if left else "", small, tuple(settings))


def _joined(start: int, lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Commands with the line on which they begin; a backslash joins lines."""
    text, begin = "", start
    for number, line in enumerate(lines, start):
        begin = begin if text else number
        text += line.strip().removesuffix("\\")
        if not line.endswith("\\"):
            yield begin, text
            text = ""


def check(example: Example) -> str:
    """What is wrong with it, in words; empty: nothing."""
    if example.python:
        try:
            ast.parse(example.text)
        except SyntaxError as error:
            return str(error)
        return ""
    words = [word for word in shlex.split(example.text, comments=True) if not ASSIGNMENT.fullmatch(word)]
    try:
        return _wrong(words, whole=True) if words else ""
    except (UserError, SystemExit) as error:
        return str(error)


def check_span(text: str) -> str:
    """The same of a command within a sentence, which may leave out arguments."""
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    if words and words[0] == "time":
        words = words[1:]
    if words and words[0].startswith("scripts/"):
        words = ["bash", *words]
    if not words or words[0] not in ("bash", "python", "fairseq-rpe") or "COMMAND" in text or "NAME" in words[-1]:
        return ""
    try:
        return _wrong(words, whole=False)
    except (UserError, SystemExit) as error:
        return str(error)


def _wrong(words: list[str], *, whole: bool) -> str:
    program, rest = words[0], words[1:]
    if program == "fairseq-rpe":
        return _of_command(rest, whole=whole)
    if program == "bash":
        return _of_script(rest, whole=whole)
    if program == "python" and rest and not rest[0].startswith("-"):
        path = ROOT / rest[0]
        flags = {one.split("=")[0] for one in rest[1:] if one.startswith("--")}
        if not path.is_file():
            return "" if rest[0] == "my_encoding.py" else f"no file {rest[0]}"
        unknown = flags - {*re.findall(r'"(--[a-z-]+)"', path.read_text(encoding="utf-8"))}
        return f"{rest[0]} has no {', '.join(sorted(unknown))}" if unknown else ""
    if program == "pip":
        return _of_pip(rest)
    return _of_fairseq(program, rest) if program in FAIRSEQ else ""


def _of_command(rest: list[str], *, whole: bool) -> str:
    ours = rest[: rest.index("--")] if "--" in rest else rest
    if not ours or ours[0] not in COMMANDS:
        return f"no command {ours[:1]}"
    parser = build_parser(ours[0])
    if not whole:
        [commands] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
        known = set(commands[ours[0]]._option_string_actions)
        unknown = {one.split("=")[0] for one in ours if one.startswith("--")} - known
        return f"{ours[0]} has no {', '.join(sorted(unknown))}" if unknown else ""
    found = parser.parse_args(_formulas(ours))
    if getattr(found, "recipe", None):
        recipes.load(found.recipe)
    if isinstance(rpe := getattr(found, "rpe", None), str) and not found.rpe_module and rpe != "SPEC":
        normalise(rpe)
    for spec in getattr(found, "encodings", None) or ():
        normalise(spec)
    return ""


def _of_script(rest: list[str], *, whole: bool) -> str:
    path = ROOT / rest[0] if rest else ROOT
    if not path.is_file():
        return f"no script {rest[:1]}"
    text = path.read_text(encoding="utf-8")
    if path.name in OWN:
        return _of_command([*OWN[path.name], *rest[1:]], whole=whole)
    head = " ".join(line.removeprefix("# ") for line in text.split("set -euo")[0].splitlines()[1:])
    if goes := re.search(r"; all (?:other )?(?:arguments )?go(?:es)? to fairseq-rpe ([\w -]+)", head):
        return _of_command([*goes[1].split(), *rest[1:]], whole=whole)
    if goes := re.search(r"; all arguments go to (\S+\.py)", head):
        return _wrong(["python", goes[1], *rest[1:]], whole=whole)
    unknown = [one for one in rest[1:] if one.startswith("--") and one not in text]
    return f"{rest[0]} has no {', '.join(unknown)}" if unknown else ""


def _of_pip(rest: list[str]) -> str:
    extras = set(re.findall(r'^        "([a-z]+)": ', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE))
    for word in rest:
        if found := re.fullmatch(r"\.\[([a-z,]+)\]", word):
            if unknown := set(found[1].split(",")) - extras:
                return f"setup.py has no extra {', '.join(sorted(unknown))}"
        if word.startswith("requirements/") and not (ROOT / word).is_file():
            return f"no file {word}"
    return ""


def _of_fairseq(program: str, rest: list[str]) -> str:
    """fairseq's own parser with the flags of this plugin; nothing is opened."""
    from fairseq import options

    import fairseq_rpe.models  # noqa: F401  (registers)

    made = options.get_training_parser() if program == "fairseq-train" else options.get_eval_lm_parser()
    where = rest.index("--user-dir")
    options.parse_args_and_arch(made, rest[:where] + rest[where + 2 :])
    return ""


def faults() -> Iterator[str]:
    """``page:line: command: what is wrong`` of every command, example and command within a sentence."""
    for path in pages():
        for example in examples(path):
            if wrong := check(example):
                yield f"{example.page}:{example.line}: {example.text.splitlines()[0]}: {wrong}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for span in SPAN.findall("" if line.startswith("    ") else line):
                if wrong := check_span(span):
                    yield f"{path.relative_to(ROOT)}:{number}: {span}: {wrong}"


def run(folder: Path, only: list[str]) -> int:
    """Run what is not marked in a clone at ``folder``; the number of failures."""
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    for script in ("setup", "prepare_stdlib"):
        subprocess.run(["bash", f"scripts/{script}.sh"], cwd=folder, check=True)
    chosen = [one for path in pages() for one in examples(path) if not only or Path(one.page).name in only]
    failed, left = 0, 0
    print("| page | command | seconds | status |\n|---|---|---:|---|", flush=True)
    for number, example in enumerate(chosen, 1):
        shown = example.text.splitlines()[0].replace("|", "\\|")
        print(f"{number} of {len(chosen)}: {example.page}: {shown[:90]}", file=sys.stderr, flush=True)
        status, seconds = f"not run: {example.reason}", 0.0
        if not example.reason:
            seconds, status = _carry_out(example, folder)
            failed += status != "ok"
        left += bool(example.reason)
        print(f"| {example.page}:{example.line} | `{shown}` | {seconds:.1f} | {status} |", flush=True)
    print(f"\n{len(chosen)} commands: {len(chosen) - failed - left} ok, {failed} failed, {left} not run")
    return failed


def _carry_out(example: Example, folder: Path) -> tuple[float, str]:
    """Seconds and ``ok`` or what went wrong; what it printed is shown only then."""
    env = {**os.environ, "PATH": f"{folder / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    command = "\n".join(("set -euo pipefail", *example.settings, example.text))
    if example.python:
        named = re.match(r"# (\w+\.py)\n", example.text)
        name = named[1] if named else "example.py"
        (folder / name).write_text(example.text + "\n", encoding="utf-8")
        command = f"python {name}"
    for name in example.small:
        subprocess.run(["bash", "-c", SMALL[name]], cwd=folder, env=env, check=True, capture_output=True, timeout=LIMIT)
    start = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return LIMIT, "failed: takes too long"
    if done.returncode:
        print((done.stdout + done.stderr)[-2000:], file=sys.stderr, flush=True)
    return time.monotonic() - start, f"failed: exit status {done.returncode}" if done.returncode else "ok"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check or run the commands of README.md, CONTRIBUTING.md and docs/*.md."
    )
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="run them in this clone of the last commit, made if missing"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PAGE", help="of these pages, e.g. theory.md")
    args = parser.parse_args()
    found = list(faults())
    for line in found:
        print(line, file=sys.stderr)
    if args.run and not found:
        return int(run(args.run.resolve(), args.only) > 0)
    print(f"{sum(1 for path in pages() for _ in examples(path))} commands and examples, {len(found)} faulty")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

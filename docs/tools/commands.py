"""Checks the commands and Python examples of README.md, CONTRIBUTING.md and docs/*.md, or runs them in a clone.

    python docs/tools/commands.py                       # check parsers, files and extras; run nothing
    python docs/tools/commands.py --run /tmp/clone      # run unmarked examples in order; print their seconds

HTML comments on the line before a block exclude commands or prepare their inputs:

    <!-- not run: a GPU -->              run no command of the block
    <!-- not run 1,3: 18 minutes -->     do not run these, counted from 1
    <!-- small: quickstart,kerple -->    first run these commands of ``SMALL``, small versions of long ones
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

from fairseq_rpe.cli.main import COMMANDS, build_parser, join_formula
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import normalise
from fairseq_rpe.sweeps import recipes

ROOT = Path(__file__).resolve().parents[2]
FAIRSEQ = ("fairseq-train", "fairseq-eval-lm")
PROGRAMS = ("bash", "python", "pip", "git", "fairseq-rpe", ".venv/bin/tensorboard", *FAIRSEQ)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S+")
MARK = re.compile(r"<!-- (not run|small)( [\d,]+)?: (.*?) -->")
SPAN = re.compile(r"`([^`\n]+)`")
# commands of the scripts with options of their own
SCRIPT_COMMANDS = {
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
    "type1": "scripts/train.sh data-bin/stdlib --rpe type1 --updates 20 --out runs/type1",
    "kerple": "scripts/train.sh data-bin/stdlib --rpe kerple_log --updates 20 --out runs/kerple",
    "quickstart": "scripts/sweep.sh data-bin/stdlib --encodings 'sinusoidal alibi' --lengths 64,128 --updates 20"
    " --out runs/quickstart",
    "wikitext103": "scripts/sweep.sh --recipe extrapolation-wikitext103 --methods 'alibi type1 type2 fire' --updates 20"
    " --lengths 64,128",
    "warping": "scripts/sweep.sh --recipe warping-lm --methods rope --updates 20 --lengths 64,128",
}
TIMEOUT = 600.0  # seconds per command


@dataclass(frozen=True)
class Example:
    """A shell command or a Python example.

    Attributes:
        page: path in the repository.
        line: first line, from 1.
        text: the command or the source.
        python: whether it is Python.
        reason: why it is not run; empty if it is run.
        small: commands of ``SMALL`` that are run before it.
        settings: assignments of variables before it in its block.
    """

    page: str
    line: int
    text: str
    python: bool = False
    reason: str = ""
    small: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def pages() -> list[Path]:
    """Return the pages with commands."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def is_command(text: str) -> bool:
    """Return whether a line starts with a program or assigns variables."""
    words = [word for word in text.split() if not ASSIGNMENT.fullmatch(word)]
    return bool(words and words[0] in PROGRAMS) or bool(not words and ASSIGNMENT.match(text))


def blocks(text: str) -> Iterator[tuple[int, str, list[str], str]]:
    """Yield every block of a page: fenced, or indented after an empty line or a comment.

    Yields:
        Number of the first line, from 1; language (``bash`` for an indented block); lines; and the last line before the
        block that is not empty.
    """
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        line, previous = lines[index], lines[index - 1] if index else ""
        before = next((other for other in reversed(lines[:index]) if other.strip()), "")
        if line.startswith("```"):
            end = lines.index("```", index + 1)
            yield index + 2, line[3:], lines[index + 1 : end], before
            index = end + 1
        elif line.startswith("    ") and (not previous.strip() or "-->" in previous):
            end = next((n for n in range(index, len(lines)) if not lines[n].startswith("    ")), len(lines))
            yield index + 1, "bash", [other[4:] for other in lines[index:end]], before
            index = end
        else:
            index += 1


def examples(path: Path) -> Iterator[Example]:
    """Yield the commands and Python examples of a page."""
    page = str(path.relative_to(ROOT))
    for start, language, lines, before in blocks(path.read_text(encoding="utf-8")):
        marks = [(match[1], match[2] or "", match[3]) for match in MARK.finditer(before)]
        small = tuple(name for kind, _, text in marks if kind == "small" for name in text.split(","))
        reasons = [(numbers, text) for kind, numbers, text in marks if kind == "not run"]
        if language == "python":
            yield Example(page, start, "\n".join(lines), True, reasons[0][1] if reasons else "", small)
        elif language == "bash" and is_command(lines[0]):
            settings: list[str] = []
            for number, (line, text) in enumerate(_join_continued(start, lines), 1):
                if all(ASSIGNMENT.fullmatch(word) for word in shlex.split(text, comments=True)):
                    settings.append(text)
                    continue
                # a mark without numbers excludes all commands of the block
                excluded = [why for numbers, why in reasons if not numbers or str(number) in numbers.strip().split(",")]
                yield Example(page, line, text, False, excluded[0] if excluded else "", small, tuple(settings))


def _join_continued(start: int, lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line, and the text, of each command; a backslash at its end continues a line."""
    text, first = "", start
    for number, line in enumerate(lines, start):
        first = first if text else number
        text += line.strip().removesuffix("\\")
        if not line.endswith("\\"):
            yield first, text
            text = ""


def check(example: Example) -> str:
    """Return what is wrong with an example; empty if nothing is."""
    if example.python:
        try:
            ast.parse(example.text)
        except SyntaxError as error:
            return str(error)
        return ""
    words = [word for word in shlex.split(example.text, comments=True) if not ASSIGNMENT.fullmatch(word)]
    try:
        return _fault(words, complete=True) if words else ""
    except (UserError, SystemExit) as error:
        return str(error)


def check_span(text: str) -> str:
    """Return what is wrong with a command within a sentence, which may be incomplete."""
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
        return _fault(words, complete=False)
    except (UserError, SystemExit) as error:
        return str(error)


def _fault(words: list[str], *, complete: bool) -> str:
    """Return what is wrong with a command; ``complete``: whether required arguments must be there."""
    program, rest = words[0], words[1:]
    if program == "fairseq-rpe":
        return _command_fault(rest, complete=complete)
    if program == "bash":
        return _script_fault(rest, complete=complete)
    if program == "python" and rest and not rest[0].startswith("-"):
        path = ROOT / rest[0]
        flags = {word.split("=")[0] for word in rest[1:] if word.startswith("--")}
        if not path.is_file():
            return "" if rest[0] == "my_encoding.py" else f"no file {rest[0]}"
        unknown = flags - {*re.findall(r'"(--[a-z-]+)"', path.read_text(encoding="utf-8"))}
        return f"{rest[0]} has no {', '.join(sorted(unknown))}" if unknown else ""
    if program == "pip":
        return _pip_fault(rest)
    return _fairseq_fault(program, rest) if program in FAIRSEQ else ""


def _command_fault(rest: list[str], *, complete: bool) -> str:
    ours = rest[: rest.index("--")] if "--" in rest else rest
    if not ours or ours[0] not in COMMANDS:
        return f"no command {ours[:1]}"
    if COMMANDS[ours[0]].forwards_words:  # another program parses the words
        return ""
    parser = build_parser(ours[0])
    if not complete:
        [commands] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
        options = set(commands[ours[0]]._option_string_actions)
        unknown = {word.split("=")[0] for word in ours if word.startswith("--")} - options
        return f"{ours[0]} has no {', '.join(sorted(unknown))}" if unknown else ""
    args = parser.parse_args(join_formula(ours))
    if getattr(args, "recipe", None):
        recipes.load(args.recipe)
    if isinstance(rpe := getattr(args, "rpe", None), str) and not args.rpe_module and rpe != "SPEC":
        normalise(rpe)
    for spec in getattr(args, "encodings", None) or ():
        normalise(spec)
    return ""


def _script_fault(rest: list[str], *, complete: bool) -> str:
    path = ROOT / rest[0] if rest else ROOT
    if not path.is_file():
        return f"no script {rest[:1]}"
    text = path.read_text(encoding="utf-8")
    if path.name in SCRIPT_COMMANDS:
        return _command_fault([*SCRIPT_COMMANDS[path.name], *rest[1:]], complete=complete)
    head = " ".join(line.removeprefix("# ") for line in text.split("set -euo")[0].splitlines()[1:])
    # the first lines of a script say which program gets its arguments
    if command := re.search(r"; all (?:other )?(?:arguments )?go(?:es)? to fairseq-rpe ([\w -]+)", head):
        return _command_fault([*command[1].split(), *rest[1:]], complete=complete)
    if program := re.search(r"; all arguments go to (\S+\.py)", head):
        return _fault(["python", program[1], *rest[1:]], complete=complete)
    unknown = [word for word in rest[1:] if word.startswith("--") and word not in text]
    return f"{rest[0]} has no {', '.join(unknown)}" if unknown else ""


def _pip_fault(rest: list[str]) -> str:
    extras = set(re.findall(r'^        "([a-z]+)": ', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE))
    for word in rest:
        if match := re.fullmatch(r"\.\[([a-z,]+)\]", word):
            if unknown := set(match[1].split(",")) - extras:
                return f"setup.py has no extra {', '.join(sorted(unknown))}"
        if word.startswith("requirements/") and not (ROOT / word).is_file():
            return f"no file {word}"
    return ""


def _fairseq_fault(program: str, rest: list[str]) -> str:
    """Parse with fairseq's parser and the flags of this plugin, without opening files."""
    from fairseq import options

    import fairseq_rpe.models  # noqa: F401  (registers)

    parser = options.get_training_parser() if program == "fairseq-train" else options.get_eval_lm_parser()
    index = rest.index("--user-dir")
    options.parse_args_and_arch(parser, rest[:index] + rest[index + 2 :])
    return ""


def faults() -> Iterator[str]:
    """Yield ``page:line: command: fault`` of every faulty command, example and command within a sentence."""
    for path in pages():
        for example in examples(path):
            if fault := check(example):
                yield f"{example.page}:{example.line}: {example.text.splitlines()[0]}: {fault}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for span in SPAN.findall("" if line.startswith("    ") else line):
                if fault := check_span(span):
                    yield f"{path.relative_to(ROOT)}:{number}: {span}: {fault}"


def run(folder: Path, only: list[str]) -> int:
    """Run the examples that are not excluded in a clone at ``folder``; return the number of failures."""
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    for script in ("setup", "prepare_stdlib"):
        subprocess.run(["bash", f"scripts/{script}.sh"], cwd=folder, check=True)
    selected = [e for path in pages() for e in examples(path) if not only or Path(e.page).name in only]
    failed, skipped = 0, 0
    print("| page | command | seconds | status |\n|---|---|---:|---|", flush=True)
    for number, example in enumerate(selected, 1):
        shown = example.text.splitlines()[0].replace("|", "\\|")
        print(f"{number} of {len(selected)}: {example.page}: {shown[:90]}", file=sys.stderr, flush=True)
        status, seconds = f"not run: {example.reason}", 0.0
        if not example.reason:
            seconds, status = _run_example(example, folder)
            failed += status != "ok"
        skipped += bool(example.reason)
        print(f"| {example.page}:{example.line} | `{shown}` | {seconds:.1f} | {status} |", flush=True)
    print(f"\n{len(selected)} commands: {len(selected) - failed - skipped} ok, {failed} failed, {skipped} not run")
    return failed


def _run_example(example: Example, folder: Path) -> tuple[float, str]:
    """Return seconds and ``ok`` or the failure; print the output of a failed command."""
    env = {**os.environ, "PATH": f"{folder / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    command = "\n".join(("set -euo pipefail", *example.settings, example.text))
    if example.python:
        title = re.match(r"# (\w+\.py)\n", example.text)
        name = title[1] if title else "example.py"
        (folder / name).write_text(example.text + "\n", encoding="utf-8")
        command = f"python {name}"
    for name in example.small:
        subprocess.run(
            ["bash", "-c", SMALL[name]], cwd=folder, env=env, check=True, capture_output=True, timeout=TIMEOUT
        )
    start = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return TIMEOUT, "failed: takes too long"
    if done.returncode:
        print((done.stdout + done.stderr)[-2000:], file=sys.stderr, flush=True)
    return time.monotonic() - start, f"failed: exit status {done.returncode}" if done.returncode else "ok"


def main() -> int:
    """Check the commands, and run them if asked to."""
    parser = argparse.ArgumentParser(
        description="Check or run the commands of README.md, CONTRIBUTING.md and docs/*.md."
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="run the examples in this clone of the last commit, which is made if missing",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PAGE", help="only examples of these pages, e.g. theory.md"
    )
    args = parser.parse_args()
    lines = list(faults())
    for line in lines:
        print(line, file=sys.stderr)
    if args.run and not lines:
        return int(run(args.run.resolve(), args.only) > 0)
    print(f"{sum(1 for path in pages() for _ in examples(path))} commands and examples, {len(lines)} faulty")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

"""Entry point of ``fairseq-rpe``: one table of commands, one place where errors become one line."""

import argparse
import contextlib
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

from fairseq_rpe import __version__
from fairseq_rpe.cli.options import make_ready
from fairseq_rpe.core.errors import DEBUG, UserError, shown, told
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.runs import processes
from fairseq_rpe.utils.child_processes import safe_path
from fairseq_rpe.utils.safe_streams import displayed

# name: module of this room, what the command does. ``add`` of the module adds its options and ``run`` carries it out;
# in a module of several commands both names end with what follows the colon.
COMMANDS = {
    "prepare-stdlib": ("prepare:_stdlib", "make a code corpus from the Python standard library"),
    "prepare": ("prepare", "make a corpus from any text: folders, .txt, .jsonl, .parquet, hub data sets"),
    "prepare-known": (
        "prepare:_known",
        "make a corpus from WikiText-103, PG-19, code, Wikipedia, C4, arXiv or OpenWebText2",
    ),
    "prepare-answers": ("prepare_questions", "make a folder of questions: SCROLLS, GLUE, SuperGLUE or your own"),
    "prepare-gaps": (
        "prepare_questions:_gaps",
        "make questions of any text: which name, seen long before, fills the gap",
    ),
    "train": ("train", "train one language model"),
    "extend": ("extend", "train a checkpoint further on longer texts and compare before and after"),
    "eval": ("eval", "evaluate a checkpoint at several lengths"),
    "sliding": ("sliding", "compare sliding-window with non-overlapping evaluation"),
    "longrope-search": ("longrope_search", "search the factors with which a checkpoint of rope reads longer text"),
    "accuracy": ("eval_task", "count a checkpoint's exact answers to its algorithmic task, by number of items"),
    "answer": ("eval_questions", "have a checkpoint answer prepared questions, and score it as their papers do"),
    "sweep": ("sweep", "train several encodings and evaluate each at several lengths"),
    "report": ("report", "write the table, figure and page of sweeps"),
    "figures": ("figures", "draw encodings side by side: heat maps, profiles, receptive fields, what was learned"),
    "verdict": ("verdict", "decide whether Σ exp(bias) converges, per head, with its limit and receptive field"),
    "trf": ("trf", "draw receptive fields of encodings against ε"),
    "erf": ("erf", "measure how many of the nearest keys hold the attention of checkpoints"),
    "sensitivity": ("sensitivity", "draw the analysis of index warping"),
    "fire-fit": ("fire_fit", "find the parameters with which FIRE equals another bias"),
    "bench": ("bench", "time attention with each encoding and backend on this machine"),
    "selftest": ("selftest", "check every encoding with every backend on this machine, against float64"),
    "list": ("list:_list", "show every encoding with formula, options and paper"),
    "profile": ("list:_profile", "print an encoding's log-bias per distance as CSV"),
    "user-dir": ("list:_user_dir", "print the folder to give to fairseq's --user-dir"),
}
DEBUG_FLAG = "--debug"
INTERNAL = 70


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are errors of the user like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shown(message, 400)} (see {self.prog} --help)")


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """The command line with the options of the command that is ``wanted``; ``None``: of all of them."""
    parser = Parser(
        prog="fairseq-rpe",
        description="Positional encodings for length extrapolation with fairseq language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fairseq-rpe {__version__}")
    about = "show where an error comes from, with any command"
    parser.add_argument(DEBUG_FLAG, action="store_true", help=about)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (place, help) in COMMANDS.items():
        command = subparsers.add_parser(name, help=help, allow_abbrev=False)
        if wanted in (None, name):
            stem, _, end = place.partition(":")
            module = importlib.import_module(f"fairseq_rpe.cli.{stem}")
            getattr(module, f"add{end}")(command)
            command.set_defaults(run=getattr(module, f"run{end}"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # What follows a lone -- belongs to fairseq; argparse cannot keep it apart from our positionals.
    cut = argv.index("--") if "--" in argv else len(argv)
    ours, extra = _formulas(argv[:cut]), argv[cut + 1 :]
    debug = DEBUG_FLAG in ours or DEBUG in os.environ
    calm_warnings()
    processes.wait_briefly()
    with displayed() as out, _debugging(debug), safe_path():
        code = _guarded([word for word in ours if word != DEBUG_FLAG], extra, debug)
        out.flush()
        if out.failure is not None and code == 0:
            why = os.strerror(out.failure.errno or 0)
            print(
                f"error: standard output cannot be written ({why}): send it elsewhere; the work itself is done",
                file=sys.stderr,
            )
            return 2
        return code


def _guarded(argv: list[str], extra: list[str], debug: bool) -> int:
    """Carry out a command; whatever goes wrong becomes one line and a code."""
    try:
        return _carry_out(argv, extra)
    except KeyboardInterrupt:
        print("stopped by the keyboard; rerun the same command to resume", file=sys.stderr)
        return 130
    except processes.Stopped:
        print("stopped by SIGTERM; rerun the same command to resume", file=sys.stderr)
        return 143
    except BaseException as error:
        if debug:
            traceback.print_exc()
        said = told(error)
        if said is not None:
            print(f"error: {said}", file=sys.stderr)
            return 2
        about = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        more = "" if debug else f"; run again with {DEBUG_FLAG} for the traceback"
        print(f"error: internal: {about}{more}", file=sys.stderr)
        return INTERNAL


def _carry_out(argv: list[str], extra: list[str]) -> int:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UserError(f"unknown command '{argv[0]}'{nearest(argv[0], COMMANDS)}; known: {', '.join(COMMANDS)}")
    _refuse_lone_dashes(argv)
    try:
        args, unknown = build_parser(argv[0] if argv else "").parse_known_args(argv)
    except SystemExit:  # --help and --version have been printed
        return 0
    see = f"(see fairseq-rpe {args.command} --help)"
    if unknown:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)} {see}")
    if extra:
        if not hasattr(args, "extra"):
            raise UserError(f"'{args.command}' takes no further flags after --: only train and sweep do {see}")
        args.extra = tuple(extra)
    make_ready(args)
    return args.run(args) or 0


@contextlib.contextmanager
def _debugging(wanted: bool) -> Iterator[None]:
    """Let the processes that a command starts show their tracebacks too."""
    before = os.environ.get(DEBUG)
    if wanted:
        os.environ[DEBUG] = "1"
    try:
        yield
    finally:
        if wanted and before is None:
            del os.environ[DEBUG]


def calm_warnings() -> None:
    """Where warnings are made errors (``PYTHONWARNINGS=error``), have Python's usual ones, here and in children."""
    if not any(option.partition(":")[0] == "error" for option in sys.warnoptions):
        return
    sys.warnoptions[:] = []
    os.environ.pop("PYTHONWARNINGS", None)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


_WITHOUT_VALUE = re.compile(r"(--[\w-]+)=--")


def _refuse_lone_dashes(argv: list[str]) -> None:
    """Refuse ``--option=--``, which argparse takes for an option with an empty list. Raises UserError."""
    for word in argv:
        if match := _WITHOUT_VALUE.fullmatch(word):
            raise UserError(f"argument {match[1]}: '--' is no value of an option: give another one")


def _formulas(argv: list[str]) -> list[str]:
    """``--formula X`` as ``--formula=X``: nearly every X begins with a minus, which argparse takes for an option."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--formula":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


if __name__ == "__main__":
    sys.exit(main())

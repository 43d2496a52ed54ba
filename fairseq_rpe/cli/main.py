"""Entry point of ``fairseq-rpe``: a table of commands, and error handling that turns every failure into one line."""

import argparse
import contextlib
import importlib
import os
import re
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from fairseq_rpe import __version__
from fairseq_rpe.cli.options import apply_common_options
from fairseq_rpe.core import renamed
from fairseq_rpe.core.errors import DEBUG_VARIABLE, UserError, shorten_path, user_message
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.runs import processes
from fairseq_rpe.utils.child_processes import safe_path
from fairseq_rpe.utils.safe_streams import safe_streams


class Command(NamedTuple):
    """A command of the program.

    Attributes:
        group: heading of ``fairseq-rpe --help`` below which it is listed.
        module: module of this package with its ``add_options`` and ``run``.
        help: what it does, as one phrase.
        variant: which command of a module with several: its functions are ``add_<variant>_options`` and
            ``run_<variant>``.
        forwards_words: whether the function ``run_words`` of the module gets all further words, unparsed.
    """

    group: str
    module: str
    help: str
    variant: str = ""
    forwards_words: bool = False

    def function(self, pattern: str) -> str:
        """Return the name of a function of the module, e.g. ``add_stdlib_options`` of ``add{}_options``."""
        return pattern.format(f"_{self.variant}" if self.variant else "")


_DATA, _TRAINING, _EVALUATION, _THEORY = "data", "training", "evaluation", "theory"
_FIGURES, _MACHINE = "figures and reports", "this machine"
COMMANDS = {
    "prepare": Command(_DATA, "prepare", "make a corpus from any text: folders, .txt, .jsonl, .parquet, hub data sets"),
    "prepare-stdlib": Command(_DATA, "prepare", "make a code corpus from the Python standard library", "stdlib"),
    "prepare-corpus": Command(
        _DATA, "prepare", "make a corpus from WikiText-103, PG-19, code, Wikipedia, C4, arXiv or OpenWebText2", "corpus"
    ),
    "prepare-questions": Command(
        _DATA, "prepare_questions", "make a question data set from SCROLLS, GLUE, SuperGLUE or your own files"
    ),
    "prepare-cloze": Command(
        _DATA, "prepare_questions", "make cloze questions from any text: which earlier name fills the gap", "cloze"
    ),
    "train": Command(_TRAINING, "train", "train one language model"),
    "export": Command(_TRAINING, "export", "write a checkpoint as a model of Hugging Face transformers"),
    "import": Command(_TRAINING, "import_model", "make a checkpoint from a transformers model on disk"),
    "extend": Command(_TRAINING, "extend", "fine-tune a checkpoint on longer texts and compare it before and after"),
    "sweep": Command(_TRAINING, "sweep", "train several encodings and evaluate each of them at several lengths"),
    "plan": Command(_TRAINING, "plan", "estimate FLOPs, memory and time of a sweep or a training, without training"),
    "eval": Command(_EVALUATION, "eval", "evaluate the perplexity of a checkpoint at several lengths"),
    "key-tokens": Command(_EVALUATION, "key_tokens", "find the tokens whose prediction needs a long context"),
    "context-use": Command(
        _EVALUATION, "context_use", "compare the losses of tokens by the distance of their last occurrence"
    ),
    "eval-task": Command(_EVALUATION, "eval_task", "measure the exact-match accuracy on an algorithmic task"),
    "eval-questions": Command(_EVALUATION, "eval_questions", "answer a question data set and score the answers"),
    "generate": Command(_EVALUATION, "generate", "continue prompts with a checkpoint: text, tasks and questions"),
    "passkey": Command(_EVALUATION, "passkey", "draw how often a model of text finds a pass key, by length and depth"),
    "sliding": Command(_EVALUATION, "sliding", "compare sliding-window with non-overlapping evaluation"),
    "erf": Command(_EVALUATION, "erf", "measure the empirical receptive field of checkpoints"),
    "position-profile": Command(
        _EVALUATION, "position_profile", "measure the loss, and the attention to distant keys, by position"
    ),
    "needle-attention": Command(
        _EVALUATION, "needle_attention", "draw which heads of a checkpoint attend to the needle of an example"
    ),
    "longrope-search": Command(
        _EVALUATION, "longrope_search", "search LongRoPE factors that extend a checkpoint's context"
    ),
    "lm-eval": Command(
        _EVALUATION, "lm_eval", "run the tasks of lm-evaluation-harness on a checkpoint", forwards_words=True
    ),
    "list": Command(_THEORY, "list", "list all encodings with formula, options and paper", "list"),
    "bias": Command(_THEORY, "list", "print an encoding's bias at each distance as CSV", "bias"),
    "verdict": Command(_THEORY, "verdict", "decide whether Σ exp(bias) converges, with its limit and receptive field"),
    "trf": Command(_THEORY, "trf", "draw the theoretical receptive field of encodings against ε"),
    "fire-fit": Command(_THEORY, "fire_fit", "construct the FIRE parameters that reproduce another bias"),
    "sensitivity": Command(_THEORY, "sensitivity", "reproduce the sensitivity analysis of index warping"),
    "figures": Command(_FIGURES, "figures", "draw heat maps, bias curves and receptive fields of encodings"),
    "compare": Command(_FIGURES, "compare", "decide from results whether one of two models is better, with p-values"),
    "report": Command(_FIGURES, "report", "write the tables, figures and HTML page of sweeps"),
    "bench": Command(_MACHINE, "bench", "time attention or whole models with each encoding and backend"),
    "selftest": Command(_MACHINE, "selftest", "check every encoding and backend against float64"),
    "user-dir": Command(_MACHINE, "list", "print the folder to pass to fairseq's --user-dir", "user_dir"),
}
DEBUG_FLAG = "--debug"
INTERNAL_ERROR = 70  # exit code


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UserError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the message."""
        raise UserError(f"{shorten_path(message, 400)} (see {self.prog} --help)")


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        only: command whose options are added; its module is the only one that is imported. None: all commands.
    """
    parser = Parser(
        prog="fairseq-rpe",
        description="Positional encodings for length extrapolation with fairseq language models.",
        epilog=_command_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fairseq-rpe {__version__}")
    parser.add_argument(DEBUG_FLAG, action="store_true", help="show the traceback of an error; goes with any command")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, allow_abbrev=False)
        if only in (None, name):
            module = importlib.import_module(f"fairseq_rpe.cli.{command.module}")
            getattr(module, command.function("add{}_options"))(subparser)
            subparser.set_defaults(run=getattr(module, command.function("run{}")))
    return parser


def _command_list() -> str:
    """Return the commands below their groups, wrapped to the terminal."""
    columns, indent = shutil.get_terminal_size().columns - 2, max(map(len, COMMANDS)) + 4
    lines = []
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += [f"{group}:"]
        for name, command in COMMANDS.items():
            if command.group == group:
                first = f"  {name}".ljust(indent)
                width = max(columns, indent + 20)
                lines += textwrap.wrap(command.help, width, initial_indent=first, subsequent_indent=" " * indent)
        lines += [""]
    return "\n".join([*lines, "fairseq-rpe COMMAND --help lists the options of a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    Args:
        argv: words after the program's name; None: those of this process.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # Words after a lone -- belong to fairseq; argparse cannot separate them from our positional arguments.
    end = argv.index("--") if "--" in argv else len(argv)
    words, extra = join_formula(argv[:end]), argv[end + 1 :]
    debug = DEBUG_FLAG in words or DEBUG_VARIABLE in os.environ
    ignore_warnings_as_errors()
    processes.shorten_thread_spinning()
    with safe_streams() as out, _debugging(debug), safe_path():
        code = _run_guarded([word for word in words if word != DEBUG_FLAG], extra, debug)
        out.flush()
        if out.failure is not None and code == 0:
            reason = os.strerror(out.failure.errno or 0)
            print(
                f"error: standard output cannot be written ({reason}): redirect it elsewhere; the work itself is done",
                file=sys.stderr,
            )
            return 2
        return code


def _run_guarded(argv: list[str], extra: list[str], debug: bool) -> int:
    """Run a command; turn any exception into one line and an exit code."""
    try:
        return _run_command(argv, extra)
    except KeyboardInterrupt:
        print("stopped by the keyboard; rerun the same command to resume", file=sys.stderr)
        return 130
    except processes.Terminated:
        print("stopped by SIGTERM; rerun the same command to resume", file=sys.stderr)
        return 143
    except BaseException as error:
        if debug:
            traceback.print_exc()
        message = user_message(error)
        if message is not None:
            print(f"error: {message}", file=sys.stderr)
            return 2
        about = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        hint = "" if debug else f"; run again with {DEBUG_FLAG} for the traceback"
        print(f"error: internal: {about}{hint}", file=sys.stderr)
        return INTERNAL_ERROR


def _run_command(argv: list[str], extra: list[str]) -> int:
    name = argv[0] if argv else ""
    if name and not name.startswith("-") and name not in COMMANDS:
        if new := renamed.COMMANDS.get(name):
            raise UserError(f"the command '{name}' is called '{new}' now: use fairseq-rpe {new}")
        raise UserError(f"unknown command '{name}'{did_you_mean(name, COMMANDS)}; known: {', '.join(COMMANDS)}")
    if name in COMMANDS and COMMANDS[name].forwards_words and argv[1:] and argv[1:] != ["--help"]:
        return importlib.import_module(f"fairseq_rpe.cli.{COMMANDS[name].module}").run_words([*argv[1:], *extra]) or 0
    _refuse_lone_dashes(argv)
    parser = build_parser(name)
    if name in COMMANDS:
        _refuse_renamed_options(parser, name, argv[1:])
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit:  # --help and --version have been printed
        return 0
    unknown = _add_late_words(args, unknown)
    see = f"(see fairseq-rpe {args.command} --help)"
    if unknown:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)} {see}")
    if extra:
        if not hasattr(args, "extra"):
            raise UserError(f"'{args.command}' takes no further flags after --: only train and sweep do {see}")
        args.extra = tuple(extra)
    apply_common_options(args)
    return args.run(args) or 0


def _add_late_words(args: argparse.Namespace, words: list[str]) -> list[str]:
    """Add positional words after options to a command's list of any number of words, and return the other words.

    Before Python 3.12, argparse reads such a list only where its first positional words are. A command with a list
    sets the default ``words_after_options`` to the name of the list.
    """
    name = getattr(args, "words_after_options", None)
    if name is None or any(word.startswith("-") and word != "-" for word in words):
        return words
    getattr(args, name).extend(words)
    return []


def _refuse_renamed_options(parser: argparse.ArgumentParser, command: str, words: Sequence[str]) -> None:
    """Raise UserError for an option that has another name now, before a missing required option is reported."""
    [commands] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    options = commands[command]._option_string_actions
    for word in words:
        option = word.partition("=")[0]
        if option in options:
            continue
        new = renamed.OPTIONS.get((command, option)) or renamed.OPTIONS.get(("", option))
        if new in options:
            raise UserError(f"the option {option} of '{command}' is called {new} now: use {new}")


@contextlib.contextmanager
def _debugging(enabled: bool) -> Iterator[None]:
    """Make the child processes of a command show their tracebacks too."""
    before = os.environ.get(DEBUG_VARIABLE)
    if enabled:
        os.environ[DEBUG_VARIABLE] = "1"
    try:
        yield
    finally:
        if enabled and before is None:
            del os.environ[DEBUG_VARIABLE]


def ignore_warnings_as_errors() -> None:
    """Restore Python's default warnings here and in child processes where ``PYTHONWARNINGS=error`` is set."""
    if not any(option.partition(":")[0] == "error" for option in sys.warnoptions):
        return
    sys.warnoptions[:] = []
    os.environ.pop("PYTHONWARNINGS", None)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


_WITHOUT_VALUE = re.compile(r"(--[\w-]+)=--")


def _refuse_lone_dashes(argv: list[str]) -> None:
    """Raise UserError for ``--option=--``, which argparse reads as an option with an empty list."""
    for word in argv:
        if match := _WITHOUT_VALUE.fullmatch(word):
            raise UserError(f"argument {match[1]}: '--' is not a value of an option: give another one")


def join_formula(argv: list[str]) -> list[str]:
    """Return the words with ``--formula X`` as ``--formula=X``; argparse reads an X with a leading minus as option."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--formula":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


if __name__ == "__main__":
    sys.exit(main())

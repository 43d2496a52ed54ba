"""``generate``: continue prompts with a checkpoint, streamed as text or as JSON lines."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_rpe.cli.options import (
    add_checkpoint_options,
    fraction,
    nonempty_text,
    nonnegative_float,
    positive_float,
    positive_int,
    seed,
    share,
)
from fairseq_rpe.cli.printing import add_json
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import from_attributes

if TYPE_CHECKING:
    from fairseq_rpe.evaluation.generation_records import GenerationResult, Prompt
    from fairseq_rpe.evaluation.text_generation import GenerationStats, TextGenerator


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``generate``."""
    parser.description = (
        "Continue prompts with a model of text, of a generated task or of questions, and print the texts token by "
        "token, or as JSON lines with --json, --jsonl or --out. Texts that are in --out already are not generated "
        "again."
    )
    add_checkpoint_options(parser)
    add_json(parser)
    about = "prompts; symbols of a generated task are separated by blanks (default, and -: standard input)"
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help=about)
    parser.set_defaults(words_after_options="prompts")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="file that is one prompt")
    about = "JSON lines with prompt, perhaps id, and options of that prompt, such as max_tokens or stop"
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help=about)
    about = "folder of the tokenizer (default: the data folder of the training)"
    parser.add_argument("--data", type=Path, metavar="DIR", help=about)
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="most new tokens (default: 200)")
    about = "divides the logits; 0: choose the most likely token (default: 0.8 for text, 0 for tasks and questions)"
    parser.add_argument("--temperature", type=nonnegative_float, metavar="X", help=about)
    parser.add_argument(
        "--top-k", type=positive_int, metavar="K", help="draw from the K most likely tokens (default: all)"
    )
    about = "draw from the most likely tokens that have the probability P together (default: 0.95 for text, else 1)"
    parser.add_argument("--top-p", type=share, metavar="P", help=about)
    about = "draw from tokens with at least P times the largest probability (default: 0)"
    parser.add_argument("--min-p", type=fraction, metavar="P", help=about)
    parser.add_argument("--samples", type=positive_int, metavar="N", help="texts per prompt (default: 1)")
    parser.add_argument("--seed", type=seed, metavar="N", help="seed of the samples (default: 1)")
    about = "end a text before this string; may be repeated"
    parser.add_argument("--stop", type=nonempty_text, action="append", default=[], metavar="TEXT", help=about)
    about = "beam search of this width, whose texts end by </s>, in a text the line end, instead of sampling"
    parser.add_argument("--beam", type=positive_int, metavar="K", help=about)
    about = "make tokens that the text has already less likely by this factor (default: 1)"
    parser.add_argument("--repetition-penalty", type=positive_float, metavar="X", help=about)
    about = "add the log-probability of each token in nats to the JSON lines"
    parser.add_argument("--logprobs", action="store_true", help=about)
    about = "print the prompt before its text, or in its JSON line (default)"
    parser.add_argument("--echo", action=argparse.BooleanOptionalAction, default=True, help=about)
    about = "texts that are generated together (default: 1 for text, else at most 16)"
    parser.add_argument("--batch", type=positive_int, metavar="N", help=about)
    about = "dtype of matrix products (default: the checkpoint's)"
    parser.add_argument("--compute-dtype", choices=("fp32", "bf16"), help=about)


def run(args: argparse.Namespace) -> int:
    """Run ``generate``."""
    try:
        _run(args)
    except _OutputClosedError:
        pass  # as in `generate … | head`
    except KeyboardInterrupt:
        if args.out is not None:
            raise  # the next call continues
        print("\nstopped by the keyboard: the texts are not stored, use --out to resume", file=sys.stderr)
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    from fairseq_rpe.core.errors import UserError
    from fairseq_rpe.evaluation.checkpoint_defaults import with_checkpoint_rotation
    from fairseq_rpe.evaluation.generation_records import GenerationOptions, GenerationRequest, read_prompts

    options = from_attributes(GenerationOptions, args, stop=tuple(args.stop))
    prompts = read_prompts(args.prompts, args.prompt_file, args.jsonl, options)
    is_text = not (args.json or args.jsonl or args.out)
    if args.logprobs and is_text:
        raise UserError("--logprobs adds numbers to JSON lines: use --json, --jsonl or --out, too")
    args.batch = args.batch or (1 if is_text else None)
    request = with_checkpoint_rotation(from_attributes(GenerationRequest, args))

    from fairseq_rpe.evaluation.text_generation import TextGenerator

    generator = TextGenerator.load(request)
    samples = [prompt for prompt in prompts for _ in range(prompt.options.samples or 1)]
    if is_text:
        printer = _TextPrinter(samples, args.echo, generator.codec.separator)
        stats = generator.generate(prompts, printer.add_text, printer.end_text)
    else:
        stats = _generate_lines(generator, args, prompts, len(samples))
    if stats.rows:
        print(stats, file=sys.stderr)


def _generate_lines(
    generator: "TextGenerator", args: argparse.Namespace, prompts: "list[Prompt]", count: int
) -> "GenerationStats":
    """Generate texts and print them as JSON lines, or only store them in ``--out``."""
    with Progress(args.jsonl.name if args.jsonl else "prompts", "texts", count) as bar:

        def report(_: int, result: "GenerationResult") -> None:
            if not args.out or args.json:
                bar.write(json.dumps(result.to_json()))
                if args.out is None:
                    _check_output()
            bar.update()

        return generator.generate(prompts, lambda *_: bar.refresh(), report)


class _OutputClosedError(Exception):
    """Standard output accepts no more text."""


def _check_output() -> None:
    """Raise _OutputClosedError if standard output accepts no more text."""
    if getattr(sys.stdout, "is_quiet", False):
        raise _OutputClosedError


# Control characters but newline and tab: a model of bytes may generate them, and a terminal would obey them.
_VISIBLE_CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}


class _TextPrinter:
    """Prints texts in order, each as it is generated; text of a later row waits until its row is next.

    Args:
        prompts: prompt of each row.
        echo: whether the prompt is printed before its text.
        separator: text between the prompt and its continuation.
    """

    def __init__(self, prompts: "list[Prompt]", echo: bool, separator: str) -> None:
        self._prompts, self._echo, self._separator = prompts, echo, separator
        self._current = -1  # the row that is being printed
        self._last = ""  # the last text that was printed
        self._waiting: dict[int, str] = {}

    def add_text(self, row: int, text: str) -> None:
        """Print new text of a row, or store it."""
        if self._current < 0:
            self._begin(0)
        if row == self._current:
            self._write(text)
        else:
            self._waiting[row] = self._waiting.get(row, "") + text

    def end_text(self, row: int, result: "GenerationResult") -> None:
        """Print the end of a row, which is the current one, and what waits of the next."""
        if self._current < 0:
            self._begin(0)
        if not self._last.endswith("\n"):
            self._write("\n")
        if row + 1 < len(self._prompts):
            self._begin(row + 1)

    def _begin(self, row: int) -> None:
        self._current, self._last = row, ""
        if len(self._prompts) > 1:
            self._write(f"=== {row + 1} of {len(self._prompts)} ===\n")
        prompt = self._prompts[row].text
        if self._echo and prompt:
            self._write(prompt if prompt[-1].isspace() else prompt + self._separator)
        if text := self._waiting.pop(row, ""):
            self._write(text)

    def _write(self, text: str) -> None:
        self._last = text
        sys.stdout.write(text.translate(_VISIBLE_CONTROLS) if sys.stdout.isatty() else text)
        sys.stdout.flush()
        _check_output()

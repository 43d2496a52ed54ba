"""``lm-eval``: the command line of lm-evaluation-harness, with the models of this package."""

import argparse
from collections.abc import Sequence


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the description of ``lm-eval``, whose options are those of lm-evaluation-harness."""
    parser.description = (
        "Run lm-evaluation-harness with the model fairseq_rpe: lm-eval run --model fairseq_rpe --model_args "
        "checkpoint=FILE --tasks …; all words are options of lm_eval."
    )


def run(args: argparse.Namespace) -> int:
    """Run ``lm-eval`` without words."""
    return run_words(["--help"])


def run_words(words: Sequence[str]) -> int:
    """Run lm-evaluation-harness.

    Args:
        words: its command line.

    Returns:
        The exit code.

    Raises:
        UserError: the package lm_eval is not installed.
    """
    import sys
    from unittest import mock

    from fairseq_rpe.adapters import lm_eval  # noqa: F401, registers the model

    # isort: split
    from lm_eval.__main__ import cli_evaluate

    with mock.patch.object(sys, "argv", ["lm-eval", *words]):
        try:
            cli_evaluate()
        except SystemExit as end:  # of its parser, which has printed the help or what is wrong
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0

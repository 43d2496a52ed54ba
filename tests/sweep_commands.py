"""Helpers for tests of ``sweep``: resolve or refuse a command line, read a dry run, write a finished sweep."""

from __future__ import annotations

import csv
import functools
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import command_words, run_here
from refusal import refusal

from fairseq_rpe.cli import sweep as sweep_command
from fairseq_rpe.cli.main import build_parser
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.sweeps import recipes, run_sweep
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.resolve import Sweep, load_inputs
from fairseq_rpe.sweeps.sweep_kind import sweep_kind
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord, slug
from fairseq_rpe.utils import json_files

SMALL = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
QUIET = [*SMALL, "--disable-validation"]
DRY = ("--launcher", "dry-run")
LAUNCHERS = [(), DRY]
parser = functools.cache(build_parser)

BROKEN = '''"""An encoding that can be built but not trained."""
from fairseq_rpe.encodings import DistanceBias, register


@register("broken")
class Broken(DistanceBias):
    """Raises as soon as training asks it for a bias."""

    formula = "none"
    paper = "none"

    def bias(self, d):
        if self.training:
            raise RuntimeError("this encoding is broken")
        return -d.expand(self.heads, -1)
'''


def resolve_sweep(*argv: object) -> tuple[Sweep, list[SweepRun]]:
    """Resolve a command line of ``sweep``, and return the sweep and its runs."""
    args = parse(["sweep", "--device", "cpu", *map(str, argv)])
    sweep = sweep_command.resolve_sweep(Namespace(**{**vars(args), "extra": tuple(args.extra)}))
    return sweep, sweep_kind(sweep.kind).build_runs(sweep, load_inputs(sweep, dry=True))


def merged_record(*argv: object) -> SweepRecord:
    """The record of a sweep, merged with the one in its folder."""
    sweep, runs = resolve_sweep(*argv)
    return run_sweep.merged_record(sweep, load_inputs(sweep, dry=True), runs)


def dry_run_lines(*argv: object) -> list[str]:
    """Return the lines that a dry run prints, without the estimates of costs."""
    lines = run_here("sweep", "--device", "cpu", *DRY, *argv).stdout.splitlines()
    return [line for line in lines if not line.startswith(("# estimate: ", "# no estimate "))]


def dry_run(*argv: object) -> list[list[str]]:
    """Return the commands that a dry run prints, each as words without the name of the program."""
    return [command_words(line) for line in dry_run_lines(*argv) if not line.startswith("#")]


def refused(*argv: object) -> str:
    return refusal("sweep", "--device", "cpu", *argv)


def parse(words: list[str]) -> Namespace:
    """Parse a command line; ``extra`` of the result has the flags for fairseq-train after ``--``."""
    end = words.index("--") if "--" in words else len(words)
    return Namespace(**{**vars(parser().parse_args(words[:end])), "extra": words[end + 1 :]})


def flag(words: list[str], name: str) -> str:
    """Return the value of a flag."""
    return words[words.index(name) + 1]


def recipe_error(path: Path) -> str:
    """Load a recipe that must be refused, and return the error: one line that names the file."""
    with pytest.raises(UserError) as caught:
        recipes.load(str(path))
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def finished_sweep(
    folder: Path, ppl: dict[str, dict[int, float]], seeds: tuple[int, ...] = (1,), **record: object
) -> SweepFolder:
    """Write the folder of a finished sweep that was trained at 64 tokens.

    Args:
        folder: output folder.
        ppl: spec -> length -> perplexity of the first seed; each further seed has 2 more than the seed before.
        seeds: seeds.
        record: further keys of ``sweep.json``.
    """
    lengths = sorted({length for values in ppl.values() for length in values})
    settings = {"tokens": 64, "split": "test"}
    common = {"layout": 2, "settings": settings, "encodings": list(ppl), "seeds": list(seeds), "lengths": lengths}
    json_files.write_json(folder / "sweep.json", {**common, **record})
    for spec, values in ppl.items():
        for number, seed in enumerate(seeds):
            run = folder / "runs" / slug(spec, seed)
            json_files.write_json(run / "checkpoints/run.json", {"layout": 2, "finished": {"checkpoint": "c"}})
            add_results(run, *({"length": n, "ppl": value + 2 * number} for n, value in values.items()))
    return SweepFolder(folder)


def add_results(run: Path, *rows: Mapping[str, object]) -> None:
    """Append results to those of a run of :func:`finished_sweep`."""
    common = {"checkpoint": "c", "split": "test", "loss_base2": 1.0, "tokens": 99}
    for row in rows:
        json_files.append_json_line(run / "eval.jsonl", {**common, **row})

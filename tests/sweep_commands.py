"""What a command line about sweeps comes to: the sweep with its runs, the commands of a dry run, or a refusal."""

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
from fairseq_rpe.sweeps import fine_tuning_grid, grid, recipes, run_sweep
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import SweepFolder, slug
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
    """Resolve a command line of ``sweep``: returns the sweep and its runs."""
    args = parse(["sweep", "--device", "cpu", *map(str, argv)])
    sweep = sweep_command.resolve_sweep(Namespace(**{**vars(args), "extra": tuple(args.extra)}))
    make = fine_tuning_grid.build_fine_tuning_runs if sweep.questions else grid.build_runs
    return sweep, make(sweep, run_sweep.check_data(sweep, dry=True))


def dry_run_lines(*argv: object) -> list[str]:
    return run_here("sweep", "--device", "cpu", *DRY, *argv).stdout.splitlines()


def dry_run(*argv: object) -> list[list[str]]:
    """The commands of a sweep, without the program, and without comments."""
    return [command_words(line) for line in dry_run_lines(*argv) if not line.startswith("#")]


def refused(*argv: object) -> str:
    return refusal("sweep", "--device", "cpu", *argv)


def parse(words: list[str]) -> Namespace:
    """A command's options; ``extra`` holds the flags for fairseq-train that follow a --."""
    end = words.index("--") if "--" in words else len(words)
    return Namespace(**{**vars(parser().parse_args(words[:end])), "extra": words[end + 1 :]})


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def recipe_error(path: Path) -> str:
    """Why a recipe's file is refused, in one line that names it."""
    with pytest.raises(UserError) as caught:
        recipes.load(str(path))
    said = str(caught.value)
    assert str(path) in said and "\n" not in said
    return said


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def finished_sweep(
    folder: Path, ppl: dict[str, dict[int, float]], seeds: tuple[int, ...] = (1,), **record: object
) -> SweepFolder:
    """A finished sweep at 64 tokens with these perplexities, 2 more for each further seed; ``record``: more keys."""
    lengths = sorted({length for values in ppl.values() for length in values})
    settings = {"tokens": 64, "split": "test"}
    own = {"layout": 2, "settings": settings, "encodings": list(ppl), "seeds": list(seeds), "lengths": lengths}
    json_files.write_json(folder / "sweep.json", {**own, **record})
    for spec, values in ppl.items():
        for number, seed in enumerate(seeds):
            run = folder / "runs" / slug(spec, seed)
            json_files.write_json(run / "checkpoints/run.json", {"layout": 2, "finished": {"checkpoint": "c"}})
            add_results(run, *({"length": n, "ppl": value + 2 * number} for n, value in values.items()))
    return SweepFolder(folder)


def add_results(run: Path, *rows: Mapping[str, object]) -> None:
    common = {"checkpoint": "c", "split": "test", "loss_base2": 1.0, "tokens": 99}
    for row in rows:
        json_files.append_json_line(run / "eval.jsonl", {**common, **row})

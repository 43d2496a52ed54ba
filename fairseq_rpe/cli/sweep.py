"""``sweep``: train several methods and evaluate each, nothing twice."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import cells, launch, recipes, report, runner, slurm, train
from fairseq_rpe.cli.options import check_positions, check_spec, int_list, positive_int
from fairseq_rpe.cli.places import places
from fairseq_rpe.cli.recipes import IDENTITY, Method
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import lock, read_json, read_json_lines, write_json
from fairseq_rpe.data import folder as corpus


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="train several encodings and evaluate each at several lengths",
        description="May be stopped at any time; the same command goes on and redoes nothing.",
        epilog="Further fairseq-train flags may follow after a lone --",
        allow_abbrev=False,
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help="binarised data folder")
    parser.add_argument(
        "--algorithms", metavar='"SPEC ..."', help='in place of DATA: generated tasks, e.g. "copy sort"'
    )
    parser.add_argument("--encodings", metavar='"SPEC SPEC ..."', help="separated by blanks")
    parser.add_argument(
        "--recipe", metavar="NAME", help=f"in place of --encodings: {', '.join(recipes.names())} or FILE"
    )
    parser.add_argument("--scale", default="laptop", metavar="NAME", help="size of the recipe (default: laptop)")
    parser.add_argument("--methods", metavar='"NAME ..."', help="some of the recipe's methods, or all")
    parser.add_argument(
        "--lengths", type=int_list, metavar="N,N,...", help="tokens, the training length is always added; or items"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the sweep (default: runs/RECIPE-SCALE)")
    parser.add_argument("--subset", default="test", help="split to score (default: test)")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="evaluation batch in tokens")
    parser.add_argument("--seeds", type=int_list, metavar="N,N,...", help="default: 1")
    parser.add_argument("--jobs", type=positive_int, metavar="J", help="runs at a time (default: GPUs, or cores)")
    parser.add_argument(
        "--launcher",
        choices=("local", "slurm", "dry-run"),
        default="local",
        help="this machine (default), a SLURM cluster, or only print the commands of either",
    )
    slurm.add_options(parser)
    train.add_model_options(parser)
    # nothing given, rather than train's defaults: a recipe may say otherwise
    parser.set_defaults(run=run, extra=[], arch=None, update_freq=None, rpe_share=None, positions_train=None)


def run(args: argparse.Namespace) -> int:
    methods, recipe = _resolve(args)
    on_slurm = slurm.wanted(args)
    if args.rpe_module and not args.rpe_module.is_file():
        raise UserError(f"--rpe-module {args.rpe_module} does not exist")
    if args.algorithms is None:
        corpus.check_folder(args.data, "train", "valid", args.subset)
    unseen = _without_bias(args, methods) if args.inspect_every else set()
    made = cells.make(args, methods, unseen)
    if args.algorithms is None:
        tokens = made[0].wanted.settings["tokens"]
        for split in ("train", "valid"):
            corpus.check_block(args.data, split, tokens)
        corpus.check_block(args.data, args.subset, max(tokens, *args.lengths))
    if args.launcher == "dry-run":
        _print_commands(args, made, on_slurm)
        return 0
    if on_slurm:
        slurm.check()
    busy = f"another sweep is running in {args.out}: wait for it, stop it or choose another --out"
    with lock(args.out / ".lock", busy):
        state = _state(args, made, methods, recipe)
        pending = {cell: work for cell in made if (work := cell.work_left())}
        failures: list[str] = []
        if pending:
            _check_specs(args, methods, made)
        for cell, stages in pending.items():
            _note(state["commands"].setdefault(cell.slug, {}), stages)
        write_json(args.out / report.STATE, state)
        if pending and on_slurm:
            failures = slurm.execute(args, pending)
        elif pending:
            failures = _execute(args, pending, made)
        if any(read_json_lines(cell.results) for cell in made):
            report.write(args.out, redraw=bool(pending))
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0


def _print_commands(args: argparse.Namespace, made: list[cells.Cell], on_slurm: bool) -> None:
    """Every command, and as comments what is started in turn."""
    if on_slurm:
        print(shlex.join(slurm.command(args, [cell.slug for cell in made])))
    gpus = launch.gpus(args, dry=True) if not on_slurm else 0 if args.device == "cpu" else args.nproc
    for cell in made:
        if on_slurm:
            print(f"# job {cell.slug}:")
        print(shlex.join(cell.train_command))
        if args.nproc * args.nodes > 1:
            print(f"# starts: {cell.torchrun(on_slurm, gpus)}")
        for evaluation in cell.evaluations:
            print(shlex.join(evaluation.command))


def _execute(
    args: argparse.Namespace, pending: dict[cells.Cell, list[runner.Stage]], made: list[cells.Cell]
) -> list[str]:
    """Carry out the runs on this machine, which no job of an earlier call may be busy with."""
    with contextlib.ExitStack() as held:
        for cell in pending:
            held.enter_context(lock(cell.lock, f"a job is busy with {cell.slug}: wait for it, or stop it with scancel"))
        return runner.execute(pending, made, places(args.device, args.nproc, args.jobs))


def _resolve(args: argparse.Namespace) -> tuple[list[Method], recipes.Recipe | None]:
    """Fill in what a recipe says and the command line does not; returns what is to be compared."""
    recipe = None
    if (args.recipe is None) == (args.encodings is None):
        raise UserError('name what to compare: either --encodings "SPEC SPEC ..." or --recipe NAME')
    if args.recipe is not None:
        if args.positions_train or args.positions_eval:
            raise UserError("--positions-train and --positions-eval do not go with --recipe: its methods name them")
        recipe = recipes.load(args.recipe)
        scale = recipe.scale(args.scale)
        given = args.methods.split() if args.methods is not None else scale.get("methods", ["all"])
        methods = recipe.choose(given)
        _fill(args, recipe, scale)
    elif args.methods is not None:
        raise UserError("--methods belongs to --recipe: list encodings with --encodings")
    else:
        methods = [
            Method(spec, spec, args.positions_train or IDENTITY, args.positions_eval) for spec in args.encodings.split()
        ]
    if not methods:
        raise UserError('--encodings is empty: name at least one, e.g. --encodings "alibi type1"')
    if len({m.name for m in methods}) < len(methods):
        raise UserError("--encodings names one twice: leave one out")
    if (args.data is None) == (args.algorithms is None):
        raise UserError('name what to train on: either a DATA folder or --algorithms "SPEC ..."')
    if args.algorithms is not None:
        args.algorithms = _algorithms(args)
    elif args.lengths is None:
        raise UserError("--lengths is missing: name the lengths to evaluate in tokens, e.g. 512,1024")
    if args.out is None:
        raise UserError("--out is missing: name the folder of the sweep")
    args.arch, args.seeds, args.update_freq = args.arch or "tiny", args.seeds or [1], args.update_freq or 1
    args.rpe_share = args.rpe_share or "auto"
    return methods, recipe


def _fill(args: argparse.Namespace, recipe: recipes.Recipe, scale: dict[str, Any]) -> None:
    if recipe.kind == "text" and args.algorithms is not None:
        raise UserError(f"recipe '{recipe.name}' compares on text: drop --algorithms")
    if recipe.kind == "algorithms" and args.data is not None:
        raise UserError(f"recipe '{recipe.name}' generates its data: drop {args.data}")
    for key, value in scale.items():
        if key == "extra":
            args.extra = [*value, *args.extra]
        elif key == "algorithms":
            args.algorithms = args.algorithms or " ".join(value)
        elif key == "data":
            args.data = args.data or Path(value)
        elif key != "methods" and getattr(args, key) is None:
            setattr(args, key, value)
    if args.out is None:
        args.out = Path("runs") / f"{recipe.name}-{args.scale}"


def _algorithms(args: argparse.Namespace) -> list[str]:
    from fairseq_rpe.algorithms import SPLITS, build, normalise

    if args.subset not in SPLITS:
        raise UserError(f"--subset {args.subset} does not exist: an algorithmic task has {', '.join(SPLITS)}")
    if args.max_tokens is not None:
        raise UserError("--max-tokens does not go with --algorithms: drop it")
    specs = [normalise(spec) for spec in args.algorithms.split()]
    if not specs:
        raise UserError('--algorithms is empty: name at least one, e.g. --algorithms "copy sort"')
    if len(set(specs)) < len(specs):
        raise UserError("--algorithms names one twice: leave one out")
    for spec in specs:
        build(spec)
    return specs


def _state(
    args: argparse.Namespace, made: list[cells.Cell], methods: list[Method], recipe: recipes.Recipe | None
) -> dict[str, Any]:
    """What the sweep is about, for the report; methods, tasks, lengths and seeds may be added later."""
    own = ("rpe", "seed", "positions_train", "positions_eval", *(("data", "tokens") if args.algorithms else ()))
    settings = {k: v for k, v in made[0].wanted.settings.items() if k not in own}
    settings |= {"updates": made[0].wanted.updates, "subset": args.subset}
    path = args.out / report.STATE
    before = read_json(path) if path.exists() else {"settings": settings}
    for key, value in settings.items():
        there = before["settings"].get(key)
        if there != value:
            raise UserError(
                f"{args.out} holds another sweep ({key} is {there!r} there, {value!r} here): choose another --out"
            )
    if bool(before.get("algorithms")) != bool(args.algorithms) and path.exists():
        raise UserError(f"{args.out} holds a sweep of another kind: choose another --out")
    known = before.get("methods", {})
    for method in methods:
        now = cells.record(method)
        if known.get(method.name, now) != now:
            raise UserError(f"{args.out} holds other positions for '{method.name}': choose another --out")
        known[method.name] = now
    state = {
        "settings": settings,
        "recipe": args.recipe or before.get("recipe"),
        "title": recipe.title if recipe else before.get("title"),
        "paper": recipe.paper if recipe else before.get("paper"),
        "published": recipe.published if recipe else before.get("published"),
        "encodings": list(dict.fromkeys([*before.get("encodings", []), *(m.name for m in methods)])),
        "methods": known,
        "seeds": sorted({*before.get("seeds", []), *args.seeds}),
        "lengths": sorted({*before.get("lengths", []), *(n for c in made for n in c.lengths)}),
        # what is carried out, by run: nothing is known of the runs of an older version
        "commands": before.get("commands", {}),
    }
    if args.data is not None:
        state["data"] = str(args.data)
    if args.algorithms:
        state["algorithms"] = list(dict.fromkeys([*before.get("algorithms", []), *args.algorithms]))
    return state


def _note(commands: dict[str, list[str]], stages: list[runner.Stage]) -> None:
    """Add the commands of ``stages`` to those that a run has on record."""
    for stage in stages:
        line = shlex.join(stage.command)
        known = commands.setdefault(stage.name, [])
        if line not in known:
            known.append(line)


def _check_specs(args: argparse.Namespace, methods: list[Method], made: list[cells.Cell]) -> None:
    """Refuse a misspelt or repeated method before anything is trained."""
    from fairseq_rpe import positions

    seen: dict[tuple[str, ...], str] = {}
    tokens = min(cell.wanted.settings["tokens"] for cell in made)
    for method in methods:
        normal = check_spec(method.rpe, args.rpe_module, tokens)
        check_positions(method.positions_train, method.positions_eval, tokens)
        moved = [positions.normalise(s) if s else "" for s in (method.positions_train, method.positions_eval)]
        if (other := seen.get((normal, *moved))) is not None:
            raise UserError(f"'{other}' and '{method.name}' are the same encoding: leave one out")
        seen[normal, *moved] = method.name


def _without_bias(args: argparse.Namespace, methods: list[Method]) -> set[str]:
    """The encodings that --inspect-every has nothing to show of."""
    specs = list(dict.fromkeys(method.rpe for method in methods))
    for spec in specs:
        check_spec(spec, args.rpe_module, 64)
    unseen = [spec for spec in specs if not train.has_bias(spec)]
    if len(unseen) == len(specs):
        raise UserError(f"--inspect-every: no bias to show in {', '.join(unseen)}: drop the flag")
    if unseen:
        print(f"--inspect-every: no bias to show in {', '.join(unseen)}", file=sys.stderr)
    return set(unseen)

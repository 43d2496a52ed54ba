"""``figures``: every figure on encodings that there is, from specs or from the checkpoints of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli import checkpoints, report
from fairseq_rpe.cli.options import add_rpe_module, load_rpe_module, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import check_folder, make_folder, read_json, replace_with

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fairseq_rpe.encodings import Encoding

_LONGEST = 16_384
_WINDOW = "window:window=64"  # the one encoding that has to be given a number


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "figures",
        help="draw encodings side by side: heat maps, profiles, receptive fields, what a sweep learned",
        description="Draws each figure as PNG and PDF. Of specs: exp(bias) as heat maps, the bias over distance, the "
        "theoretical receptive field. Of a sweep the same with the parameters that it learned, and also perplexity, "
        "learned biases of single queries, biases over training and, with --data, the empirical receptive field.",
        allow_abbrev=False,
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="encodings (default: all that have a bias)")
    parser.add_argument("--sweep", type=Path, metavar="DIR", help="in place of specs: the --out folder of a sweep")
    parser.add_argument("--data", type=Path, metavar="DATA", help="binarised text for the empirical receptive field")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/figures, or figures in the sweep")
    parser.add_argument("--length", type=positive_int, default=512, metavar="N", help="tokens or distances shown (512)")
    parser.add_argument("--heads", type=positive_int, metavar="H", help="heads of specs (8)")
    parser.add_argument(
        "--head", type=positive_int, metavar="K", help="head shown where one is shown (default: a middle one)"
    )
    parser.add_argument(
        "--seed", type=positive_int, metavar="S", help="initial values of specs, or run of the sweep (1)"
    )
    add_rpe_module(parser)
    parser.set_defaults(run=run)


@dataclass
class Subjects:
    """What is drawn. ``encodings``: label -> one for the model, or one per layer."""

    encodings: dict[str, list[Encoding]]
    head: int
    seed: int
    folder: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def biased(self) -> dict[str, Encoding]:
        """The encodings with an additive bias, each layer's where they are not shared."""
        return {
            f"{name} (layer {index})" if len(encodings) > 1 else name: encoding
            for name, encodings in self.encodings.items()
            for index, encoding in enumerate(encodings)
            if encoding.adds_bias
        }

    def run_name(self, name: str) -> str:
        return report.run_name(report.method_of(self.state, name), self.seed)

    def checkpoint(self, name: str) -> Path:
        """Of a sweep: the last checkpoint of a method's run."""
        return self.folder / "runs" / self.run_name(name) / "checkpoints" / checkpoints.LAST

    def events(self, name: str) -> Path:
        """Of a sweep: the folder in which a method's training was inspected."""
        return self.folder / "tensorboard" / self.run_name(name) / "encodings"


class Skip(Exception):
    """A figure that cannot be drawn of these subjects, and why."""


def run(args: argparse.Namespace) -> int:
    subjects = _subjects(args)
    folder = args.out or (Path("runs/figures") if args.sweep is None else args.sweep / "figures")
    check_folder(folder, ())
    make_folder(folder)
    drawn, skipped = [], []
    for name, make in FIGURES.items():
        try:
            figures = make(subjects, args)
        except Skip as reason:
            skipped.append(f"{name}: {reason}")
            continue
        for stem, figure in figures.items():
            for ending in ("png", "pdf"):
                replace_with(folder / f"{stem}.{ending}", lambda target, figure=figure: figure.savefig(target, dpi=160))
            drawn.append(folder / f"{stem}.png")
            print(f"{drawn[-1]}, also as .pdf", flush=True)
    for line in skipped:
        print(f"not drawn, {line}")
    return 0


def _subjects(args: argparse.Namespace) -> Subjects:
    if args.length < 2 or args.length > _LONGEST:
        raise UserError(f"--length {args.length} is out of range: choose 2 to {_LONGEST}")
    if args.sweep is not None and args.specs:
        raise UserError("name either specs or --sweep DIR, not both")
    if args.sweep is not None and args.heads is not None:
        raise UserError("--heads does not go with --sweep: its checkpoints have theirs")
    if args.data is not None and args.sweep is None:
        raise UserError("--data is for the empirical receptive field of checkpoints: give --sweep DIR too")
    load_rpe_module(args.rpe_module)
    seed = args.seed or 1
    subjects = _of_sweep(args.sweep, seed) if args.sweep is not None else _of_specs(args, seed)
    heads = min(e[0].heads for e in subjects.encodings.values())
    subjects.head = args.head or (heads + 1) // 2
    if subjects.head > heads:
        raise UserError(f"--head {args.head}: there are {heads} heads")
    return subjects


def _of_specs(args: argparse.Namespace, seed: int) -> Subjects:
    import torch

    from fairseq_rpe.encodings import build, names

    heads, found = args.heads or 8, {}
    for spec in args.specs or [_WINDOW if name == "window" else name for name in names()]:
        torch.manual_seed(seed)
        if spec in found:
            raise UserError(f"'{spec}' is named twice: leave one out")
        found[spec] = [build(spec, heads, 64 * heads, args.length)]
    subjects = Subjects(found, 1, seed)
    without = [name for name in found if name not in subjects.biased]
    if args.specs and without:
        raise UserError(f"'{without[0]}' has no additive bias to draw: leave it out")
    subjects.encodings = {name: e for name, e in found.items() if name not in without}
    return subjects


def _of_sweep(folder: Path, seed: int) -> Subjects:
    from fairseq_rpe.cli.trained import load_encodings

    if not (folder / report.STATE).is_file():
        raise UserError(f"{folder} holds no {report.STATE}: name the --out folder of a sweep")
    state = read_json(folder / report.STATE)
    if state.get("algorithms"):
        raise UserError(f"{folder} is a sweep of algorithmic tasks: these figures are for text")
    subjects = Subjects({}, 1, seed, folder, state)
    for name in state["encodings"]:
        if (path := subjects.checkpoint(name)).is_file():
            subjects.encodings[name] = load_encodings(path).encodings
    if not subjects.encodings:
        raise UserError(f"{folder} holds no finished run of seed {seed}: run its sweep first or choose another --seed")
    return subjects


def draw_heat_maps(subjects: Subjects, args: argparse.Namespace) -> dict[str, Figure]:
    from fairseq_rpe.analysis.bias_map import bias_map
    from fairseq_rpe.figures import biases as drawings

    maps, step = {}, 1
    for name, encoding in _some(subjects.biased).items():
        bias, step = bias_map(encoding, args.length, [subjects.head - 1])
        maps[name] = bias[0]
    return {"heat_maps": drawings.heat_maps(maps, step, subjects.head)}


def draw_profiles(subjects: Subjects, args: argparse.Namespace) -> dict[str, Figure]:
    from fairseq_rpe.figures import biases as drawings

    values = {name: encoding.profile(args.length) for name, encoding in _some(subjects.biased).items()}
    one = {name: profile[subjects.head - 1] for name, profile in values.items()}
    return {"profiles": drawings.profiles(values), "profiles_compared": drawings.compared(one, subjects.head)}


def draw_theory(subjects: Subjects, _args: argparse.Namespace) -> dict[str, Figure]:
    from fairseq_rpe.analysis import judgement
    from fairseq_rpe.figures.fields import fields

    rows = {name: judgement.judge([encoding])[subjects.head - 1] for name, encoding in subjects.biased.items()}
    curves = {name: judgement.fields([row]).curves for name, row in rows.items() if row.head.total is not None}
    if not any(curves.values()):
        raise Skip("no series converges")
    return {"trf": fields(curves, title=f"Theoretical receptive field, head {subjects.head}")}


def draw_perplexity(subjects: Subjects, _args: argparse.Namespace) -> dict[str, Figure]:
    from fairseq_rpe.cli.figure import perplexity

    if subjects.folder is None:
        raise Skip("needs --sweep")
    rows = report.collect(subjects.folder, subjects.state)
    if not rows:
        raise Skip("the sweep has no finished evaluation")
    return {"ppl": perplexity(rows, subjects.state["settings"]["tokens"])}


def draw_queries(subjects: Subjects, args: argparse.Namespace) -> dict[str, Figure]:
    import torch

    from fairseq_rpe.encodings import PairBias
    from fairseq_rpe.figures import biases as drawings

    if subjects.folder is None:
        raise Skip("needs --sweep, because it shows learned biases")
    trained = subjects.state["settings"]["tokens"]
    queries = sorted({trained // 2, trained, args.length})
    figures = {}
    for name, encodings in subjects.encodings.items():
        if isinstance(encodings[0], PairBias) and list(encodings[0].parameters()):
            biases = {i: torch.stack([e.profile(i + 1).flip(-1) for e in encodings]) for i in queries}
            figures[f"queries-{report.slug(name, subjects.seed)}"] = drawings.of_queries(biases, name)
    if not figures:
        raise Skip("the sweep has no learned bias of both positions, such as fire")
    return figures


def draw_training(subjects: Subjects, _args: argparse.Namespace) -> dict[str, Figure]:
    import torch

    from fairseq_rpe.analysis import history
    from fairseq_rpe.figures import biases as drawings

    if subjects.folder is None:
        raise Skip("needs --sweep")
    figures = {}
    for name, encodings in subjects.encodings.items():
        looks = history.read(subjects.events(name)) if list(encodings[0].parameters()) else []
        if len(looks) < 2:
            continue
        places = looks[0]["bias"]
        values = {
            f"{place}, head {head + 1}": torch.tensor([look["bias"][place][head] for look in looks])
            for place, heads in places.items()
            for head in range(len(heads))
        }
        steps = [look["step"] for look in looks]
        stem = f"training-{report.slug(name, subjects.seed)}"
        figures[stem] = drawings.over_training(values, looks[0]["distances"], steps, name)
    if not figures:
        raise Skip("no run with learned biases was trained with --inspect-every")
    return figures


def draw_receptive_field(subjects: Subjects, args: argparse.Namespace) -> dict[str, Figure]:
    from fairseq_rpe.evaluation.messages import log_to

    log_to(None)
    from fairseq_rpe.evaluation.loading import find_subjects
    from fairseq_rpe.evaluation.measurements import Overrides
    from fairseq_rpe.evaluation.receptive import FieldRequest, measure
    from fairseq_rpe.figures import empirical

    if args.data is None:
        raise Skip("needs --sweep and --data")
    state = subjects.state
    plain = [name for name in subjects.encodings if report.leaves_positions(report.method_of(state, name))]
    if not plain:
        raise Skip("every method moves positions")
    request = FieldRequest(data=args.data, length=args.length, use=Overrides(rpe_module=args.rpe_module))
    found = find_subjects([subjects.checkpoint(name) for name in plain])
    length, rows = request.sized(state["settings"]["tokens"])
    named = [replace(subject, label=name) for subject, name in zip(found, plain, strict=True)]
    return {"erf": empirical.curves([measure(request, one, length, rows) for one in named], request.epsilons)}


def _some(found: dict[str, Encoding]) -> dict[str, Encoding]:
    if not found:
        raise Skip("none has an additive bias")
    return found


FIGURES: dict[str, Callable[[Subjects, argparse.Namespace], dict[str, Any]]] = {
    "heat maps of exp(bias)": draw_heat_maps,
    "bias over distance": draw_profiles,
    "theoretical receptive field": draw_theory,
    "perplexity": draw_perplexity,
    "empirical receptive field": draw_receptive_field,
    "learned biases of single queries": draw_queries,
    "biases over training": draw_training,
}

"""Every figure on encodings that there is, from specs or from the checkpoints of a sweep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

from fairseq_rpe import encodings
from fairseq_rpe.analysis import history, judgement
from fairseq_rpe.analysis.bias_map import bias_map
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding, PairBias
from fairseq_rpe.evaluation import receptive
from fairseq_rpe.evaluation.loading import find_subjects
from fairseq_rpe.figures import biases, empirical, fields, sweep_curves
from fairseq_rpe.figures.saving import save
from fairseq_rpe.reports import findings
from fairseq_rpe.runs.learned import load_encodings
from fairseq_rpe.runs.run_folder import RunFolder
from fairseq_rpe.sweeps.state import State, SweepFolder, slug

_WINDOW = "window:window=64"  # the one encoding that has to be given a number


@dataclass(frozen=True)
class Trained:
    """The runs of a sweep, of one seed; ``data``: the text to measure them on, if they are to be."""

    folder: SweepFolder
    state: State
    data: Path | None = None
    rpe_module: Path | None = None

    def run(self, name: str, seed: int) -> RunFolder:
        return self.folder.run_of(self.state.method(name), seed)


@dataclass(frozen=True)
class Gallery:
    """What is drawn. ``encodings``: label -> one for the model, or one per layer.

    ``length``: tokens or distances shown; ``seed``: of initial values, or of the runs; ``head``: the one shown where
    one is shown, from 1, or a middle one.

    Raises:
        UserError: there are not as many heads.
    """

    encodings: Mapping[str, Sequence[Encoding]]
    length: int
    seed: int
    head: int | None = None
    trained: Trained | None = None

    def __post_init__(self) -> None:
        if self.index >= (heads := self._heads()):
            raise UserError(f"--head {self.head}: there are {heads} heads")

    def _heads(self) -> int:
        return min(layers[0].heads for layers in self.encodings.values())

    @property
    def biased(self) -> dict[str, Encoding]:
        """The encodings with an additive bias, each layer's where they are not shared."""
        return {
            f"{name} (layer {index})" if len(layers) > 1 else name: encoding
            for name, layers in self.encodings.items()
            for index, encoding in enumerate(layers)
            if encoding.adds_bias
        }

    @property
    def index(self) -> int:
        """Of the head that is shown, from 0."""
        return (self.head or (self._heads() + 1) // 2) - 1


class Skip(Exception):
    """A figure that cannot be drawn of this gallery, and why."""


def of_specs(specs: Sequence[str], heads: int, length: int, seed: int, head: int | None) -> Gallery:
    """Encodings with their initial values; without ``specs`` all that have a bias.

    Raises:
        UserError: one is misspelt, named twice, or has no bias.
    """
    found = {}
    for spec in specs or [_WINDOW if name == "window" else name for name in encodings.names()]:
        torch.manual_seed(seed)
        if spec in found:
            raise UserError(f"'{spec}' is named twice: leave one out")
        encoding = encodings.build(spec, heads, 64 * heads, length)
        if encoding.adds_bias:
            found[spec] = [encoding]
        elif specs:
            raise UserError(f"'{spec}' has no additive bias to draw: leave it out")
    return Gallery(found, length, seed, head)


def of_sweep(trained: Trained, length: int, seed: int, head: int | None) -> Gallery:
    """Encodings with the parameters that the runs of a sweep learned.

    Raises:
        UserError: it is not about text, or has no finished run of ``seed``.
    """
    folder, state = trained.folder, trained.state
    if state.algorithms:
        raise UserError(f"{folder.path} is a sweep of algorithmic tasks: these figures are for text")
    paths = {name: trained.run(name, seed).checkpoints.last for name in state.encodings}
    found = {name: load_encodings(path).encodings for name, path in paths.items() if path.is_file()}
    if not found:
        raise UserError(
            f"{folder.path} holds no finished run of seed {seed}: run its sweep first or choose another --seed"
        )
    return Gallery(found, length, seed, head, trained)


def draw(gallery: Gallery, folder: Path) -> Iterator[str]:
    """Draw each figure as PNG and PDF; says of each, as soon as it is there, where, and last which were not drawn."""
    skipped = []
    for name, (make, reason) in FIGURES.items():
        try:
            figures = make(gallery)
        except Skip as missing:
            figures, reason = {}, str(missing)
        if not figures:
            skipped.append(f"not drawn, {name}: {reason}")
        for stem, figure in figures.items():
            save(figure, *(folder / f"{stem}.{ending}" for ending in ("png", "pdf")))
            yield f"{folder / stem}.png, also as .pdf"
    yield from skipped


def _heat_maps(gallery: Gallery) -> dict[str, Figure]:
    maps, step = {}, 1
    for name, encoding in gallery.biased.items():
        bias, step = bias_map(encoding, gallery.length, [gallery.index])
        maps[name] = bias[0]
    return {"heat_maps": biases.heat_maps(maps, step, gallery.index + 1)} if maps else {}


def _profiles(gallery: Gallery) -> dict[str, Figure]:
    values = {name: encoding.profile(gallery.length) for name, encoding in gallery.biased.items()}
    if not values:
        return {}
    one = {name: profile[gallery.index] for name, profile in values.items()}
    return {"profiles": biases.profiles(values), "profiles_compared": biases.compared(one, gallery.index + 1)}


def _theory(gallery: Gallery) -> dict[str, Figure]:
    heads = {name: judgement.judge([encoding])[gallery.index] for name, encoding in gallery.biased.items()}
    curves = {name: found for name, head in heads.items() if (found := judgement.fields([head]).curves)}
    title = f"Theoretical receptive field, head {gallery.index + 1}"
    return {"trf": fields.fields(curves, title=title)} if curves else {}


def _perplexity(gallery: Gallery) -> dict[str, Figure]:
    trained = _trained(gallery)
    found = findings.perplexities(trained.folder, trained.state)
    curves = {name: found.of(name) for name in found.encodings}
    return {"ppl": sweep_curves.perplexity(curves, found.trained_at)} if curves else {}


def _attention(gallery: Gallery) -> dict[str, Figure]:
    trained = gallery.trained
    if trained is None or trained.data is None:
        raise Skip("needs --sweep and --data")
    plain = [name for name in gallery.encodings if trained.state.method(name).leaves_positions]
    if not plain:
        return {}
    found = find_subjects([trained.run(name, gallery.seed).checkpoints.last for name in plain])
    named = [replace(subject, label=name) for subject, name in zip(found, plain, strict=True)]
    request = receptive.FieldRequest(data=trained.data, length=gallery.length, rpe_module=trained.rpe_module)
    length, rows = request.sized(max(subject.train_length for subject in named))
    measured = [receptive.measure(request, subject, length, rows) for subject in named]
    return {"erf": empirical.curves(measured, request.epsilons)}


def _queries(gallery: Gallery) -> dict[str, Figure]:
    at = _trained(gallery, ", because it shows learned biases").state.settings.tokens or gallery.length
    figures = {}
    for name, layers in gallery.encodings.items():
        if isinstance(layers[0], PairBias) and list(layers[0].parameters()):
            shown = sorted({at // 2, at, gallery.length})
            rows = {i: torch.stack([e.profile(i + 1).flip(-1) for e in layers]) for i in shown}
            figures[f"queries-{slug(name, gallery.seed)}"] = biases.of_queries(rows, name)
    return figures


def _training(gallery: Gallery) -> dict[str, Figure]:
    trained = _trained(gallery)
    figures = {}
    for name, layers in gallery.encodings.items():
        inspected = trained.folder.tensorboard / trained.run(name, gallery.seed).name / "encodings"
        looks = history.read(inspected) if list(layers[0].parameters()) else []
        if len(looks) < 2:
            continue
        values = {
            f"{place}, head {head + 1}": torch.tensor([look["bias"][place][head] for look in looks])
            for place, heads in looks[0]["bias"].items()
            for head in range(len(heads))
        }
        steps = [look["step"] for look in looks]
        stem = f"training-{slug(name, gallery.seed)}"
        figures[stem] = biases.over_training(values, looks[0]["distances"], steps, name)
    return figures


def _trained(gallery: Gallery, why: str = "") -> Trained:
    if gallery.trained is None:
        raise Skip(f"needs --sweep{why}")
    return gallery.trained


# what is drawn -> how, and why there may be nothing of it
FIGURES: dict[str, tuple[Callable[[Gallery], dict[str, Figure]], str]] = {
    "heat maps of exp(bias)": (_heat_maps, "none has an additive bias"),
    "bias over distance": (_profiles, "none has an additive bias"),
    "theoretical receptive field": (_theory, "no series converges"),
    "perplexity": (_perplexity, "the sweep has no finished evaluation"),
    "empirical receptive field": (_attention, "every method moves positions"),
    "learned biases of single queries": (_queries, "the sweep has no learned bias of both positions, such as fire"),
    "biases over training": (_training, "no run with learned biases was trained with --inspect-every"),
}

"""Every figure on encodings that there is, from specs or from the checkpoints of a sweep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from fairseq_rpe import encodings
from fairseq_rpe.analysis import bias_history, verdict_tables
from fairseq_rpe.analysis.bias_map import bias_map
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import check_output
from fairseq_rpe.encodings import Encoding, PairwiseBias
from fairseq_rpe.evaluation import empirical_receptive_field
from fairseq_rpe.evaluation.loading import find_subjects
from fairseq_rpe.figures import biases, receptive_fields, sweep_curves
from fairseq_rpe.figures.style import save
from fairseq_rpe.reports import sweep_results
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.run_folder import RunFolder
from fairseq_rpe.sweeps.sweep_record import State, SweepFolder, slug

_WINDOW = "window:window=64"  # the one encoding that has to be given a number
_FEW = 4  # layers of a checkpoint that are drawn unless some are named
MOST_QUERIES, LAST_QUERY = 16, 1 << 18  # of a checkpoint: how many, and the last position


@dataclass(frozen=True)
class Gallery:
    """What is drawn. ``encodings``: label -> one for the model, or one per layer.

    ``length``: tokens or distances shown; ``seed``: of initial values, or of the runs; ``index``: of the one head shown
    where one is shown, from 0.
    """

    encodings: Mapping[str, Sequence[Encoding]]
    length: int
    seed: int
    index: int

    @property
    def biased(self) -> dict[str, Encoding]:
        """The encodings with an additive bias, each layer's where they are not shared."""
        return {
            f"{name} (layer {index})" if len(layers) > 1 else name: encoding
            for name, layers in self.encodings.items()
            for index, encoding in enumerate(layers)
            if encoding.adds_bias and _reaches(encoding, self.length)
        }


@dataclass(frozen=True)
class TrainedGallery(Gallery):
    """What the runs of a sweep learned; ``data``: the text to measure them on, if they are to be."""

    folder: SweepFolder
    state: State
    data: Path | None = None
    rpe_module: Path | None = None

    def run(self, name: str) -> RunFolder:
        return self.folder.run_of(self.state.method(name), self.seed)

    def field_request(self) -> empirical_receptive_field.FieldRequest:
        """What the empirical receptive field is measured on; ``data`` must be given."""
        assert self.data is not None
        return empirical_receptive_field.FieldRequest(data=self.data, length=self.length, rpe_module=self.rpe_module)


def of_specs(specs: Sequence[str], heads: int, length: int, seed: int, head: int | None) -> Gallery:
    """Encodings with their initial values; without ``specs`` all that have a bias; ``head`` from 1, or a middle one.

    Raises UserError: one is misspelt, named twice, or has no bias, or there are not as many heads.
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
    return Gallery(found, length, seed, _index(found, head))


def of_sweep(
    folder: SweepFolder, data: Path | None, rpe_module: Path | None, length: int, seed: int, head: int | None
) -> TrainedGallery:
    """Encodings with the parameters that the runs of a sweep learned.

    Raises UserError: it is not about text, has no finished run of ``seed``, or not as many heads; or ``data`` is no
    text, or too short.
    """
    state = folder.state()
    if state.kind != "text":
        what = "algorithmic tasks" if state.algorithms else "questions"
        raise UserError(f"{folder.path} is a sweep of {what}: these figures are for text")
    paths = {name: folder.run_of(state.method(name), seed).checkpoints.last for name in state.encodings}
    found = {name: checkpoints.load(path).learned() for name, path in paths.items() if path.is_file()}
    if not found:
        raise UserError(
            f"{folder.path} holds no finished run of seed {seed}: run its sweep first or choose another --seed"
        )
    gallery = TrainedGallery(found, length, seed, _index(found, head), folder, state, data, rpe_module)
    if data is not None:  # before anything is drawn
        gallery.field_request().sized(state.settings.tokens or length)
    return gallery


def of_checkpoint(path: Path, queries: Sequence[int], layers: Sequence[int]) -> Figure:
    """What the bias of one checkpoint gives to the keys of each query; ``queries`` and ``layers`` count from 0.

    Without ``queries``: half, all and twice the training length; without ``layers``: all, of many four.
    An encoding of the user's own is to be registered before. Raises UserError: the checkpoint is damaged, its encoding
    has no additive bias, or there is no such layer or query.
    """
    checkpoint = checkpoints.load(path)
    found, name = checkpoint.learned(), checkpoint.encoding
    if not found[0].adds_bias:
        raise UserError(f"{path} has no additive bias to draw, its encoding is '{name}': name another checkpoint")
    if layers and len(found) == 1:
        raise UserError(f"--layers: all layers of {path} share one bias: leave it out")
    if wrong := [layer for layer in layers if layer >= len(found)]:
        raise UserError(f"--layers {wrong[0]}: {path} has layers 0 to {len(found) - 1}")
    trained = checkpoint.train_length() or 0
    shown = queries or sorted({n for n in (trained // 2, trained, 2 * trained) if 0 < n <= LAST_QUERY})
    if len(shown) > MOST_QUERIES:
        raise UserError(f"--query names {len(shown)} positions: choose at most {MOST_QUERIES}")
    if not shown or max(shown) > LAST_QUERY:
        given = f"--query {max(shown)} is out of range" if shown else f"{path} does not tell its training length"
        raise UserError(f"{given}: choose positions with --query, 0 to {LAST_QUERY}")
    every = list(range(len(found)))
    places = list(layers) or (every if len(every) <= _FEW else [round(k * every[-1] / (_FEW - 1)) for k in range(_FEW)])
    rows = {i: torch.stack([found[k].bias_profile(i + 1).flip(-1) for k in places]) for i in shown}
    return biases.of_queries(rows, name, places if len(found) > 1 else ())


def draw_checkpoint(path: Path, queries: Sequence[int], layers: Sequence[int], folder: Path) -> str:
    """Draw :func:`of_checkpoint` as queries.png and queries.pdf; says where."""
    files = [folder / f"queries.{end}" for end in ("png", "pdf")]
    check_output(folder, [file.name for file in files])
    save(of_checkpoint(path, queries, layers), *files)
    return f"{files[0]}, also as .pdf"


def _index(found: Mapping[str, Sequence[Encoding]], head: int | None) -> int:
    heads = min(layers[0].heads for layers in found.values())
    if head is not None and head > heads:
        raise UserError(f"--head {head}: there are {heads} heads")
    return (head or (heads + 1) // 2) - 1


def draw(gallery: Gallery, folder: Path, tick: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Draw each figure as PNG and PDF; says of each, as soon as it is there, where, and last which were not drawn.

    ``tick`` is called after each kind of :data:`FIGURES`.
    """
    trained = isinstance(gallery, TrainedGallery)
    given = {"--sweep": trained, "--data": trained and gallery.data is not None}
    skipped = []
    for name, (make, needs, reason) in FIGURES.items():
        lacking = any(option in needs and not there for option, there in given.items())
        figures = {} if lacking else make(gallery)
        if not figures:
            skipped.append(f"not drawn, {name}: {f'needs {needs}' if lacking else reason}")
        for stem, figure in figures.items():
            save(figure, *(folder / f"{stem}.{ending}" for ending in ("png", "pdf")))
            yield f"{folder / stem}.png, also as .pdf"
        tick()
    yield from skipped


def _reaches(encoding: Encoding, length: int) -> bool:
    """Whether it has a bias at so many tokens, as a table of positions may not."""
    try:
        return encoding.bias_profile(length).shape[1] == length
    except UserError:
        return False


def _heat_maps(gallery: Gallery) -> dict[str, Figure]:
    maps, step = {}, 1
    for name, encoding in gallery.biased.items():
        bias, step = bias_map(encoding, gallery.length, [gallery.index])
        maps[name] = bias[0]
    return {"heat_maps": biases.heat_maps(maps, step, gallery.index + 1)} if maps else {}


def _profiles(gallery: Gallery) -> dict[str, Figure]:
    values = {name: encoding.bias_profile(gallery.length) for name, encoding in gallery.biased.items()}
    if not values:
        return {}
    one = {name: profile[gallery.index] for name, profile in values.items()}
    return {"profiles": biases.profiles(values), "profiles_compared": biases.compared(one, gallery.index + 1)}


def _theory(gallery: Gallery) -> dict[str, Figure]:
    heads = {name: verdict_tables.judge([encoding])[gallery.index] for name, encoding in gallery.biased.items()}
    curves = {name: found for name, head in heads.items() if (found := verdict_tables.fields([head]).curves)}
    title = f"Theoretical receptive field, head {gallery.index + 1}"
    return {"trf": receptive_fields.theoretical(curves, title=title)} if curves else {}


def _perplexity(gallery: TrainedGallery) -> dict[str, Figure]:
    found = sweep_results.perplexities(gallery.folder, gallery.state)
    figures = {}
    for text, own in {"": found, **found.others}.items():
        curves, ratios = ({name: of(name) for name in own.encodings} for of in (own.of, own.ratios))
        if curves:
            stem = f"ppl-{text}" if text else "ppl"
            figures[stem] = sweep_curves.perplexity(curves, ratios, own.trained_at, text)
    return figures


def _mean_perplexity(gallery: TrainedGallery) -> dict[str, Figure]:
    found = sweep_results.perplexities(gallery.folder, gallery.state)
    lengths = found.shared_lengths
    if len(lengths) < 2:
        return {}
    values = {name: found.over_lengths(name) for name in found.encodings}
    return {"ppl_mean": sweep_curves.mean_perplexity(values, lengths)}


def _attention(gallery: TrainedGallery) -> dict[str, Figure]:
    plain = [name for name in gallery.encodings if gallery.state.method(name).leaves_positions]
    if not plain:
        return {}
    found = find_subjects([gallery.run(name).checkpoints.last for name in plain])
    named = [replace(subject, label=name) for subject, name in zip(found, plain, strict=True)]
    request = gallery.field_request()
    length, rows = request.sized(max(subject.train_length for subject in named))
    measured = [empirical_receptive_field.measure(request, subject, length, rows) for subject in named]
    return {"erf": receptive_fields.empirical(measured, request.epsilons), "erf_trf": receptive_fields.paired(measured)}


def _queries(gallery: TrainedGallery) -> dict[str, Figure]:
    at = gallery.state.settings.tokens or gallery.length
    figures = {}
    for name, layers in gallery.encodings.items():
        if isinstance(layers[0], PairwiseBias) and list(layers[0].parameters()) and _reaches(layers[0], gallery.length):
            shown = sorted({at // 2, at, gallery.length})
            rows = {i: torch.stack([e.bias_profile(i + 1).flip(-1) for e in layers]) for i in shown}
            figures[f"queries-{slug(name, gallery.seed)}"] = biases.of_queries(rows, name)
    return figures


def _training(gallery: TrainedGallery) -> dict[str, Figure]:
    figures = {}
    for name, layers in gallery.encodings.items():
        inspected = gallery.folder.tensorboard / gallery.run(name).name / "encodings"
        looks = bias_history.read(inspected) if list(layers[0].parameters()) else []
        if len(looks) < 2:
            continue
        profiles = [look["bias"] for look in looks]
        values = {
            f"{place.replace('layer', 'layer ')}, head {head + 1}": torch.tensor([at[place][head] for at in profiles])
            for place, heads in profiles[0].items()
            for head in range(len(heads))
        }
        steps = [look["step"] for look in looks]
        stem = f"training-{slug(name, gallery.seed)}"
        figures[stem] = biases.over_training(values, looks[0]["distances"], steps, name)
    return figures


# what is drawn -> how, the options that it needs, and why there may be nothing of it
FIGURES: dict[str, tuple[Callable[[Any], dict[str, Figure]], str, str]] = {
    "heat maps of exp(bias)": (_heat_maps, "", "none has an additive bias"),
    "bias over distance": (_profiles, "", "none has an additive bias"),
    "theoretical receptive field": (_theory, "", "no series converges"),
    "perplexity": (_perplexity, "--sweep", "the sweep has no finished evaluation"),
    "mean perplexity": (_mean_perplexity, "--sweep", "no two lengths at which all were evaluated"),
    "empirical receptive field": (_attention, "--sweep and --data", "every method moves positions"),
    "learned biases of single queries": (
        _queries,
        "--sweep, because it shows learned biases",
        "the sweep has no learned bias of both positions, such as fire",
    ),
    "biases over training": (_training, "--sweep", "no run with learned biases was trained with --inspect-every"),
}

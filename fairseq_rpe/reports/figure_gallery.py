"""Gallery of all figures on encodings, from specs or from the checkpoints of a sweep.

The table :data:`FIGURES` at the end of this module lists the kinds of figures, with what each of them needs.
:func:`draw_gallery` goes through the table; the functions ``_draw_…`` are its entries.

Layers count from 0, as fairseq names them in a checkpoint (``decoder.layers.0``). Heads have indices from 0 in the code
and numbers from 1 in commands and figures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from fairseq_rpe import encodings
from fairseq_rpe.analysis import bias_snapshots, verdict_tables
from fairseq_rpe.analysis.bias_snapshots import bias_map
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import format_layers
from fairseq_rpe.data.folder import check_output
from fairseq_rpe.encodings import Encoding, PairwiseBias
from fairseq_rpe.encodings.model import LayerEncodings, build_distinct
from fairseq_rpe.evaluation import empirical_receptive_field
from fairseq_rpe.evaluation.loading import label_checkpoints
from fairseq_rpe.figures import biases, receptive_fields, sweep_curves
from fairseq_rpe.figures.style import save
from fairseq_rpe.reports import sweep_results
from fairseq_rpe.reports.chapters import perplexity_figures
from fairseq_rpe.reports.kind_report import kind_report
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.run_folder import RunFolder
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord, slug

_HEAD_WIDTH = 64  # elements of a head of encodings with initial values
_DEFAULT_LAYERS = 4  # layers of a checkpoint that are drawn by default
MOST_QUERIES = 16  # upper limit of the number of queries that are drawn for a checkpoint
LAST_QUERY = 1 << 18  # upper limit of their positions


@dataclass(frozen=True)
class Gallery:
    """Encodings to draw.

    Attributes:
        encodings: label of a model -> its encodings: one that all layers share, one for each layer, or those of a
            pattern of layers.
        length: number of tokens or distances.
        head_index: index of the head in figures of one head, from 0.
    """

    encodings: Mapping[str, LayerEncodings]
    length: int
    head_index: int

    @property
    def biased_encodings(self) -> dict[str, Encoding]:
        """Encodings with an additive bias by label; the label has the layers if layers do not share an encoding."""
        return {
            _label(name, layers, instance): encoding
            for name, layers in self.encodings.items()
            for instance, encoding in enumerate(layers)
            if encoding.adds_bias and _has_bias_at(encoding, self.length)
        }


def _label(name: str, encodings: LayerEncodings, instance: int) -> str:
    """Return the label of an instance of a model's encodings, with its layers if there are several instances."""
    if encodings.is_mixed:
        layers = encodings.layers(instance)
        return f"{name} (layer{'s' if len(layers) > 1 else ''} {format_layers(layers)}: {encodings.specs[instance]})"
    return f"{name} (layer {instance})" if len(encodings) > 1 else name


@dataclass(frozen=True)
class TrainedGallery(Gallery):
    """Trained encodings of a sweep.

    Attributes:
        folder: folder of the sweep.
        record: record of the sweep.
        seed: seed of the runs that are drawn.
        data: binarised text for measurements; None: nothing is measured.
        rpe_module: Python file that registers further encodings.
    """

    folder: SweepFolder
    record: SweepRecord
    seed: int
    data: Path | None = None
    rpe_module: Path | None = None

    def run(self, name: str) -> RunFolder:
        """Return the run folder of a method."""
        return self.folder.run_folder(self.record.method(name), self.seed)

    def receptive_field_request(self) -> empirical_receptive_field.ReceptiveFieldRequest:
        """Return the request for the empirical receptive field; needs ``data``."""
        assert self.data is not None
        return empirical_receptive_field.ReceptiveFieldRequest(
            data=self.data, length=self.length, rpe_module=self.rpe_module
        )


def gallery_from_specs(specs: Sequence[str], heads: int, length: int, seed: int, head: int | None) -> Gallery:
    """Build a gallery of encodings with their initial values.

    Args:
        specs: specs of the encodings; empty: all that have a bias.
        heads: number of heads.
        length: number of tokens or distances.
        seed: seed of the initial values.
        head: number of the head in figures of one head, from 1; None: the middle one.

    Raises:
        UserError: an encoding is misspelt, named twice, or has no bias, or there are fewer heads.
    """
    by_label = {}
    for spec in specs or [_figure_spec(name) for name in encodings.names()]:
        torch.manual_seed(seed)
        if spec in by_label:
            raise UserError(f"'{spec}' is named twice: leave one out")
        built = build_distinct(spec, heads, _HEAD_WIDTH * heads, length)
        if any(encoding.adds_bias for encoding in built.values()):
            # each encoding of a pattern of layers is drawn by itself
            by_label |= {label: LayerEncodings([encoding], specs=[label]) for label, encoding in built.items()}
        elif specs:
            raise UserError(f"'{spec}' has no additive bias to draw: leave it out")
    return Gallery(by_label, length, _head_index(by_label, head))


def _figure_spec(name: str) -> str:
    """Return the spec with which an encoding is drawn if all are."""
    options = encodings.registry.get(name).figure_options
    return f"{name}:{options}" if options else name


def gallery_from_sweep(
    folder: SweepFolder, data: Path | None, rpe_module: Path | None, length: int, seed: int, head: int | None
) -> TrainedGallery:
    """Build a gallery of encodings with the trained parameters of a sweep.

    Args:
        folder: folder of the sweep.
        data: binarised text for measurements; None: nothing is measured.
        rpe_module: Python file that registers further encodings.
        length: number of tokens or distances.
        seed: seed of the runs.
        head: number of the head in figures of one head, from 1; None: the middle one.

    Raises:
        UserError: the sweep is not on text, has no finished run of ``seed`` or fewer heads; or ``data`` is not a text
            or too short.
    """
    record = folder.read_record()
    report = kind_report(record.kind)
    if not report.has_definition:
        raise UserError(f"{folder.path} is a sweep of {report.subject}: use a sweep on text")
    paths = {name: folder.run_folder(record.method(name), seed).checkpoints.last for name in record.encodings}
    by_label = {name: checkpoints.load(path).load_encodings() for name, path in paths.items() if path.is_file()}
    if not by_label:
        raise UserError(
            f"{folder.path} holds no finished run of seed {seed}: run its sweep first or choose another --seed"
        )
    gallery = TrainedGallery(
        encodings=by_label,
        length=length,
        head_index=_head_index(by_label, head),
        folder=folder,
        record=record,
        seed=seed,
        data=data,
        rpe_module=rpe_module,
    )
    if data is not None:
        # called for its checks: an unusable text is an error before anything is drawn
        gallery.receptive_field_request().resolve_block_size(record.settings.tokens or length)
    return gallery


def draw_query_biases(path: Path, queries: Sequence[int], layers: Sequence[int]) -> Figure:
    """Draw the bias of all keys for some queries of one checkpoint.

    Args:
        path: checkpoint file; encodings from a Python file must be registered before.
        queries: positions of queries, from 0; empty: half the training length, the training length, and twice as much.
        layers: indices of layers, from 0; empty: all, or four of many.

    Raises:
        UserError: the checkpoint is damaged, its encoding has no additive bias, or a layer or query does not exist.
    """
    checkpoint = checkpoints.load(path)
    loaded = checkpoint.load_encodings()
    layer_encodings = [loaded.layer(layer) for layer in range(len(loaded.index))] if loaded.is_mixed else list(loaded)
    has_layers = len(layer_encodings) > 1
    _check_layers(path, checkpoint.encoding, layer_encodings, layers)
    shown_queries = _check_queries(path, queries or _default_queries(checkpoint.train_length() or 0))
    with_bias = [layer for layer, encoding in enumerate(layer_encodings) if encoding.adds_bias]
    shown_layers = list(layers) or [with_bias[index] for index in _default_layers(len(with_bias))]
    shown_encodings = [layer_encodings[layer] for layer in shown_layers]
    rows = {query: _query_biases(shown_encodings, query) for query in shown_queries}
    return biases.draw_query_biases(rows, checkpoint.encoding, shown_layers if has_layers else ())


def _check_layers(path: Path, spec: str, layer_encodings: Sequence[Encoding], layers: Sequence[int]) -> None:
    """Check that the encodings of a checkpoint have a bias, and that the chosen layers exist."""
    count = len(layer_encodings)
    if not any(encoding.adds_bias for encoding in layer_encodings):
        raise UserError(f"{path} has no additive bias to draw, its encoding is '{spec}': use another checkpoint")
    if layers and count == 1:
        raise UserError(f"--layers: all layers of {path} share one bias: leave it out")
    if wrong := [layer for layer in layers if layer >= count]:
        raise UserError(f"--layers {wrong[0]}: {path} has layers 0 to {count - 1}")
    if wrong := [layer for layer in layers if not layer_encodings[layer].adds_bias]:
        raise UserError(f"--layers {wrong[0]}: this layer of {path} has no additive bias, its encodings are '{spec}'")


def _default_queries(train_length: int) -> list[int]:
    """Return as positions half the training length, the training length, and twice as much, up to the drawable ones."""
    return sorted({n for n in (train_length // 2, train_length, 2 * train_length) if 0 < n <= LAST_QUERY})


def _check_queries(path: Path, queries: Sequence[int]) -> Sequence[int]:
    """Return the positions of queries if they can be drawn.

    Args:
        path: checkpoint file, for messages.
        queries: positions of ``--query`` or the default ones; empty if the training length, too, is unknown.

    Raises:
        UserError: there are none, too many, or one is out of range.
    """
    remedy = f"choose positions with --query, 0 to {LAST_QUERY}"
    if not queries:
        raise UserError(f"{path} does not record its training length: {remedy}")
    if len(queries) > MOST_QUERIES:
        raise UserError(f"--query names {len(queries)} positions: choose at most {MOST_QUERIES}")
    if max(queries) > LAST_QUERY:
        raise UserError(f"--query {max(queries)} is out of range: {remedy}")
    return queries


def _default_layers(count: int) -> list[int]:
    """Return the indices of all layers, or of ``_DEFAULT_LAYERS`` evenly spaced ones of more."""
    if count <= _DEFAULT_LAYERS:
        return list(range(count))
    return [round(k * (count - 1) / (_DEFAULT_LAYERS - 1)) for k in range(_DEFAULT_LAYERS)]


def _query_biases(layers: Sequence[Encoding], query: int) -> torch.Tensor:
    """Return the biases of the keys 0 … ``query`` for one query: (layers, H, query + 1)."""
    # (H, query + 1) by distance; distance 0 is the last key, so reversed they are by key
    return torch.stack([encoding.bias_profile(query + 1).flip(-1) for encoding in layers])


def save_query_biases(path: Path, queries: Sequence[int], layers: Sequence[int], folder: Path) -> str:
    """Save :func:`draw_query_biases` as queries.png and queries.pdf, and return a line with the paths."""
    files = [folder / f"queries.{end}" for end in ("png", "pdf")]
    check_output(folder, [file.name for file in files])
    save(draw_query_biases(path, queries, layers), *files)
    return f"{files[0]}, also as .pdf"


def _head_index(by_label: Mapping[str, LayerEncodings], head: int | None) -> int:
    """Return the index of head number ``head`` (from 1), or of the middle one of the heads that all encodings have."""
    heads = min(layers[0].heads for layers in by_label.values())
    if head is not None and head > heads:
        raise UserError(f"--head {head}: there are {heads} heads")
    return (head or (heads + 1) // 2) - 1


def draw_gallery(gallery: Gallery, folder: Path, tick: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Draw each figure as PNG and PDF.

    Args:
        gallery: the encodings.
        folder: output folder.
        tick: called after each kind of figure in :data:`FIGURES`.

    Yields:
        The path of each figure, and last a line on each kind of figure that was not drawn.
    """
    options: set[str] = set()
    if isinstance(gallery, TrainedGallery):
        options = {"--sweep"} if gallery.data is None else {"--sweep", "--data"}
    skipped = []
    for name, kind in FIGURES.items():
        is_available = options.issuperset(kind.options)
        figures = kind.draw(gallery) if is_available else {}
        if not figures:
            reason = kind.nothing_reason if is_available else f"needs {' and '.join(kind.options)}{kind.options_reason}"
            skipped.append(f"not drawn, {name}: {reason}")
        for stem, figure in figures.items():
            save(figure, *(folder / f"{stem}.{ending}" for ending in ("png", "pdf")))
            yield f"{folder / stem}.png, also as .pdf"
        tick()
    yield from skipped


def _has_bias_at(encoding: Encoding, length: int) -> bool:
    """Return whether the encoding has a bias by distance at this length.

    An encoding does not state its longest text or whether it has a profile; it refuses with a UserError. One with a
    table of positions refuses more tokens than the table has, and one that reads the tokens refuses any profile.
    """
    try:
        return encoding.bias_profile(length).shape[1] == length
    except UserError:
        return False


def _draw_heat_maps(gallery: Gallery) -> dict[str, Figure]:
    """Draw exp(bias) of one head of each encoding, queries × keys."""
    sampled = {
        name: bias_map(encoding, gallery.length, [gallery.head_index])
        for name, encoding in gallery.biased_encodings.items()
    }
    if not sampled:
        return {}
    maps = {name: bias[0] for name, (bias, _) in sampled.items()}  # (1, n, n) -> (n, n)
    (step,) = {step for _, step in sampled.values()}  # the same for all, as it depends on the length alone
    return {"heat_maps": biases.draw_bias_maps(maps, step, gallery.head_index + 1)}


def _draw_profiles(gallery: Gallery) -> dict[str, Figure]:
    """Draw the bias over the distance: all heads, and one head of all encodings in comparison."""
    values = {name: encoding.bias_profile(gallery.length) for name, encoding in gallery.biased_encodings.items()}
    if not values:
        return {}
    profiles = {name: profile[gallery.head_index] for name, profile in values.items()}
    return {
        "profiles": biases.draw_profiles(values),
        "profiles_compared": biases.draw_weight_comparison(profiles, gallery.head_index + 1),
    }


def _draw_theoretical_fields(gallery: Gallery) -> dict[str, Figure]:
    """Draw the theoretical receptive fields of one head against ε, for encodings whose series converges."""
    curves = {}
    for name, encoding in gallery.biased_encodings.items():
        verdict = verdict_tables.head_verdicts([encoding])[gallery.head_index]
        if head_curves := verdict_tables.field_curves([verdict]).curves:
            curves[name] = head_curves
    title = f"Theoretical receptive field, head {gallery.head_index + 1}"
    return {"trf": receptive_fields.draw_theoretical(curves, title=title)} if curves else {}


def _draw_perplexity(gallery: TrainedGallery) -> dict[str, Figure]:
    """Draw perplexity by length, a figure for the text of the sweep and one for each further text.

    With many methods, there is a second figure with the lines of a few methods of each family.
    """
    perplexities = sweep_results.load_perplexities(gallery.folder, gallery.record)
    figures = {}
    for text, results in {"": perplexities, **perplexities.other_texts}.items():
        if results.encodings:
            methods = {name: gallery.record.method(name) for name in results.encodings}
            suffix = f"-{text}" if text else ""
            figures[f"ppl{suffix}"] = perplexity_figures.draw_perplexity(methods, results, text)
            if (extremes := perplexity_figures.draw_extremes(methods, results, text)) is not None:
                figures[f"ppl_lines{suffix}"] = extremes
    return figures


def _draw_mean_perplexity(gallery: TrainedGallery) -> dict[str, Figure]:
    """Draw the mean perplexity over the lengths at which all runs were evaluated."""
    perplexities = sweep_results.load_perplexities(gallery.folder, gallery.record)
    lengths = perplexities.shared_lengths
    if len(lengths) < 2:
        return {}
    values = {name: perplexities.seed_means(name) for name in perplexities.encodings}
    return {"ppl_mean": sweep_curves.draw_mean_perplexity(values, lengths)}


def _draw_empirical_fields(gallery: TrainedGallery) -> dict[str, Figure]:
    """Measure attention on ``data``, and draw the empirical receptive fields of methods with plain positions."""
    names = [name for name in gallery.encodings if gallery.record.method(name).leaves_positions]
    if not names:
        return {}
    subjects = label_checkpoints([gallery.run(name).checkpoints.last for name in names])
    labelled = [replace(subject, label=name) for subject, name in zip(subjects, names, strict=True)]
    request = gallery.receptive_field_request()
    length, rows = request.resolve_block_size(max(subject.train_length for subject in labelled))
    fields = [empirical_receptive_field.measure_receptive_field(request, subject, length, rows) for subject in labelled]
    return {
        "erf": receptive_fields.draw_empirical(fields, request.epsilons),
        "erf_trf": receptive_fields.draw_empirical_and_theoretical(fields),
    }


def _draw_learned_query_biases(gallery: TrainedGallery) -> dict[str, Figure]:
    """Draw the bias of single queries over their keys, a figure for each learned bias of both positions."""
    train_length = gallery.record.settings.tokens or gallery.length
    queries = sorted({train_length // 2, train_length, gallery.length})
    figures = {}
    for name, loaded in gallery.encodings.items():
        learned = {
            loaded.layers(instance)[0]: encoding
            for instance, encoding in enumerate(loaded)
            if isinstance(encoding, PairwiseBias)
            and _has_parameters(encoding)
            and _has_bias_at(encoding, queries[0] + 1)
        }
        # an encoding with a table of positions has no bias for queries beyond its end
        shown = [query for query in queries if all(_has_bias_at(e, query + 1) for e in learned.values())]
        if learned:
            rows = {query: _query_biases(list(learned.values()), query) for query in shown}
            numbers = list(learned) if len(loaded) > 1 else ()
            figures[f"queries-{slug(name, gallery.seed)}"] = biases.draw_query_biases(rows, name, numbers)
    return figures


def _has_parameters(encoding: Encoding) -> bool:
    return any(True for _ in encoding.parameters())


def _draw_biases_over_training(gallery: TrainedGallery) -> dict[str, Figure]:
    """Draw how the bias of each logged head changed in training, a figure for each method with snapshots."""
    figures = {}
    for name, layers in gallery.encodings.items():
        log_folder = gallery.folder.tensorboard / gallery.run(name).name / "encodings"
        snapshots = bias_snapshots.read_history(log_folder) if any(map(_has_parameters, layers)) else []
        if len(snapshots) < 2:
            continue
        # name of a layer -> head -> bias at each distance; EncodingLogger names the layers layer0, layer1, …, or model
        # if all of them share an encoding
        biases_by_step = [snapshot["bias"] for snapshot in snapshots]
        values = {}
        for layer, heads in biases_by_step[0].items():
            for head in range(len(heads)):
                label = f"{layer.replace('layer', 'layer ')}, head {head + 1}"  # "layer 0, head 1"
                # (steps, distances)
                values[label] = torch.tensor([layer_biases[layer][head] for layer_biases in biases_by_step])
        steps = [snapshot["step"] for snapshot in snapshots]
        stem = f"training-{slug(name, gallery.seed)}"
        figures[stem] = biases.draw_bias_over_training(values, snapshots[0]["distances"], steps, name)
    return figures


class FigureKind(NamedTuple):
    """A kind of figure of the gallery.

    Attributes:
        draw: maps a gallery to figures by the stem of their files; an empty dict if there is nothing to draw. With
            ``--sweep`` among the options it takes a :class:`TrainedGallery`, otherwise any :class:`Gallery`.
        nothing_reason: the reason to show if ``draw`` returns no figure.
        options: options of the command that ``draw`` needs.
        options_reason: why ``draw`` needs them, as the end of a message; may be empty.
    """

    draw: Callable[[Any], dict[str, Figure]]  # Any, because a Gallery does not suit the functions of a TrainedGallery
    nothing_reason: str
    options: tuple[str, ...] = ()
    options_reason: str = ""


FIGURES = {
    "heat maps of exp(bias)": FigureKind(_draw_heat_maps, "none has an additive bias"),
    "bias over distance": FigureKind(_draw_profiles, "none has an additive bias"),
    "theoretical receptive field": FigureKind(_draw_theoretical_fields, "no series converges"),
    "perplexity": FigureKind(_draw_perplexity, "the sweep has no finished evaluation", ("--sweep",)),
    "mean perplexity": FigureKind(
        _draw_mean_perplexity, "fewer than two lengths at which all runs were evaluated", ("--sweep",)
    ),
    "empirical receptive field": FigureKind(
        _draw_empirical_fields, "every method transforms positions", ("--sweep", "--data")
    ),
    "learned biases of single queries": FigureKind(
        _draw_learned_query_biases,
        "the sweep has no learned bias of both positions, such as fire",
        ("--sweep",),
        ", because it shows learned biases",
    ),
    "biases over training": FigureKind(
        _draw_biases_over_training, "no run with learned biases was trained with --log-encodings-every", ("--sweep",)
    ),
}
"""The kinds of figures by their title, in the order in which they are drawn."""

"""TensorBoard: what training, sweeps and reports write is what its own reader gives back, once, and only when asked."""

from __future__ import annotations

import io
import re
import runpy
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import error_of, make_model, run_here
from matplotlib.figure import Figure
from pages import skip_drawing
from PIL import Image
from refusal import refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.summary.writer import event_file_writer
from torch import nn

from fairseq_rpe.analysis import bias_snapshots
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.evaluation.records import ExactMatchResult, TextResult
from fairseq_rpe.figures import biases
from fairseq_rpe.modules import encoding_logger
from fairseq_rpe.modules.encoding_logger import EncodingLogger
from fairseq_rpe.reports import effective_length, figure_gallery
from fairseq_rpe.reports import tensorboard as evaluations
from fairseq_rpe.reports.sweep_results import Accuracies, Perplexities, SweepResult
from fairseq_rpe.runs import log
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord, SweepSettings, slug
from fairseq_rpe.utils import json_files

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
OPTIONS = ["--tokens", "32", "--batch-sentences", "4", "--device", "cpu", "--warmup", "1"]
UPDATES, EVERY, HEADS = 4, 2, 4
EVALUATION = "tensorboard/evaluation"
STEPS = list(range(0, UPDATES + 1, EVERY))


def read(folder: Path) -> EventAccumulator:
    """Everything below ``folder`` itself, nothing sampled away, replaced steps purged as TensorBoard does."""
    accumulator = EventAccumulator(str(folder), size_guidance=dict.fromkeys(("images", "scalars", "histograms"), 0))
    return accumulator.Reload()


def scalars(folder: Path, tag: str) -> dict[int, float]:
    found = [(e.step, e.value) for e in read(folder).Scalars(tag)]
    assert len(dict(found)) == len(found), f"{tag} has a step twice: {found}"
    return dict(found)


def pictures(folder: Path) -> dict[str, list[tuple[int, np.ndarray]]]:
    events = read(folder)
    return {
        tag: [
            (image.step, np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB")))
            for image in events.Images(tag)
        ]
        for tag in events.Tags()["images"]
    }


def parameters(checkpoints: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoints / "checkpoint_last.pt", weights_only=False)["model"]


def learned(checkpoints: Path):
    """The encoding of a checkpoint of kerple_log."""
    encoding, prefix = build("kerple_log", HEADS, 32), "decoder.encodings.0."
    values = {k.removeprefix(prefix): v for k, v in parameters(checkpoints).items() if k.startswith(prefix)}
    encoding.load_state_dict(values)
    return encoding


def draw_small(patch: pytest.MonkeyPatch) -> None:
    """Leave pictures of training empty: drawing takes most of the time of an inspection."""
    for name in ("draw_head_profiles", "draw_head_maps"):
        patch.setattr(encoding_logger, name, lambda *_: Figure((1, 1)))


def hparams_of(folder: Path) -> dict[str, str | float]:
    content = read(folder).SummaryMetadata(hparams_metadata.SESSION_START_INFO_TAG).plugin_data.content
    start = hparams_metadata.parse_session_start_info_plugin_data(content)
    return {name: value.string_value or value.number_value for name, value in start.hparams.items()}


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch) -> None:
    """Those of one second are read in the order of a counter, which is part of a name: its length must stay."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(10**6))


def train(corpus: Path, folder: Path, updates: int, *more: object) -> list[str]:
    argv = ["train", corpus, "--rpe", "kerple_log", "--out", folder / "run", "--tensorboard", folder / "tb"]
    return [*map(str, [*argv, "--updates", updates, *more]), *OPTIONS, *SMALL]


@pytest.fixture(scope="module")
def swept(corpus: Path, tmp_path_factory) -> Path:
    """A real sweep of two encodings that is inspected; its pictures are empty."""
    out = tmp_path_factory.mktemp("board") / "out"
    command = ["sweep", corpus, "--encodings", "kerple_log alibi", "--lengths", "64", "--out", out, "--jobs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        draw_small(patch)
        skip_drawing(patch)
        run_here(*command, "--updates", str(UPDATES), "--log-encodings-every", str(EVERY), *OPTIONS, *SMALL)
    return out


def test_learned_parameters_and_pictures_are_those_of_the_model_at_every_look(swept):
    folder = swept / "tensorboard/kerple_log-seed1/encodings"
    for name, values in learned(swept / "runs/kerple_log-seed1/checkpoints").logged_scalars().items():
        for head, value in enumerate(values.tolist(), start=1):
            logged = scalars(folder, f"rpe/{name}/model/head{head}")
            assert list(logged) == STEPS and logged[UPDATES] == value != logged[0]
    assert {"rpe_heads/p/model", "rpe_parameters/model/raw_a"} <= set(read(folder).Tags()["histograms"])
    for spec in ("kerple_log", "alibi"):
        shown = pictures(swept / f"tensorboard/{spec}-seed1/encodings")
        assert set(shown) == {"bias_profile/model", "exp_bias/model"}
        assert all([step for step, _ in images] == STEPS for images in shown.values())


def test_profiles_are_kept_for_figures_over_training(swept, corpus, tmp_path, monkeypatch):
    looks = bias_snapshots.read_history(swept / "tensorboard/kerple_log-seed1/encodings")
    assert [look["step"] for look in looks] == STEPS and looks[0]["distances"] == list(range(32))
    profile = learned(swept / "runs/kerple_log-seed1/checkpoints").bias_profile(32)
    assert torch.equal(torch.tensor(looks[-1]["bias"]["model"], dtype=torch.float64), profile)
    assert looks[0]["bias"] != looks[-1]["bias"]
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(figure_gallery, "save", lambda figure, *paths: drawn.update({paths[0].name: figure}))
    run_here("figures", "--sweep", swept, "--data", corpus, "--length", "16", "--out", tmp_path)
    assert {"erf.png", "erf_trf.png", "training-kerple_log-seed1.png"} <= set(drawn)
    assert "training-alibi-seed1.png" not in drawn  # nothing in it is learned
    lines = drawn["training-kerple_log-seed1.png"].axes[0].lines
    assert len(lines) == len(STEPS)
    expected = (profile[0] - profile[0].max()).tolist()
    assert any(line.get_ydata().tolist() == pytest.approx(expected) for line in lines)


def test_history_goes_on_where_a_run_was_interrupted(tmp_path):
    profile = build("alibi", 2, 8).bias_profile(700)
    first = bias_snapshots.BiasHistory(tmp_path, 0, 700)
    for step in (0, 10, 20):
        first.add(step, {"model": profile * (step + 1)})
    again = bias_snapshots.BiasHistory(tmp_path, 10, 700)
    again.add(10, {"model": profile})
    looks = bias_snapshots.read_history(tmp_path)
    assert [look["step"] for look in looks] == [0, 10]
    at = looks[1]["distances"]
    assert len(at) == 64 and (at[0], at[-1]) == (0, 699) and at == sorted(set(at))
    assert looks[1]["bias"]["model"] == profile[:, at].tolist()


def test_a_sweep_inspects_what_has_a_bias(corpus, tmp_path, capsys):
    command = ["sweep", corpus, "--lengths", "64", "--out", tmp_path / "out", "--log-encodings-every", "5"]
    done = run_here(*command, "--encodings", "rope alibi", "--tokens", "32", "--launcher", "dry-run")
    assert done.stderr == "--log-encodings-every: no bias to show in rope\n"
    printed = done.stdout.splitlines()
    [alibi], [rope] = ([s for s in printed if f" train {corpus} --rpe {name} " in s] for name in ("alibi", "rope"))
    assert "--log-encodings-every 5" in alibi and "--log-encodings-every" not in rope
    error = error_of(capsys, *command, "--encodings", "rope sinusoidal", "--tokens", "32")
    assert "no bias to show in rope, sinusoidal: drop the flag" in error
    flags = ("--rpe", "rope", "--log-encodings-every", "3", "--tensorboard", tmp_path / "tb", "--tokens", "32")
    error = error_of(capsys, "train", corpus, "--out", tmp_path / "run", *flags)
    assert "'rope' has no bias: drop the flag" in error and not any(tmp_path.iterdir())


def test_perplexity_over_length_is_the_result(swept):
    for spec in ("kerple_log", "alibi"):
        rows = json_files.read_json_lines(swept / f"runs/{spec}-seed1/eval.jsonl")
        expected = {row["length"]: row["ppl"] for row in rows}
        assert sorted(expected) == [32, 64]
        folder = swept / EVALUATION / f"{spec}-seed1"
        assert scalars(folder, "1_by_length/ppl") == pytest.approx(expected, rel=1e-6)  # TensorBoard holds float32
        for length, ppl in expected.items():
            assert scalars(folder, f"ppl_at/{length}") == pytest.approx({0: ppl}, rel=1e-6)


def test_hparams_compare_the_runs(swept):
    common = {"positions_train": "identity", "positions_eval": "identity", "seed": 1.0}
    common |= {"arch": "transformer_rpe_lm_tiny", "tokens": 32.0, "updates": float(UPDATES)}
    for spec in ("kerple_log", "alibi"):
        assert hparams_of(swept / EVALUATION / f"{spec}-seed1") == {**common, "encoding": spec}
    content = read(swept / EVALUATION).SummaryMetadata(hparams_metadata.EXPERIMENT_TAG).plugin_data.content
    experiment = hparams_metadata.parse_experiment_plugin_data(content)
    metrics = [(m.name.tag, m.display_name) for m in experiment.metric_infos]
    assert metrics[:2] == [("ppl_at/32", "ppl at 32 tokens"), ("ppl_at/64", "ppl at 64 tokens")]
    assert metrics[2:] == [effective_length.TAGS[name] for name in ("Definition 0.1", "Definition 0.1, one-sided")]
    assert [info.name for info in experiment.hparam_infos] == ["encoding", *common]
    (encoding,) = [info for info in experiment.hparam_infos if info.name == "encoding"]
    assert {v.string_value for v in encoding.domain_discrete.values} == {"kerple_log", "alibi"}


def test_the_layout_shows_what_matters_before_fairseqs_housekeeping(swept):
    """A chart a row, each of which holds something; TensorBoard shows groups, the part before a slash, by name."""
    (tensor,) = read(swept / EVALUATION).Tensors(layout_metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    titles = [category.title for category in layout.category]
    assert titles[0].startswith("perplexity over evaluation length") and titles[1].startswith("validation loss")
    assert len(titles) == len(set(titles)) == 10  # two learned quantities of kerple_log, three charts of each
    folders = {path.parent for path in (swept / "tensorboard").rglob("events*")}
    tags = {tag for folder in folders for tag in read(folder).Tags()["scalars"]}
    for category in layout.category:
        (chart,) = category.chart
        (pattern,) = chart.multiline.tag
        assert chart.title == category.title and any(re.search(pattern, tag) for tag in tags), (chart.title, pattern)
    groups = sorted({tag.partition("/")[0] for tag in tags})
    assert groups[:4] == ["1_by_length", "2_validation", "3_training", "4_encoding"]
    assert {"1_by_length/ppl", "2_validation/loss", "2_validation/ppl", "3_training/loss", "fairseq/wps"} <= tags
    assert not {"loss", "ppl", "wps", "bsz", "gnorm"} & tags
    losses = scalars(swept / "tensorboard/kerple_log-seed1/valid", "2_validation/loss")
    assert losses and losses == pytest.approx(log.read_log(swept / "runs/kerple_log-seed1/train.log").valid, abs=1e-3)


def test_a_resumed_run_has_every_step_once_and_the_numbers_of_a_run_without(corpus, tmp_path, monkeypatch):
    draw_small(monkeypatch)
    for updates in (EVERY, UPDATES):
        run_here(*train(corpus, tmp_path / "a", updates, "--log-encodings-every", EVERY))
    folder = tmp_path / "a/tb/encodings"
    assert len(list(folder.glob("events*"))) == 2
    assert list(scalars(folder, "rpe/p/model/head1")) == STEPS
    assert all([step for step, _ in images] == STEPS for images in pictures(folder).values())
    run_here(*train(corpus, tmp_path / "b", UPDATES))
    assert (tmp_path / "b/tb/train").is_dir() and not (tmp_path / "b/tb/encodings").exists()
    inspected, plain = parameters(tmp_path / "a/run"), parameters(tmp_path / "b/run")
    assert inspected.keys() == plain.keys()
    assert all(torch.equal(inspected[key], value) for key, value in plain.items())


class Decoder(nn.Module):
    """As much of a decoder as an Inspector reads."""

    def __init__(self, spec: str = "kerple_log", count: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encodings = LayerEncodings(build(spec, HEADS, 32) for _ in range(count))
        self.position_transforms = SimpleNamespace(update=-1)

    def forward(self) -> None:
        """The pre-hook is all that matters."""


def steps(inspector: EncodingLogger, decoder: Decoder, first: int, last: int) -> None:
    """Updates ``first`` … ``last`` - 1; each forward pass comes before its update."""
    hook = decoder.register_forward_pre_hook(inspector)
    decoder.train()
    for update in range(first, last):
        decoder.position_transforms.update = update
        decoder()
        decoder()  # a second batch of the same update
        with torch.no_grad():
            for parameter in decoder.encodings.parameters():
                parameter += 0.5
    hook.remove()
    if inspector.writer:
        inspector.writer.close()


def test_steps_after_the_checkpoint_of_a_killed_run_are_replaced(tmp_path, monkeypatch):
    draw_small(monkeypatch)
    steps(
        EncodingLogger("kerple_log", 2, str(tmp_path), 16, 0), Decoder(), 0, 7
    )  # killed, the checkpoint is of update 3
    folder = tmp_path / "encodings"
    before = scalars(folder, "rpe/p/model/head2")
    assert list(before) == [0, 2, 4, 6]
    steps(EncodingLogger("kerple_log", 2, str(tmp_path), 16, 0), Decoder(), 3, 9)
    after = scalars(folder, "rpe/p/model/head2")
    assert list(after) == [0, 2, 4, 6, 8]
    assert (after[0], after[2]) == (before[0], before[2]) and after[4] != before[4]
    assert Counter(len(images) for images in pictures(folder).values()) == {5: 2}


def test_pictures_decode_and_change(tmp_path):
    steps(EncodingLogger("kerple_log", 2, str(tmp_path), 32, 0), Decoder(), 0, 3)
    for images in pictures(tmp_path / "encodings").values():
        first, last = (pixels for _, pixels in images)
        assert first.shape[0] >= 300 and first.shape[1] >= 600 and len(np.unique(first)) > 20
        assert not np.array_equal(first, last)


def test_each_layer_has_pictures_of_its_own(tmp_path, monkeypatch):
    draw_small(monkeypatch)
    steps(EncodingLogger("fire", 1, str(tmp_path), 16, 0), Decoder("fire", 2), 0, 1)
    folder = tmp_path / "encodings"
    assert set(pictures(folder)) == {f"{what}/layer{n}" for what in ("bias_profile", "exp_bias") for n in (0, 1)}
    assert scalars(folder, "rpe/L/layer1") == {0: 512.0}


def test_the_last_update_is_seen_by_validation_and_a_skipped_one_is_not(tmp_path, monkeypatch):
    draw_small(monkeypatch)
    for name, stepped in (("made", True), ("skipped", False)):
        decoder, inspector = Decoder(), EncodingLogger("kerple_log", 2, str(tmp_path / name), 16, 0)
        decoder.register_forward_pre_hook(inspector)
        for update in (0, 1):
            decoder.train()
            decoder.position_transforms.update = update
            decoder()
        if stepped:
            with torch.no_grad():
                decoder.encodings[0].raw_p += 1
        decoder.eval()
        decoder()
        decoder()
        inspector.writer.close()
        assert list(scalars(tmp_path / name / "encodings", "rpe/p/model/head1")) == ([0, 2] if stepped else [0])


def test_other_ranks_and_evaluation_alone_write_nothing(tmp_path, task):
    inspector = EncodingLogger("kerple_log", 1, str(tmp_path / "tb"), 16, 1)
    steps(inspector, Decoder(), 0, 3)
    assert inspector.writer is None and not (tmp_path / "tb").exists()
    assert not make_model(task, "kerple_log").decoder._forward_pre_hooks
    model = make_model(task, "kerple_log", rpe_log_encodings_every=1, rpe_tensorboard=str(tmp_path / "tb"))
    assert len(model.decoder._forward_pre_hooks) == 1
    model(torch.randint(4, 60, (1, 8)))
    assert not (tmp_path / "tb").exists()
    with refused("--tensorboard-logdir"):
        make_model(task, "alibi", rpe_log_encodings_every=5)


def test_figures_show_the_bias():
    encoding = build("alibi", 6, 48)
    heads = bias_snapshots.spread_indices(6)
    assert heads == [0, 2, 3, 5] and bias_snapshots.spread_indices(3) == [0, 1, 2]
    bias, step = bias_snapshots.bias_map(encoding, 600, heads)
    assert (tuple(bias.shape), step) == ((4, 200, 200), 3)
    profile = encoding.bias_profile(600)
    assert torch.equal(bias[1, 150, 50], profile[2, 300])
    drawn = biases.draw_head_maps(bias, "a title", heads, step)
    panels = [axes for axes in drawn.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["head 1", "head 3", "head 4", "head 6"]
    shown = np.ma.filled(panels[1].images[0].get_array(), np.nan)
    assert shown[150, 50] == pytest.approx(profile[2, 300].exp().item()) and np.isnan(shown[50, 150])
    curves = biases.draw_head_profiles(profile, "a title").axes[0].lines
    assert len(curves) == 6 and np.array_equal(curves[5].get_ydata(), profile[5].numpy())


def test_algorithms_have_a_curve_over_items(tmp_path):
    settings = SweepSettings(arch="transformer_rpe_lm_tiny")
    sweep, state = SweepFolder(tmp_path), SweepRecord(settings, ("alibi",), (1,), algorithms=("copy",))
    place = sweep.run_folder(Method("alibi", "alibi"), 1, "copy").checkpoints
    json_files.write_json(place.record_path, {"layout": 2, "updates": 5})
    given = {"checkpoint": "c", "algorithm": "copy", "split": "test", "unit": "items", "transform": "identity"}
    given |= {"examples": 4}
    results = [ExactMatchResult(length=n, right=right, accuracy=right / 4, **given) for n, right in ((2, 4), (9, 1))]
    found = Accuracies([SweepResult("alibi", 1, result) for result in results], {"copy": 5}, {"copy": 9})
    evaluations.write_tensorboard(sweep, state, found, tmp_path / EVALUATION)
    folder = tmp_path / EVALUATION / slug("copy@alibi", 1)
    assert scalars(folder, "1_by_items/exact") == {2: 100.0, 9: 25.0}
    means = {part: scalars(folder, f"exact/{part}")[0] for part in ("trained", "beyond", "all")}
    assert means == {"trained": 100.0, "beyond": 25.0, "all": 62.5}
    assert {"task": "copy", "updates": 5}.items() <= hparams_of(folder).items()


def test_a_running_tensorboard_forgets_what_was_replaced(tmp_path):
    """Its reader goes on with the new file of a run; what it has read of the old one does not stay."""
    sweep, state = SweepFolder(tmp_path), SweepRecord(SweepSettings(tokens=32), ("alibi", "rope"), (1,))
    given = {"checkpoint": "c", "split": "test", "tokens": 9, "loss_base2": 1.0}

    def write(ppl: dict[str, dict[int, float]]) -> None:
        rows = [
            SweepResult(name, 1, TextResult(length=n, ppl=value, **given))
            for name, values in ppl.items()
            for n, value in values.items()
        ]
        evaluations.write_tensorboard(sweep, state, Perplexities(rows, 32), tmp_path / EVALUATION)

    write({"alibi": {32: 5.0, 64: 6.0}, "rope": {32: 7.0}})
    folder = tmp_path / EVALUATION / "alibi-seed1"
    assert scalars(folder, "1_by_length/ppl") == {32: 5.0, 64: 6.0}
    (replaced,) = folder.iterdir()
    shutil.copy(replaced, tmp_path / "before")
    write({"alibi": {32: 4.0, 128: 3.0}})
    (tmp_path / "before").rename(folder / "events.out.tfevents.0000000000.read-before")
    assert scalars(folder, "1_by_length/ppl") == {32: 4.0, 128: 3.0}
    assert sorted(path.name for path in (tmp_path / EVALUATION).iterdir() if path.is_dir()) == ["alibi-seed1"]
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_the_screenshot_script_says_what_is_missing(tmp_path, monkeypatch, capsys):
    script = ROOT / "docs/tools/board_screenshot.py"
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setenv("PATH", "")
    for folder, words in ((tmp_path / "none", "has no tensorboard folder: name the --out"), (tmp_path, "no browser")):
        monkeypatch.setattr(sys, "argv", [script.name, str(folder), str(tmp_path / "out")])
        with pytest.raises(SystemExit, match="1"):
            runpy.run_path(str(script), run_name="__main__")
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
        assert not (tmp_path / "out").exists()

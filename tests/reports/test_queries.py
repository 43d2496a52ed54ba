"""``figures --checkpoint``: the bias of one trained model at single queries, layer by layer."""

from __future__ import annotations

import pytest
import torch
from conftest import save_checkpoint

from fairseq_rpe.cli.main import main
from fairseq_rpe.figures import biases, style
from fairseq_rpe.reports import drawing


def stir(encoding):
    with torch.no_grad():
        for p in encoding.parameters():
            p.mul_(1.5)


def drawn(path, queries=(), layers=()):
    """Of each panel its title and its lines: (key positions, values) of each head."""
    figure = drawing.of_checkpoint(path, queries, layers)
    shown = [axes for axes in figure.axes if axes.get_visible() and axes.get_title()]
    return {axes.get_title(): [line.get_data() for line in axes.lines] for axes in shown}


def test_each_layer_and_query_is_the_learned_bias_itself(tmp_path):
    path, layers = save_checkpoint(tmp_path, "fire", 4, stir, decoder_layers=4)
    found = drawn(path, (12, 100), (1, 3))
    assert list(found) == [f"query {i}, layer {k}" for i in (12, 100) for k in (1, 3)]
    for (i, k), lines in zip([(i, k) for i in (12, 100) for k in (1, 3)], found.values(), strict=True):
        j = torch.arange(i + 1.0, dtype=torch.float64)[None]
        wanted = layers[k].double().bias(j[:, -1:], j)[0, :, 0]
        assert len(lines) == 4
        for (x, y), head in zip(lines, wanted, strict=True):
            assert list(x) == list(range(i + 1)) and y.tolist() == pytest.approx(head.tolist(), abs=1e-9)


def test_defaults_are_the_training_length_and_four_layers(tmp_path):
    path, _ = save_checkpoint(tmp_path / "a", "fire", 6, decoder_layers=6)
    assert list(drawn(path)) == [f"query {i}, layer {k}" for i in (32, 64, 128) for k in (0, 2, 3, 5)]
    path, _ = save_checkpoint(tmp_path / "b", "fire", 1, decoder_layers=6)
    assert list(drawn(path)) == ["query 32", "query 64", "query 128"]  # one for all layers
    path, _ = save_checkpoint(tmp_path / "c", "alibi", 1)  # a bias of the distance: by key position as well
    [((x, y), *_)] = drawn(path, (3,)).values()
    assert list(x) == [0, 1, 2, 3] and y.tolist() == [-0.75, -0.5, -0.25, 0.0]


def test_many_layers_stand_in_rows_of_four():
    figure = biases.of_queries({i: torch.randn(6, 3, i + 1) for i in (4, 9)}, "fire")
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible() and axes.get_title()]
    assert titles == [f"query {i}, layer {k}" for i in (4, 9) for k in range(6)]
    assert figure.get_figwidth() <= style.PAGE


def test_the_command_writes_png_and_pdf(tmp_path, capsys):
    path, _ = save_checkpoint(tmp_path, "fire", 2, decoder_layers=2)
    argv = ["--checkpoint", path, "--query", "8,20", "--layers", "1", "--out", tmp_path / "out"]
    assert main(["figures", *map(str, argv)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'queries.png'}, also as .pdf\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["queries.pdf", "queries.png"]


@pytest.mark.parametrize(
    ("spec", "layers", "flags", "words"),
    [
        ("fire", 2, ["--layers", "1,2"], "--layers 2: {path} has layers 0 to 1"),
        ("fire", 1, ["--layers", "0"], "all layers of {path} share one bias"),
        ("fire", 2, ["--query", "8,300000"], "--query 300000 is out of range: choose positions with --query, 0 to"),
        ("fire", 2, ["--query", "-1"], "'-1' is not a whole number from 0"),
        ("fire", 2, ["--query", ",".join(map(str, range(17)))], "names 17 positions: choose at most 16"),
        ("rope", 1, [], "{path} has no additive bias to draw, its encoding is 'rope'"),
        ("fire", 2, ["--head", "1"], "--checkpoint is drawn by itself"),
        ("fire", 2, ["alibi"], "--checkpoint is drawn by itself"),
    ],
)
def test_refusals_are_one_line(tmp_path, capsys, spec, layers, flags, words):
    path, _ = save_checkpoint(tmp_path, spec, layers)
    assert main(["figures", *flags, "--checkpoint", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words.format(path=path) in error
    assert not (tmp_path / "out").exists()


def test_a_broken_checkpoint_and_flags_without_one_are_one_line(tmp_path, capsys):
    path, _ = save_checkpoint(tmp_path, "fire", 2)
    path.write_bytes(path.read_bytes()[:-200])
    for argv, words in (
        (["--checkpoint", str(path)], f"{path}"),
        (["--checkpoint", str(tmp_path / "none.pt")], "none.pt"),
        (["--query", "8"], "give --checkpoint FILE too"),
        (["fire", "--layers", "0"], "give --checkpoint FILE too"),
    ):
        assert main(["figures", *argv, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and words in error

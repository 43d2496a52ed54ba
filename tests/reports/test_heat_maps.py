"""Reports on tasks with depths: heat maps, up to where an answer is found, and perplexity beside it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from conftest import run_here
from pages import skip_drawing

from fairseq_rpe.figures.heat_maps import draw_needle_maps
from fairseq_rpe.reports import report_files
from fairseq_rpe.runs.run_folder import RunFolder
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.utils import json_files

TASK = "passkey:items=64,times=4,test=20,depths=3"
# by length, the right answers of 20 at the depths 0, ½ and 1
RIGHT = {
    "alibi": {64: (20, 20, 20), 128: (20, 19, 20), 256: (4, 18, 20)},
    "kerple_log": {64: (20, 20, 18), 128: (20, 18, 20), 256: (18, 20, 20)},
    "nope": {64: (10, 20, 20), 128: (0, 0, 0), 256: (0, 0, 0)},
}
PPL = {"alibi": {64: 50.0, 256: 49.0}, "kerple_log": {64: 50.0, 256: 50.5}, "rope": {64: 50.0, 256: 90.0}}


@pytest.fixture(autouse=True)
def no_other_figures(monkeypatch) -> None:
    skip_drawing(monkeypatch)


def write_sweep(folder: Path, names, task: str | None = None, **state) -> dict[str, RunFolder]:
    """A finished sweep without results; its runs."""
    settings = {"tokens": None if task else 64, "split": "test", "updates": 75}
    json_files.write_json(
        folder / "sweep.json", {"layout": 2, "settings": settings, "encodings": [*names], "seeds": [1], **state}
    )
    runs = {name: SweepFolder(folder).run_folder(Method(name, name), 1, task) for name in names}
    for run in runs.values():
        json_files.write_json(run.checkpoints.record_path, {"layout": 2, "finished": {"checkpoint": "c"}})
    return runs


@pytest.fixture
def sought(tmp_path) -> Path:
    """A finished sweep over the task."""
    folder = tmp_path / "sought"
    for name, run in write_sweep(folder, RIGHT, TASK, algorithms=[TASK]).items():
        for n, counts in RIGHT[name].items():
            for depth, right in zip((0, 0.5, 1), counts, strict=True):
                row = {"checkpoint": "c", "algorithm": TASK, "split": "test", "length": n, "depth": depth}
                row |= {"rpe": None, "positions": None, "examples": 20, "right": right, "accuracy": right / 20}
                json_files.append_json_line(run.results, {**row, "transform": "identity"})
    return folder


@pytest.fixture
def read(tmp_path) -> Path:
    """A finished sweep on text, of other encodings in part."""
    folder = tmp_path / "read"
    for name, run in write_sweep(folder, PPL, lengths=[64, 256]).items():
        for n, ppl in PPL[name].items():
            row = {"checkpoint": "c", "split": "test", "length": n, "ppl": ppl, "loss_base2": 5.5, "tokens": 999}
            json_files.append_json_line(run.results, row)
    return folder


def lines_of(text: str, name: str) -> list[list[str]]:
    """The cells of the rows of Markdown tables that begin with a name."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if row[0] == name]


def test_report_of_a_task_with_depths(sought):
    assert report_files.current_summary(SweepFolder(sought)) is None
    said = run_here("report", sought).stdout
    assert f"heat map:    {sought / 'depths.png'}" in said and (sought / "depths.pdf").exists()
    text = (sought / "accuracy.md").read_text()
    reached, *grid, by_length = lines_of(text, "alibi")
    assert by_length == ["alibi", "100.0", "98.3", "70.0"]
    # a key of three digits; of three depths, the last 64 of 128 and 256 tokens show one
    assert lines_of(text, "(a guess)") == [["(a guess)", "0.1", "0.1", "0.1"]]
    assert lines_of(text, "(reader of the last 64 tokens)")[0][1:] == ["100", "33.4", "33.4"]
    assert reached == ["alibi", "100", "95", "20", "up to 128 tokens"]
    depths = [["64", "100", "100", "100"], ["128", "100", "95", "100"], ["256", "20", "90", "100"]]
    assert grid == [["alibi", *row] for row in depths]
    # 90 per cent are enough
    assert lines_of(text, "kerple_log")[0] == ["kerple_log", "90", "90", "90", "up to 256 tokens"]
    assert lines_of(text, "nope")[0][-1] == "no length"
    assert "a guess is right in 0.1 %; 20 examples of each length and depth" in text
    # the means over depths are what the other table goes by
    means = [row for row in lines_of(text, TASK) if row[1] == "alibi"]
    ranges = [TASK, "alibi", "100.0", f"{100 * (59 + 42) / 120:.1f}", f"{100 * (60 + 59 + 42) / 180:.1f}"]
    assert means == [ranges, [TASK, "alibi", "64 tokens", "100.0", "128", "128", "256"]]
    with open(sought / "accuracy.csv", newline="") as file:
        rows = [(r["method"], int(r["items"]), float(r["depth"]), int(r["right"])) for r in csv.DictReader(file)]
    expected = [(name, n, counts) for name, lengths in RIGHT.items() for n, counts in lengths.items()]
    assert rows == [(*of, d, r) for *of, counts in expected for d, r in zip((0, 0.5, 1), counts, strict=True)]
    page = (sought / "report.html").read_text()
    assert (
        "Is the answer found at every depth?" in page
        and "alibi: up to 128 tokens" in page
        and "number of tokens" in page
    )
    assert report_files.current_summary(SweepFolder(sought)) == said.removesuffix("\n")
    (sought / "depths.png").unlink()
    assert report_files.current_summary(SweepFolder(sought)) is None


def test_perplexity_beside_retrieval(read, sought, tmp_path):
    """ALiBi extrapolates and does not find what is far away; kerple_log does both; of rope no retrieval is known."""
    out = tmp_path / "both.html"
    said = run_here("report", read, sought, "--out", out).stdout
    joint = said[said.index("Perplexity and retrieval") :]
    alibi = ["alibi", "-0.020", "yes", "yes", "100", "20", "128 tokens", "no", "64 tokens", "≥ 256", "128"]
    assert lines_of(joint, "alibi") == [alibi] and not lines_of(joint, "rope") and not lines_of(joint, "nope")
    kerple_log = ["kerple_log", "+0.010", "yes", "yes", "90", "90", "256 tokens", "yes", "64 tokens", "≥ 256", "≥ 256"]
    assert lines_of(joint, "kerple_log") == [kerple_log]
    page = out.read_text()
    for words in ("and fails at retrieval: alibi.", "and retrieves: kerple_log."):
        text = f"Extrapolates by perplexity {words}"
        assert text in joint and text in page
    assert "read and sought" in page
    assert "Perplexity and retrieval" not in run_here("report", sought).stdout  # nothing to join


def test_what_was_not_learned_has_no_verdict(read, sought):
    results = SweepFolder(sought).run_folder(Method("alibi", "alibi"), 1, TASK).results
    rows = json_files.read_json_lines(results)
    results.unlink()
    for row in rows:
        json_files.append_json_line(results, {**row, **({"right": 2, "accuracy": 0.1} if row["length"] == 64 else {})})
    said = run_here("report", read, sought).stdout
    assert "No verdict on retrieval, because accuracy at trained lengths is below 90 %: alibi." in said
    assert lines_of(said, "alibi")[-1][-5:] == ["none", "no verdict", "64 tokens", "≥ 256", "none"]


def test_the_heat_map_shows_the_numbers():
    grid = {(64, 0.0): 100.0, (64, 1.0): 50.0, (128, 1.0): 25.0}
    figure = draw_needle_maps({"passkey": {"alibi": grid, "rope": grid}}, {"passkey": 64})
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["alibi", "rope"]
    shown = np.ma.filled(np.ma.masked_invalid(panels[0].images[0].get_array()), -1)
    assert shown.tolist() == [[100, -1], [50, 25]]
    assert [t.get_text() for t in panels[0].get_xticklabels()] == ["64", "128"]
    assert [t.get_text() for t in panels[0].get_yticklabels()] == ["0", "1"]
    assert {t.get_text() for t in panels[0].texts} == {"100", "50", "25"}
    assert panels[0].lines[0].get_xdata()[0] == 0.5  # between the trained length and the next

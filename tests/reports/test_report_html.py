"""The HTML page of a report: well-formed, self-contained, complete, and honest about what is not on record."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import error_of, run, run_here, save_checkpoint
from matplotlib.figure import Figure
from pages import LOG, PPL, Page, check_self_contained, new_page, page_of, skip_drawing, write_sweep

from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.figures.style import COLUMN
from fairseq_rpe.reports import report_files
from fairseq_rpe.reports.write import write_report
from fairseq_rpe.runs import environment
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, slug
from fairseq_rpe.utils import json_files

TASK = "copy:items=3,times=3,train=400,valid=20,test=60,alphabet=12"


@pytest.fixture(autouse=True)
def saved(monkeypatch) -> dict[str, Figure]:
    return skip_drawing(monkeypatch)


def write_starts(folder: Path, *starts: Mapping[str, object], name: str = "alibi") -> None:
    """Record the environments in which a training started."""
    record = {"starts": [{"time": "2026-01-01T00:00:00+00:00", "from_update": 0, **start} for start in starts]}
    json_files.write_json(folder / "runs" / slug(name, 1) / "checkpoints/environment.json", record)


def test_every_number_is_on_the_page_as_mean_and_range_and_the_least_is_marked(tmp_path):
    page = new_page(tmp_path, seeds=(1, 2))
    check_self_contained(page)
    with open(tmp_path / "results.csv", newline="") as file:
        expected = list(csv.DictReader(file))
    shown = page.table("Contents of results.csv")[1:]
    [exact] = [values[1:] for caption, values in page.values.items() if caption.startswith("Contents of results.csv")]
    assert len(shown) == len(exact) == len(expected) == 12
    for row, line, values in zip(expected, shown, exact, strict=True):
        assert values[:6] == [row[key] for key in ("seed", "length", "ppl", "loss_base2", "ratio", "tokens")]
        assert [line[0], line[3], line[6]] == [row["encoding"], f"{float(row['ppl']):.4f}", f"{int(row['tokens']):,}"]
    head, *lines = page.table("Perplexity per token by evaluation length")
    assert head == ["encoding", "64", "128", "256", "256 / 64"]
    cells = {line[0]: line[1:] for line in lines}
    assert cells["alibi"][0] == "51.1250.12–52.12" and cells["inv_n"][0] == "50.50★49.50–51.50"
    assert cells["alibi"][1] == "50.06★49.06–51.06" and cells["alibi"][3].endswith("★")
    assert {"50.50", "50.06", "49.50"} <= page.best and "51.12" not in page.best
    assert "Lowest perplexity at 256 tokens: alibi, 49.50." in page.words
    assert "At 256 tokens 1 of 2 have no higher perplexity than at 64." in page.words


def test_the_mean_over_lengths_is_of_those_that_all_runs_share(tmp_path):
    page = new_page(tmp_path, ppl={**PPL, "rope": {64: 48.0, 256: 60.0}}, seeds=(1, 2))
    # at 64 and 256 tokens, the second seed two more
    means = "at the 2 lengths from 64 to 256 tokens. alibi 50.31, inv_n 53.62, rope 55.00."
    assert f"Mean of the perplexities {means}" in page.alternatives()
    one = new_page(tmp_path / "one", ppl={"alibi": PPL["alibi"]})
    assert not any(alt.startswith("Mean of") for alt in one.alternatives())


def test_chapters_facts_and_costs(tmp_path):
    for name in PPL:
        save_checkpoint(tmp_path / "runs" / slug(name, 1), name)
    write_sweep(tmp_path, further={"data": "0" * 64})
    page = page_of(tmp_path, "--delta", "0.07")
    chapters = ["Perplexity over length", "Setting", "Does it extrapolate?", "Effective length", "Training", "Runs"]
    assert page.chapters() == [*chapters, "Environment", "Commands", "Every measurement"]
    lead = "2 encodings, trained at 64 tokens on data-bin/stdlib for 75 updates; "
    assert lead + "99,064 or 99,128 or 99,256 tokens of the test split" in page.words
    table = [["Σ exp(bias)", "extrapolates", "does not"], ["converges", "1: alibi", "0"], ["diverges", "0", "1: inv_n"]]
    assert page.table("Predicted (rows)") == table
    deviations = {row[0]: row[1:] for row in page.table("Relative deviation")[1:]}
    assert deviations["inv_n"] == ["diverges", "0.126", "0.126", "+0.126", "no", "no"]
    assert deviations["alibi"] == ["converges", "0.032", "0.000", "−0.032", "yes", "yes"]
    assert "agree for every method if 0.033 < δ ≤ 0.126" in page.words and "δ = 0.07" in page.words
    assert len(page.alternatives()) == 3
    # the figure stands before the setting
    figure, digest = page.source.index("data:image/svg"), page.source.index("data, SHA-256")
    assert figure < digest < page.source.index("Training loss by update")
    assert "#s1-setting" in [attrs.get("href") for tag, attrs in page.tags if tag == "a"]
    # what the log says
    head, alibi, _ = page.table("Cost of each run")
    costs = dict(zip(head[1:7], alibi[1:7], strict=True))
    assert costs["parameters"] == "1,445,376" and costs["training (s)"] == "26" and alibi[3] == "2,000"
    assert costs["training loss"] == "7.500" and costs["validation loss"] == "6.125"
    assert costs["evaluation (s)"] == "34.5" and alibi[7] == f"{(3 * 99_000 + 448) / 34.5:,.0f}"
    assert head[8:] == ["attention", "checkpoint"] and alibi[8:] == ["sdpa", "0123456789ab"]


POSITIONS = {"upto": [0, 1, 3], "loss_base2": [9.0, 8.0, 6.25], "tokens": [1, 1, 2]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [1, 1]}, "has upto, loss_base2 and tokens of different lengths"),
        ({"upto": [0, 3, 1]}, "has an upto that does not increase"),
        ({"tokens": [1, 1, -2]}, "tokens of positions_loss of the result must be a whole number above 0, not -2"),
        ({"upto": [], "loss_base2": [], "tokens": []}, "has an upto that does not increase"),
    ],
)
def test_losses_by_position_that_do_not_fit_together_are_refused(change, words, tmp_path, capsys):
    write_sweep(tmp_path, more={"positions_loss": POSITIONS | change})
    error = error_of(capsys, "report", tmp_path)
    assert "eval.jsonl line 1: " in error and "positions_loss of the result" in error and words in error


def test_loss_by_position_memory_and_engine_are_shown_where_they_are_on_record(tmp_path):
    page = new_page(tmp_path, more={"positions_loss": POSITIONS, "peak_mb": 1234.5, "engine": "blocks"})
    check_self_contained(page)
    assert page.chapters()[:3] == ["Perplexity over length", "Setting", "Loss by position"]
    [alt] = [alt for alt in page.alternatives() if "position" in alt]
    assert "blocks of 256 tokens" in alt and "alibi 6.25, inv_n 6.25" in alt
    head, alibi, _, counts = page.table("Loss in bits per token by position")
    assert head == ["position", "0", "1", "2–3"]
    assert alibi == ["alibi", "9.000", "8.000", "6.250"] and counts == ["tokens scored", "1", "1", "2"]
    head, alibi, _ = page.table("Cost of each run")
    assert head[8:10] == ["peak memory (MiB)", "engine"] and alibi[8:10] == ["1,234", "blocks"]
    head, first, *_ = page.table("Contents of results.csv")
    assert head[-2:] == ["peak memory (MiB)", "engine"] and first[-2:] == ["1234.5", "blocks"]


def test_no_page_scrolls_sideways(tmp_path):
    """In a browser, where there is one: only tables scroll, each by itself."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra docs")
    if (browser := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium here")
    new_page(tmp_path, more={"positions_loss": POSITIONS}, data="x" * 70)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for width in (375, 768, 1920):
            page = opened.new_page(viewport={"width": width, "height": 800})
            page.goto((tmp_path / "report.html").as_uri())
            root = "document.documentElement"
            needed, given = page.evaluate(f"[{root}.scrollWidth, {root}.clientWidth]")
            assert needed <= given == width
        opened.close()


def test_a_table_that_a_phone_cannot_hold_says_that_it_scrolls(tmp_path):
    few = new_page(tmp_path / "few", ppl={"alibi": {64: 50.0}})
    assert len(few.table("Perplexity per token")[0]) == 3
    assert few.source.index("swipe for more") > few.source.index("<caption>Perplexity per token")
    lengths = {n: 50.0 for n in (64, 128, 256, 512, 1024)}
    page = new_page(tmp_path, ppl={"alibi": lengths, "inv_n": lengths})
    hint, table = "7 columns: swipe for more →", "<caption>Perplexity per token by evaluation length"
    assert page.source.index(hint) < page.source.index(table)
    style = page.source.partition("<style>")[2].partition("</style>")[0]
    assert re.search(r"\.swipe \{ display: none", style) and "(max-width: 30rem) { .swipe { display: block" in style
    # the shade at the edge: one layer stays, the one that hides it moves with the table
    assert re.search(r"\.scroll \{[^}]*no-repeat local,[^}]*no-repeat scroll", style)
    wide = [rows for rows in page.tables.values() if len(rows[0]) > 5]
    assert page.source.count("swipe for more") == len(wide)


def test_a_width_is_that_of_the_files_and_tables_are_written_as_latex_on_demand(tmp_path, saved):
    before = re.findall(r"base64,[^\"]+", new_page(tmp_path).source)
    assert saved["ppl.pdf"].get_figwidth() == COLUMN and not (tmp_path / "results.tex").exists()
    page = page_of(tmp_path, "--latex", "--width", "page")
    assert saved["ppl.pdf"].get_figwidth() == WIDTHS["page"]
    assert re.findall(r"base64,[^\"]+", page.source) == before and len(before) == 3
    text = (tmp_path / "results.tex").read_text()
    shown = [caption for caption in page.tables if "Definition" in caption or "Perplexity per token" in caption]
    assert shown and text.count(r"\toprule") == text.count(r"\end{table}") >= len(shown)
    assert r"inv\_n" in text and r"\textbf{48.50}" in text
    assert text.isascii() and text.startswith("% in the preamble: \\usepackage{booktabs}")


def test_folders_of_the_machine_are_not_shown(tmp_path):
    """Paths below the folder where the sweep was started are relative; of others only the end is left."""
    home = "/home/somebody/work"
    words = f"{home}/.venv/bin/python -m fairseq_rpe.cli.main train {home}/data-bin/x --out /scratch/me/runs/a"
    words += f" --rpe-module '{home}/my file.py' --out {home} --lr 0.5/1 {home}2/y"
    write_sweep(tmp_path, commands={"alibi-seed1": {"training": [words]}}, data=f"{home}/data-bin/x")
    write_starts(tmp_path, {"working_folder": home})
    page = page_of(tmp_path)
    assert "somebody" not in page.words and "/scratch" not in page.words
    shown = "fairseq-rpe train data-bin/x --out …/a --rpe-module 'my file.py' --out . --lr 0.5/1 …/y"
    assert shown in page.words and "trained at 64 tokens on data-bin/x" in page.words


def test_what_is_not_on_record_is_said_to_be_so(tmp_path):
    page = new_page(tmp_path, log=None)
    check_self_contained(page)
    for what in ("Training curves", "Environment of training", "Commands"):
        assert f"{what}: not recorded." in page.words
    assert page.table("Cost of each run")[1][1:6] == ["not recorded"] * 5
    assert "data-bin" not in page.words


def test_environment_and_commands_are_those_of_the_training(tmp_path, monkeypatch):
    write_sweep(tmp_path, commands={"alibi-seed1": {"training": ["python -m x train"], "evaluating": ["y", "z"]}})
    later = {"time": "2026-01-02T00:00:00+00:00", "from_update": 50, "torch": "9.9.9"}
    write_starts(tmp_path, {"torch": "9.8.7", "processor": "Abacus", "gpus": []}, later)
    monkeypatch.setattr(environment, "current_start", lambda *_: pytest.fail("the reporting machine was asked"))
    page = page_of(tmp_path)
    first = dict(page.table("Recorded when training started 1 of 2")[1:])
    assert first["torch"] == "9.8.7" and first["processor"] == "Abacus" and first["runs"] == "alibi-seed1"
    assert first["GPUs"] == "none used" and first["started (UTC)"].startswith("2026-01-01")
    second = dict(page.table("Recorded when training started 2 of 2")[1:])
    assert second["torch"] == "9.9.9" and second["runs"] == "alibi-seed1 (resumed after update 50)"
    assert "Environment of training: not recorded for inv_n-seed1." in page.words
    assert "training python -m x train evaluating y evaluating z" in page.words
    assert "Commands: not recorded for inv_n-seed1." in page.words


def test_nothing_breaks_the_page(tmp_path):
    """Markup in names, paths, commands and logs is text."""
    evil = "</td><script>alert('&amp;')</script>"
    folder = tmp_path / 'a<b>&"c'
    log = LOG.replace("data-bin/stdlib", 'data<i>&"/x').replace("sdpa", "<u>")
    write_sweep(
        folder,
        ppl={evil: {64: 50.0, 128: 49.0}, 'type1:variant="&lt;"': {64: 51.0, 128: 50.0}},
        log=log,
        more={"engine": "<engine>"},
        commands={slug(evil, 1): {"training": [f"python {evil} 'a b' > x"]}},
        published={"source": "Table <9> & more", "url": "https://arxiv.org/abs/1", evil: {"128": 3.0}},
    )
    write_starts(folder, {"time": "<t>", "processor": '<b>"&'}, name=evil)
    page = page_of(folder)
    check_self_contained(page)
    texts = (evil, 'type1:variant="&lt;"', f"python {evil} 'a b' > x", 'data<i>&"/x', '<b>"&', "Table <9> & more")
    assert [text for text in (*texts, "<engine>", 'a<b>&"c') if text not in page.words] == []


def test_several_sweeps_on_one_page(tmp_path, capsys):
    for name in ("one", "two"):
        write_sweep(tmp_path / name)
    folders, out = (tmp_path / "two", tmp_path / "one"), tmp_path / "all" / "both.html"

    class Both(Page):
        def handle_endtag(self, tag):
            if tag == "table":  # captions repeat
                self._caption = f"{len(self.tables)} {self._caption}"
            super().handle_endtag(tag)

    assert "named twice" in error_of(capsys, "report", folders[0], folders[0])
    for path in (tmp_path / "one/sweep.json", tmp_path / "one/runs/alibi-seed1/eval.jsonl", tmp_path / "notes.html"):
        path.touch()
        path.write_text(before := path.read_text() or "<!DOCTYPE html>")
        error = error_of(capsys, "report", *folders, "--out", path)
        assert f"{path.name} is not a page of this command" in error and path.read_text() == before
    for name in ("report.html", "results.md", "ppl.pdf", "results.tex"):
        error = error_of(capsys, "report", *folders, "--latex", "--out", tmp_path / "two" / name)
        assert "is a file of the report on" in error
    assert not (tmp_path / "one/report.html").exists()
    for _ in range(2):  # its own page is replaced
        assert str(out) in run_here("report", *folders, "--out", out).stdout
    page = Both(out)
    check_self_contained(page)
    assert [title for level, title in page.headings if level <= 2] == ["2 sweeps", "two", "one"]
    assert all((tmp_path / name / "report.html").is_file() for name in ("one", "two"))
    assert page.headings.count((3, "Runs")) == 2


def test_a_report_of_very_many_measurements_can_be_read(tmp_path):
    """Its table and description show some lengths, its page names the file that has all."""
    write_sweep(tmp_path, ppl={"alibi": {}, "type1": {}})
    lengths = range(60, 3060)
    for name in ("alibi", "type1"):
        row = {"checkpoint": "0123456789abcdef", "split": "test", "loss_base2": 5.5, "tokens": 99_000}
        lines = [json.dumps({**row, "length": n, "ppl": 40 + n / 100}) + "\n" for n in lengths]
        (tmp_path / "runs" / f"{name}-seed1" / "eval.jsonl").write_text("".join(lines))
    page = page_of(tmp_path)
    head, alibi, _ = page.table("Perplexity per token by evaluation length")
    shown = [int(n) for n in head[1:-1]]
    assert shown[0] == 60 and 64 in shown and shown[-1] == 3059 and shown == sorted(shown) and 40 <= len(shown) <= 48
    assert dict(zip(shown, alibi[1:-1], strict=True))[64] == "40.64★" and f"{len(shown)} of 3,000 lengths" in page.words
    assert "results.csv has all 6,000 measurements" in page.words and len(page.source) < 1_000_000
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 6001
    assert all(len(attrs["alt"]) < 3000 for tag, attrs in page.tags if tag == "img")


@pytest.fixture
def algorithmic(tmp_path) -> Path:
    """A finished sweep over a task of up to 9 items, 3 of them in training."""
    published = {"source": "Table A", "warping": {"copy": 43.2}, "settings": {"batch_sentences": 64, "updates": 75}}
    settings = {"split": "test", "updates": 75, "batch_sentences": 64, "arch": "transformer_rpe_lm_tiny"}
    methods = {"warping": {"rpe": "rope", "positions_train": "warp", "positions_eval": "interpolate"}}
    state = {
        "layout": 2,
        "settings": settings,
        "methods": methods,
        "algorithms": [TASK],
        "encodings": ["rope", "warping"],
    }
    json_files.write_json(tmp_path / "sweep.json", {**state, "seeds": [1], "published": published})
    for name, right in (("rope", 1), ("warping", 3)):
        method = Method(name, **methods.get(name, {"rpe": name}))
        place = tmp_path / "runs" / method.run_name(1, TASK)
        json_files.write_json(place / "checkpoints/run.json", {"layout": 2, "finished": {"checkpoint": "c"}})
        (place / "train.log").write_text(LOG)
        for n in range(2, 10):
            row = {"checkpoint": "c", "algorithm": TASK, "split": "test", "unit": "items", "length": n}
            row |= {"positions": method.positions_eval, "examples": 8, "right": right, "accuracy": right / 8}
            json_files.append_json_line(place / "eval.jsonl", {**row, "transform": "identity", "seconds": 1.0})
    return tmp_path


def test_algorithmic_sweep_has_exact_match_and_no_perplexity(algorithmic):
    page = page_of(algorithmic)
    check_self_contained(page)
    chapters = [
        "Exact match",
        "Setting",
        "Effective length",
        "Comparison with published values",
        "Training",
        "Runs",
        "Environment",
        "Commands",
    ]
    assert page.chapters() == [*chapters, "Every measurement"] and "erplexity" not in page.words
    head, rope, warping = page.table(f"{TASK}: exact match in %")
    assert any("Published: not comparable" in caption for caption in page.tables) and "Not comparable." in page.words
    assert head == ["method", "trained", "beyond", "all", "published"]
    assert rope == ["rope", "12.5", "12.5", "12.5", ""] and warping[1:] == ["37.5★"] * 3 + ["43.2★"]
    assert f"Highest accuracy on {TASK} beyond the training range: warping, 37.5 %." in page.words
    same = {name: row[2] for name, row in page.same().items() if row[2] != "not verified"}
    assert same == {"sequences per update": "yes", "updates": "yes"} and "betas" in page.same()
    with open(algorithmic / "accuracy.csv", newline="") as file:
        expected = [[r[k] for k in ("seed", "items", "examples", "right", "accuracy")] for r in csv.DictReader(file)]
    _, *rows = page.values["Contents of accuracy.csv."]
    assert [row[:5] for row in rows] == expected and len(expected) == 16


def test_delta_is_refused_for_it_before_anything_is_written(algorithmic, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("text")
    write_sweep(other)
    assert "has exact-match accuracies" in error_of(capsys, "report", other, algorithmic, "--delta", "0.1")
    assert not (other / "report.html").exists()


KEPT = """
import pathlib, sys
from fairseq_rpe.reports import report_files
from fairseq_rpe.sweeps.sweep_record import SweepFolder
for folder in sys.argv[1:]:
    print(report_files.current_summary(SweepFolder(pathlib.Path(folder))))
assert not {"torch", "fairseq", "matplotlib", "jinja2"} & set(sys.modules)
"""


def test_a_report_with_nothing_new_keeps_the_page_without_torch(algorithmic, tmp_path):
    write_sweep(tmp_path / "text")
    sweeps = [SweepFolder(tmp_path / "text"), SweepFolder(algorithmic)]
    assert [report_files.current_summary(sweep) for sweep in sweeps] == [None, None]
    texts = [write_report(sweep).text for sweep in sweeps]
    pages = [sweep.path / "report.html" for sweep in sweeps]
    before, made = ([page.read_bytes() for page in pages], [page.stat().st_mtime_ns for page in pages])
    output = run(sys.executable, "-c", KEPT, *(sweep.path for sweep in sweeps)).stdout
    assert output == "".join(f"{text}\n" for text in texts) and all(str(page) in output for page in pages)
    assert [page.stat().st_mtime_ns for page in pages] == made
    for sweep, page, text, content in zip(sweeps, pages, texts, before, strict=True):
        assert report_files.current_summary(sweep) == text
        page.unlink()
        assert report_files.current_summary(sweep) is None
        assert write_report(sweep).text == text and page.read_bytes() == content  # it is the same each time
    path = tmp_path / "text/runs/alibi-seed1/eval.jsonl"
    path.write_text(path.read_text().replace("48.5", "48.75"))  # out of date
    assert report_files.current_summary(sweeps[0]) is None
    assert "| alibi      | 50.12 | 49.06 | 48.75 |" in write_report(sweeps[0]).text

"""The HTML page of a report: well-formed, self-contained, complete, and honest about what is not on record."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import run, save_checkpoint
from matplotlib.figure import Figure

from fairseq_rpe.cli.main import main
from fairseq_rpe.core import UserError, files
from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.figures.style import COLUMN
from fairseq_rpe.reports import kept
from fairseq_rpe.reports.write import write
from fairseq_rpe.runs import environment
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.state import Method, SweepFolder, slug

VOID = {"meta", "img", "br", "hr", "link", "input"}
TASK = "copy:items=3,times=3,train=400,valid=20,test=60,alphabet=12"
LOG = """\
2026 | INFO | fairseq.tasks.language_modeling | dictionary: 4096 types
2026 | INFO | fairseq_rpe.attention.select | attention backend: sdpa
2026 | INFO | fairseq_cli.train | num. shared model params: 1,445,376 (num. trained: 1,445,376)
2026 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)
2026 | INFO | fairseq.data.data_utils | loaded 294,072 examples from: data-bin/stdlib/train
2026 | INFO | train_inner | {"loss": "9.5", "wps": "1000", "num_updates": "25", "train_wall": "2", "wall": "3"}
2026 | INFO | train_inner | {"loss": "7.25", "wps": "3000", "num_updates": "50", "train_wall": "2", "wall": "6"}
2026 | INFO | train_inner | {"loss": "6.0", "wp
2026 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)
2026 | INFO | train_inner | {"loss": "7.5", "wps": "2000", "num_updates": "50", "train_wall": "2", "wall": "8"}
2026 | INFO | valid | {"epoch": 1, "valid_loss": "6.125", "valid_num_updates": "75"}
2026 | INFO | train | {"train_loss": "7", "train_num_updates": "75", "train_train_wall": "9", "train_wall": "20"}
"""
PPL = {"alibi": {64: 50.125, 128: 49.0625, 256: 48.5}, "inv_n": {64: 49.5, 128: 52.25, 256: 55.75}}


@pytest.fixture(autouse=True)
def saved(monkeypatch) -> dict[str, Figure]:
    """The figures beside the pages, by file. Drawing takes most of a report's time and is tested elsewhere."""
    figures: dict[str, Figure] = {}

    def save(figure: Figure, *paths: Path) -> None:
        figures.update((path.name, figure) for path in paths)
        for path in paths:
            path.touch()

    monkeypatch.setattr("fairseq_rpe.figures.style.save", save)
    monkeypatch.setattr("fairseq_rpe.figures.sweep_curves.name_ends", lambda *_: None)
    monkeypatch.setattr("fairseq_rpe.reports.page.to_svg", lambda figure: f"<svg {figure.get_figwidth()}/>".encode())
    return figures


class Page(HTMLParser):
    """A page as its reader sees it; an element that is not closed in order is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.values: dict[str, list[list[str]]] = {}
        self.best: set[str] = set()
        self._rows: list[list[str]] = []
        self._values: list[list[str]] = []
        self._caption = ""
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows, self._values, self._caption = [], [], ""
        elif tag == "tr":
            self._rows.append([])
            self._values.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
        elif tag == "data":
            self._values[-1].append(dict(attrs)["value"])
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"
        if tag == "table":
            assert self._caption not in self.tables
            self.tables[self._caption], self.values[self._caption] = self._rows, self._values

    def handle_data(self, data):
        self.text.append(data)
        if "caption" in self.open:
            self._caption += data
        elif self._rows and self._rows[-1] and {"th", "td"} & set(self.open):
            self._rows[-1][-1] += data
            if "strong" in self.open and data != "★":
                self.best.add(data)
        if self.open and re.fullmatch("h[1-6]", self.open[-1]):
            level, before = self.headings[-1]
            self.headings[-1] = (level, before + data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())

    def table(self, start: str) -> list[list[str]]:
        """The one table whose caption begins like this."""
        [found] = [rows for caption, rows in self.tables.items() if caption.startswith(start)]
        return found

    def chapters(self) -> list[str]:
        return [title for level, title in self.headings if level == max(level for level, _ in self.headings)]

    def same(self) -> dict[str, list[str]]:
        """What is compared with the published setting: here, there, and whether they agree."""
        return {row[0]: row[1:] for row in self.table("What is the same")[1:]}

    def alternatives(self) -> list[str]:
        return [attrs["alt"] or "" for tag, attrs in self.tags if tag == "img"]


def write_sweep(folder: Path, ppl=PPL, seeds=(1,), log: str | None = LOG, more=(), **state) -> None:
    """A finished sweep at 64 tokens (plus 2 of perplexity per further seed); ``more``: keys of every result."""
    lengths = sorted({n for values in ppl.values() for n in values})
    settings = {"tokens": 64, "subset": "test", "updates": 75, "batch_sentences": 16, "lr": 2e-3, "warmup": 80}
    settings |= {"arch": "transformer_rpe_lm_tiny", "extra": []} | state.pop("further", {})
    state = {"settings": settings, "encodings": list(ppl), "seeds": list(seeds), "lengths": lengths, **state}
    files.write_json(folder / "sweep.json", state)
    for name, values in ppl.items():
        for k, seed in enumerate(seeds):
            place = folder / "runs" / Method(name, name).run_name(seed)
            files.write_json(place / "checkpoints" / "run.json", {"finished": {"checkpoint": "0123456789abcdef"}})
            if log is not None:
                (place / "train.log").write_text(log)
            for n, value in values.items():
                row = {"checkpoint": "0123456789abcdef", "subset": "test", "length": n, "ppl": value + 2 * k}
                row |= {"loss_base2": 5.5 + n / 1024, "tokens": 99_000 + n, "seconds": 11.5, **dict(more)}
                files.append_json_line(place / "eval.jsonl", row)


def page_of(folder: Path, *flags: str) -> Page:
    assert main(["report", str(folder), *flags]) == 0
    return Page(folder / "report.html")


def page_beside(folder: Path, published: Mapping[str, object], **state) -> Page:
    """The page of a sweep beside published values."""
    write_sweep(folder, published=published, **state)
    return page_of(folder)


def published(recipe: str, **settings) -> dict:
    known = recipes.load(recipe).published.record()
    return {**known, "settings": {**known["settings"], **settings}}


def alibi_starts(folder: Path, *starts: Mapping[str, object]) -> None:
    """Record the environments in which the training of alibi started."""
    record = {"starts": [{"time": "2026-01-01T00:00:00+00:00", "from_update": 0, **start} for start in starts]}
    files.write_json(folder / "runs/alibi-seed1/checkpoints/environment.json", record)


def check_self_contained(page: Page) -> None:
    """Nothing is fetched, every link leads somewhere, tables and pictures can be read aloud."""
    identifiers = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(identifiers)) == len(identifiers)
    used = {tag for tag, _ in page.tags}
    assert not used & {"script", "link", "iframe", "object", "embed", "base", "form", "source", "video", "audio"}
    for tag, attrs in page.tags:
        for name, value in attrs.items():
            assert not name.startswith("on") and name not in ("style", "srcset", "xlink:href", "background")
            if name == "src":
                assert tag == "img" and value.startswith("data:image/svg+xml;base64,")
            if name == "href":
                assert tag == "a" and (value.startswith("https://arxiv.org/abs/") or value[1:] in identifiers)
            if name in ("aria-labelledby", "aria-describedby"):
                assert value in identifiers
    style = page.source.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert "prefers-color-scheme: dark" in style and "@media print" in style
    outside = page.source.replace("https://arxiv.org/abs/", "")
    assert "http:" not in outside and "https:" not in outside
    assert all(len(attrs.get("alt") or "") > 20 for tag, attrs in page.tags if tag == "img")
    assert all(attrs.get("scope") in ("col", "row", "colgroup") for tag, attrs in page.tags if tag == "th")
    assert page.tables and "" not in page.tables
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    assert ("html", {"lang": "en"}) in page.tags and page.source.startswith("<!DOCTYPE html>")


def test_every_number_is_on_the_page_as_mean_and_range_and_the_least_is_marked(tmp_path):
    write_sweep(tmp_path, seeds=(1, 2))
    page = page_of(tmp_path)
    check_self_contained(page)
    with open(tmp_path / "results.csv", newline="") as file:
        expected = list(csv.DictReader(file))
    [caption] = [caption for caption in page.tables if caption.startswith("What results.csv holds")]
    shown, exact = page.tables[caption][1:], page.values[caption][1:]
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
    write_sweep(tmp_path, {**PPL, "rope": {64: 48.0, 256: 60.0}}, seeds=(1, 2))
    # at 64 and 256 tokens, the second seed two more
    means = "at the 2 lengths from 64 to 256 tokens. alibi 50.31, inv_n 53.62, rope 55.00."
    assert f"Mean of the perplexities {means}" in page_of(tmp_path).alternatives()
    write_sweep(tmp_path / "one", {"alibi": PPL["alibi"]})
    assert not any(alt.startswith("Mean of") for alt in page_of(tmp_path / "one").alternatives())


def test_chapters_facts_and_costs(tmp_path):
    for name in PPL:
        save_checkpoint(tmp_path / "runs" / slug(name, 1), name)
    write_sweep(tmp_path, further={"data": "0" * 64})
    page = page_of(tmp_path, "--delta", "0.07")
    chapters = ["Perplexity over length", "Setting", "Does it extrapolate?", "Training", "Runs", "Environment"]
    assert page.chapters() == [*chapters, "Commands", "Every measurement"]
    lead = "2 encodings, trained at 64 tokens on data-bin/stdlib for 75 updates; "
    assert lead + "99,064 or 99,128 or 99,256 tokens of the test split" in page.words
    table = [["Σ exp(bias)", "extrapolates", "does not"], ["converges", "1: alibi", "0"], ["diverges", "0", "1: inv_n"]]
    assert page.table("Predicted (rows)") == table
    deviations = {row[0]: row[1:] for row in page.table("Relative deviation")[1:]}
    assert deviations["inv_n"] == ["diverges", "0.126", "0.126", "+0.126", "no", "no"]
    assert deviations["alibi"] == ["converges", "0.032", "0.000", "−0.032", "yes", "yes"]
    assert "agree for every method if 0.032 < δ ≤ 0.126" in page.words and "δ = 0.07" in page.words
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
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "eval.jsonl line 1: " in error and "positions_loss of the result" in error and words in error


def test_loss_by_position_memory_and_engine_are_shown_where_they_are_on_record(tmp_path):
    write_sweep(tmp_path, more={"positions_loss": POSITIONS, "peak_mb": 1234.5, "engine": "blocks"})
    page = page_of(tmp_path)
    check_self_contained(page)
    assert page.chapters()[:3] == ["Perplexity over length", "Setting", "Loss by position"]
    [alt] = [alt for alt in page.alternatives() if "position" in alt]
    assert "blocks of 256 tokens" in alt and "alibi 6.25, inv_n 6.25" in alt
    head, alibi, _, counts = page.table("Loss in bits per token by position")
    assert head == ["position", "0", "1", "2–3"]
    assert alibi == ["alibi", "9.000", "8.000", "6.250"] and counts == ["tokens scored", "1", "1", "2"]
    head, alibi, _ = page.table("Cost of each run")
    assert head[8:10] == ["peak memory (MiB)", "engine"] and alibi[8:10] == ["1,234", "blocks"]
    head, first, *_ = page.table("What results.csv holds")
    assert head[-2:] == ["peak memory (MiB)", "engine"] and first[-2:] == ["1234.5", "blocks"]


@pytest.mark.parametrize("width", [375, 768, 1920])
def test_no_page_scrolls_sideways(tmp_path, width):
    """In a browser, where there is one: only tables scroll, each by itself."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra docs")
    if (browser := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium here")
    write_sweep(tmp_path, more={"positions_loss": POSITIONS}, data="x" * 70)
    page_of(tmp_path)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": width, "height": 800})
        page.goto((tmp_path / "report.html").as_uri())
        needed, given = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        opened.close()
    assert needed <= given == width


def test_a_table_that_a_phone_cannot_hold_says_that_it_scrolls(tmp_path):
    write_sweep(tmp_path / "few", ppl={"alibi": {64: 50.0}})
    few = page_of(tmp_path / "few")
    assert len(few.table("Perplexity per token")[0]) == 3
    assert few.source.index("swipe for more") > few.source.index("<caption>Perplexity per token")
    lengths = {n: 50.0 for n in (64, 128, 256, 512, 1024)}
    write_sweep(tmp_path, ppl={"alibi": lengths, "inv_n": lengths})
    page = page_of(tmp_path)
    hint = "7 columns: swipe for more →"
    assert page.source.index(hint) < page.source.index("<caption>Perplexity per token by evaluation length")
    style = page.source.partition("<style>")[2].partition("</style>")[0]
    assert re.search(r"\.swipe \{ display: none", style) and "(max-width: 30rem) { .swipe { display: block" in style
    # the shade at the edge: one layer stays, the one that hides it moves with the table
    assert re.search(r"\.scroll \{[^}]*no-repeat local,[^}]*no-repeat scroll", style)
    wide = [rows for rows in page.tables.values() if len(rows[0]) > 5]
    assert page.source.count("swipe for more") == len(wide)


def test_a_width_is_that_of_the_files_and_tables_are_written_as_latex_on_demand(tmp_path, saved):
    write_sweep(tmp_path)
    before = re.findall(r"base64,[^\"]+", page_of(tmp_path).source)
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
    words = f"{home}/.venv/bin/python -m fairseq_rpe.cli.main train {home}/data-bin/x --save-dir /scratch/me/runs/a"
    words += f" --rpe-module '{home}/my file.py' --out {home} --lr 0.5/1 {home}2/y"
    write_sweep(tmp_path, commands={"alibi-seed1": {"training": [words]}}, data=f"{home}/data-bin/x")
    alibi_starts(tmp_path, {"working_folder": home})
    page = page_of(tmp_path)
    assert "somebody" not in page.words and "/scratch" not in page.words
    shown = "fairseq-rpe train data-bin/x --save-dir …/a --rpe-module 'my file.py' --out . --lr 0.5/1 …/y"
    assert shown in page.words and "trained at 64 tokens on data-bin/x" in page.words


def test_what_is_not_on_record_is_said_to_be_so(tmp_path):
    write_sweep(tmp_path, log=None)
    page = page_of(tmp_path)
    check_self_contained(page)
    for what in ("Training curves", "Environment of training", "Commands"):
        assert f"{what}: not recorded." in page.words
    assert page.table("Cost of each run")[1][1:6] == ["not recorded"] * 5
    assert "data-bin" not in page.words


def test_environment_and_commands_are_those_of_the_training(tmp_path, monkeypatch):
    write_sweep(tmp_path, commands={"alibi-seed1": {"training": ["python -m x train"], "evaluating": ["y", "z"]}})
    later = {"time": "2026-01-02T00:00:00+00:00", "from_update": 50, "torch": "9.9.9"}
    alibi_starts(tmp_path, {"torch": "9.8.7", "processor": "Abacus", "gpus": []}, later)
    monkeypatch.setattr(environment, "now", lambda *_: pytest.fail("the reporting machine was asked"))
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
        ppl={evil: {64: 50.0, 128: 49.0}, 'type1:form="&lt;"': {64: 51.0, 128: 50.0}},
        log=log,
        more={"engine": "<engine>"},
        commands={slug(evil, 1): {"training": [f"python {evil} 'a b' > x"]}},
        published={"source": "Table <9> & more", "url": "https://arxiv.org/abs/1", evil: {"128": 3.0}},
    )
    start = {"time": "<t>", "from_update": 0, "processor": '<b>"&'}
    files.write_json(folder / "runs" / slug(evil, 1) / "checkpoints/environment.json", {"starts": [start]})
    page = page_of(folder)
    check_self_contained(page)
    assert evil in page.words and 'type1:form="&lt;"' in page.words
    assert f"python {evil} 'a b' > x" in page.words and 'data<i>&"/x' in page.words and '<b>"&' in page.words
    assert "Table <9> & more" in page.words and "<engine>" in page.words and 'a<b>&"c' in page.words


def test_published_values_stand_beside_ours_and_what_differs_is_named(tmp_path):
    known = published("extrapolation-wikitext103")
    older = {key: value for key, value in known.items() if key not in ("url", "settings")}
    for folder, record in ((tmp_path / "new", known), (tmp_path / "old", older)):
        page = page_beside(folder, record, recipe="extrapolation-wikitext103")
        check_self_contained(page)
        head, alibi, inv_n = page.table("Published: Tables 4 and 6")
        assert head[1:3] == ["512", "768"] and head[-1] == "9216"
        assert alibi[1] == "24.22★" and inv_n[1] == "24.67" and alibi[-1] == "22.12★"
        assert ("a", {"href": "https://arxiv.org/abs/2307.10156"}) in page.tags
        assert "Not comparable." in page.words and "Compare trends only" in page.words
        same = page.same()
        assert same["data"] == ["data-bin/stdlib", "WikiText-103", "no"]
        assert same["tokeniser"] == ["4,096 types", "BPE, 50,265 types", "no"]
        layers = ["2 layers of width 128, 4 heads", "6 layers of width 512, 8 heads", "no"]
        assert same["layers, width, heads"] == layers and same["training length"] == ["64", "512", "no"]
        assert same["schedule"] == ["inverse_sqrt", "inverse_sqrt", "yes"]
        assert same["betas"] == ["0.9, 0.98", "0.9, 0.98", "yes"] and same["weight decay"] == ["0.01", "0.01", "yes"]
        # what the paper does not state is shown, and not said to be the same
        assert same["activation"] == ["relu", "not stated", "not verified"]
        assert same["embeddings"] == ["two tables", "not stated", "not verified"]
        assert same["gradients clipped at"][1:] == ["not stated", "not verified"]
        assert same["optimiser"] == ["AdamW", "Adam", "not verified"]
        assert same["training sequences"] == ["across documents", "not stated", "not verified"]
        groups, head, alibi, inv_n = page.table("Trends")
        assert groups == ["", "2 L", "4 L"] and head == ["", *["here", "published"] * 2]
        assert alibi == ["alibi", "0.979", f"{23.06 / 24.22:.3f}", "0.968", f"{22.52 / 24.22:.3f}"]


def test_published_logarithms_are_shown_as_printed_and_compared_as_perplexities(tmp_path):
    values = {"alibi": {"64": 3.32, "128": 3.248}, "inv_n": {"64": 3.1, "128": 3.4}}
    page = page_beside(tmp_path, {"source": "Table <4>", "measure": "log_ppl", "settings": {"tokens": 64}, **values})
    rows = [["published", "64", "128"], ["alibi", "3.320", "3.248★"], ["inv_n", "3.100★", "3.400"]]
    assert page.table("Published: Table") == rows
    _, _, alibi, inv_n = page.table("Trends")
    assert alibi[2] == f"{math.exp(3.248 - 3.32):.3f}" and inv_n[2] == f"{math.exp(0.3):.3f}"
    assert "| 3.248 |" in (tmp_path / "results.md").read_text()


def test_same_names_are_not_taken_for_the_same_data(tmp_path):
    known = published("extrapolation-wikitext103", vocabulary=4096, tokens=64)
    for name in ("wikitext103", "wikitext103-gpt2"):
        same = page_beside(tmp_path / name, known, data=f"data-bin/{name}").same()
        assert same["data"][2] == "not verified: the same name" and same["tokeniser"][2] == "not verified"
        assert same["training length"][2] == "yes" and same["updates"][2] == "no"


def test_blocks_within_documents_are_said_and_compared(tmp_path):
    page = page_beside(tmp_path, published("fire-lm"), further={"blocks": "document"})
    assert "within documents" in page.words and "75 updates of up to 1,024 tokens" in page.words
    same = page.same()
    assert same["training sequences"] == ["within documents", "within documents", "yes"]
    assert "full ones" in same["sequences per update"][0] and same["sequences per update"][2] == "not verified"


def test_results_on_other_blocks_are_no_results_of_a_sweep(tmp_path):
    write_sweep(tmp_path)
    place = tmp_path / "runs" / Method("alibi", "alibi").run_name(1)
    row = files.read_json_lines(place / "eval.jsonl")[0]
    files.append_json_line(place / "eval.jsonl", {**row, "blocks": "document", "ppl": 7.0})
    page_of(tmp_path)
    found = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [float(one["ppl"]) for one in found if one["encoding"] == "alibi"] == list(PPL["alibi"].values())


def test_model_and_optimiser_are_compared_one_by_one(tmp_path):
    """A model of the same layers with another activation, untied, of more parameters is not the same."""
    of_brown = {"betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": "cosine", "min_lr": 6e-5}
    same = page_beside(tmp_path, published("fire-lm", **of_brown, share_embeddings=True)).same()
    assert same["activation"] == ["relu", "gelu", "no"]
    assert same["embeddings"] == ["two tables", "one table for input and output", "no"]
    assert same["parameters"] == ["1,445,376", "125,000,000", "no"]
    assert same["optimiser"] == ["AdamW", "AdamW", "yes"] and same["betas"] == ["0.9, 0.98", "0.9, 0.95", "no"]
    assert same["schedule"][1:] == ["cosine", "no"] and "rate at its end" not in same
    assert same["training sequences"] == ["across documents", "within documents", "no"]
    assert same["dropout of activations"] == ["0", "not stated", "not verified"]
    same = page_beside(tmp_path / "other", published("fire-lm")).same()
    for name in ("betas", "weight decay", "schedule", "gradients clipped at", "embeddings", "updates of warm-up"):
        assert same[name][1:] == ["not stated", "not verified"]


def test_what_a_further_flag_may_have_changed_is_not_compared(tmp_path):
    printed = {"arch": "tiny", "model": "some", "betas": [0.9, 0.98], "weight_decay": 0.01, "activation_fn": "relu"}
    known = published("extrapolation-wikitext103") | {"settings": printed}
    same = page_beside(tmp_path, known, further={"extra": ["--weight-decay", "0.1", "--activation-fn=gelu"]}).same()
    for name in ("weight decay", "activation", "layers, width, heads"):
        assert same[name][2] == "not verified", name
    assert same["weight decay"][0] == same["activation"][0] == "not recorded" and same["betas"][2] == "yes"


def test_an_older_record_takes_what_its_recipe_now_knows(tmp_path):
    known = published("fire-lm")
    older = {name: known["settings"][name] for name in ("data", "model", "arch", "tokens", "updates", "lr")}
    same = page_beside(tmp_path, {**known, "settings": older}, recipe="fire-lm").same()
    assert same["activation"] == ["relu", "gelu", "no"] and same["optimiser"] == ["AdamW", "AdamW", "yes"]


def test_several_sweeps_on_one_page(tmp_path, capsys):
    for name in ("one", "two"):
        write_sweep(tmp_path / name)
    folders, out = [str(tmp_path / "two"), str(tmp_path / "one")], tmp_path / "all" / "both.html"

    class Both(Page):
        def handle_endtag(self, tag):
            if tag == "table":  # captions repeat
                self._caption = f"{len(self.tables)} {self._caption}"
            super().handle_endtag(tag)

    for wrong, words in (
        ([*folders, "--out", str(tmp_path)], "is a folder"),
        ([folders[0], folders[0]], "named twice"),
        ([*folders, str(tmp_path / "none")], "holds no sweep.json"),
    ):
        assert main(["report", *wrong]) == 2
        assert words in capsys.readouterr().err
    rows = tmp_path / "one" / "runs" / "alibi-seed1" / "eval.jsonl"
    for path in (tmp_path / "one/sweep.json", rows, tmp_path / "notes.html"):
        path.touch()
        path.write_text(before := path.read_text() or "<!DOCTYPE html>")
        assert main(["report", *folders, "--out", str(path)]) == 2
        error = capsys.readouterr().err
        assert f"{path.name} is not a page of this command" in error and path.read_text() == before
    for name in ("report.html", "results.md", "ppl.pdf"):
        assert main(["report", *folders, "--out", str(tmp_path / "two" / name)]) == 2
        assert "is a file of the report on" in capsys.readouterr().err
    assert not (tmp_path / "one/report.html").exists()
    for _ in range(2):  # its own page is replaced
        assert main(["report", *folders, "--out", str(out)]) == 0
        assert str(out) in capsys.readouterr().out
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
        row = {"checkpoint": "0123456789abcdef", "subset": "test", "loss_base2": 5.5, "tokens": 99_000}
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
    settings = {"subset": "test", "updates": 75, "batch_sentences": 64, "arch": "transformer_rpe_lm_tiny"}
    methods = {"warping": {"rpe": "rope", "positions_train": "warp", "positions_eval": "interpolate"}}
    state = {"settings": settings, "methods": methods, "algorithms": [TASK], "encodings": ["rope", "warping"]}
    files.write_json(tmp_path / "sweep.json", {**state, "seeds": [1], "published": published})
    for name, right in (("rope", 1), ("warping", 3)):
        method = Method(name, **methods.get(name, {"rpe": name}))
        place = tmp_path / "runs" / method.run_name(1, TASK)
        files.write_json(place / "checkpoints/run.json", {"finished": {"checkpoint": "c"}})
        (place / "train.log").write_text(LOG)
        for n in range(2, 10):
            row = {"checkpoint": "c", "algorithm": TASK, "split": "test", "unit": "items", "length": n}
            row |= {"positions": method.positions_eval, "examples": 8, "right": right, "accuracy": right / 8}
            files.append_json_line(place / "eval.jsonl", {**row, "transform": "identity", "seconds": 1.0})
    return tmp_path


def test_algorithmic_sweep_has_exact_match_and_no_perplexity(algorithmic):
    page = page_of(algorithmic)
    check_self_contained(page)
    chapters = ["Exact match", "Setting", "Beside the published values", "Training", "Runs", "Environment", "Commands"]
    assert page.chapters() == [*chapters, "Every measurement"] and "erplexity" not in page.words
    head, rope, warping = page.table(f"{TASK}: exact match in %")
    assert any("Published: not comparable" in caption for caption in page.tables) and "Not comparable." in page.words
    assert head == ["method", "trained", "beyond", "all", "published"]
    assert rope == ["rope", "12.5", "12.5", "12.5", ""] and warping[1:] == ["37.5★"] * 3 + ["43.2★"]
    assert f"Most exact answers to {TASK} beyond the training range: warping, 37.5 %." in page.words
    same = {name: row[2] for name, row in page.same().items() if row[2] != "not verified"}
    assert same == {"sequences per update": "yes", "updates": "yes"} and "betas" in page.same()
    with open(algorithmic / "accuracy.csv", newline="") as file:
        expected = [[r[k] for k in ("seed", "items", "examples", "right", "accuracy")] for r in csv.DictReader(file)]
    assert page.values["What accuracy.csv holds."][1:] == expected and len(expected) == 16


def test_delta_is_refused_for_it_before_anything_is_written(algorithmic, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("text")
    write_sweep(other)
    assert main(["report", str(other), str(algorithmic), "--delta", "0.1"]) == 2
    assert "counts exact answers" in capsys.readouterr().err and not (other / "report.html").exists()


KEPT = """
import pathlib, sys
from fairseq_rpe.reports import kept
from fairseq_rpe.sweeps.state import SweepFolder
for folder in sys.argv[1:]:
    print(kept.text(SweepFolder(pathlib.Path(folder))))
assert not {"torch", "fairseq", "matplotlib", "jinja2"} & set(sys.modules)
"""


def test_a_report_with_nothing_new_keeps_the_page_without_torch(algorithmic, tmp_path):
    write_sweep(tmp_path / "text")
    sweeps = [SweepFolder(tmp_path / "text"), SweepFolder(algorithmic)]
    assert [kept.text(sweep) for sweep in sweeps] == [None, None]
    texts = [write(sweep).text for sweep in sweeps]
    pages = [sweep.path / "report.html" for sweep in sweeps]
    before, made = ([page.read_bytes() for page in pages], [page.stat().st_mtime_ns for page in pages])
    output = run(sys.executable, "-c", KEPT, *(sweep.path for sweep in sweeps)).stdout
    assert output == "".join(f"{text}\n" for text in texts) and all(str(page) in output for page in pages)
    assert [page.stat().st_mtime_ns for page in pages] == made
    for sweep, page, text, content in zip(sweeps, pages, texts, before, strict=True):
        assert kept.text(sweep) == text
        page.unlink()
        assert kept.text(sweep) is None
        assert write(sweep).text == text and page.read_bytes() == content  # it is the same each time
    path = tmp_path / "text/runs/alibi-seed1/eval.jsonl"
    path.write_text(path.read_text().replace("48.5", "48.75"))  # out of date
    assert kept.text(sweeps[0]) is None
    assert "| alibi      | 50.12 | 49.06 | 48.75 |" in write(sweeps[0]).text


def test_a_damaged_record_is_named(tmp_path):
    write_sweep(tmp_path)
    path = tmp_path / "runs/alibi-seed1/checkpoints/environment.json"
    path.write_text("[1]")
    with pytest.raises(UserError, match=re.escape(str(path))):
        write(SweepFolder(tmp_path))

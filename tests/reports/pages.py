"""Parses pages of reports, and writes folders of finished sweeps for them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import run_here
from matplotlib.figure import Figure

from fairseq_rpe.sweeps.sweep_record import Method
from fairseq_rpe.utils import json_files

VOID = {"meta", "img", "br", "hr", "link", "input"}
LOG = """\
2026 | INFO | fairseq.tasks.language_modeling | dictionary: 4096 types
2026 | INFO | fairseq_rpe.attention.backends | attention backend: sdpa
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


def skip_drawing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Write empty pictures: drawing takes most of a report's time, and other tests draw figures.

    Returns:
        The figures that reports save, by name of the file; filled when a report is written.
    """
    figures: dict[str, Figure] = {}

    def save(figure: Figure, *paths: Path) -> None:
        figures.update((path.name, figure) for path in paths)
        for path in paths:
            path.touch()

    monkeypatch.setattr("fairseq_rpe.figures.style.save", save)
    monkeypatch.setattr("fairseq_rpe.figures.sweep_curves.label_line_ends", lambda *_: None)
    monkeypatch.setattr("fairseq_rpe.reports.page.to_svg", lambda figure: f"<svg {figure.get_figwidth()}/>".encode())
    return figures


class Page(HTMLParser):
    """The content of a page; it fails on an element that is not closed in order.

    Attributes:
        source: the HTML.
        open: names of the open elements.
        tags: name and attributes of each element.
        text: all texts.
        headings: level and text of each heading.
        tables: rows of each table by its caption, as displayed.
        values: exact values (``<data>``) of each table by its caption.
        best: values that are marked as the best of their column.
    """

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
            self.headings[-1] = (self.headings[-1][0], self.headings[-1][1] + data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())

    def table(self, start: str) -> list[list[str]]:
        """Return the only table whose caption begins with ``start``."""
        [table] = [rows for caption, rows in self.tables.items() if caption.startswith(start)]
        return table

    def chapters(self) -> list[str]:
        """Return the titles of the chapters, which are the deepest headings."""
        deepest = max(level for level, _ in self.headings)
        return [title for level, title in self.headings if level == deepest]

    def same(self) -> dict[str, list[str]]:
        """Return, by setting, the sweep's value, the published value, and whether they are the same."""
        return {row[0]: row[1:] for row in self.table("Settings that are the same")[1:]}

    def alternatives(self) -> list[str]:
        """Return the description of each picture in words."""
        return [attrs["alt"] or "" for tag, attrs in self.tags if tag == "img"]


def write_sweep(folder: Path, ppl=PPL, seeds=(1,), log: str | None = LOG, more=(), **record) -> None:
    """Write the folder of a finished sweep that was trained at 64 tokens.

    Args:
        folder: output folder.
        ppl: method -> length -> perplexity of the first seed; each further seed has 2 more than the seed before.
        seeds: seeds.
        log: training log of each run; None: no log.
        more: further keys of every result.
        record: further keys of ``sweep.json``; ``further`` are keys of its ``settings``.
    """
    lengths = sorted({length for values in ppl.values() for length in values})
    settings = {"tokens": 64, "split": "test", "updates": 75, "batch_sentences": 16, "lr": 2e-3, "warmup": 80}
    settings |= {"arch": "transformer_rpe_lm_tiny", "extra": []} | record.pop("further", {})
    common = {"layout": 2, "settings": settings, "encodings": list(ppl), "seeds": list(seeds), "lengths": lengths}
    json_files.write_json(folder / "sweep.json", {**common, **record})
    checkpoint = "0123456789abcdef"
    for name, values in ppl.items():
        for number, seed in enumerate(seeds):
            run = folder / "runs" / Method(name, name).run_name(seed)
            run_record = {"layout": 2, "finished": {"checkpoint": checkpoint}}
            json_files.write_json(run / "checkpoints" / "run.json", run_record)
            if log is not None:
                (run / "train.log").write_text(log)
            for length, value in values.items():
                row = {"checkpoint": checkpoint, "split": "test", "length": length, "ppl": value + 2 * number}
                row |= {"loss_base2": 5.5 + length / 1024, "tokens": 99_000 + length, "seconds": 11.5, **dict(more)}
                json_files.append_json_line(run / "eval.jsonl", row)


def page_of(folder: Path, *flags: str) -> Page:
    """Run ``report`` on a sweep and parse the page."""
    run_here("report", folder, *flags)
    return Page(folder / "report.html")


def new_page(folder: Path, **options) -> Page:
    """Write a sweep with the options of :func:`write_sweep`, and return the page of its report."""
    write_sweep(folder, **options)
    return page_of(folder)


def check_self_contained(page: Page) -> None:
    """Assert that a page loads nothing, that all links work, and that screen readers can read tables and pictures."""
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

"""Published values beside those of a sweep: what is printed, what is the same, and what could not be verified."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping

import pytest
from pages import PPL, Page, check_self_contained, new_page, page_of, skip_drawing, write_sweep

from fairseq_rpe.sweeps import recipes
from fairseq_rpe.utils import json_files


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch) -> None:
    skip_drawing(monkeypatch)


def published(recipe: str, **settings) -> dict:
    known = recipes.load(recipe).published.to_dict()
    return {**known, "settings": {**known["settings"], **settings}}


def check_same(page: Page, expected: Mapping[str, list[str] | str]) -> None:
    """What the page says is the same as published: all three cells, or the last alone."""
    same = page.same()
    assert {k: same[k] if isinstance(row, list) else same[k][2] for k, row in expected.items()} == dict(expected)


def test_published_values_stand_beside_ours_and_what_differs_is_named(tmp_path):
    known = published("extrapolation-wikitext103")
    older = {key: value for key, value in known.items() if key not in ("url", "settings")}
    partly = {**known, "settings": {key: known["settings"][key] for key in ("data", "model", "arch", "tokens")}}
    for folder, record in ((tmp_path / "older", older), (tmp_path / "partly", partly)):  # completed from the recipe
        page = new_page(folder, published=record, recipe="extrapolation-wikitext103")
        check_self_contained(page)
        head, alibi, inv_n = page.table("Published: Tables 4 and 6")
        assert head[1:3] == ["512", "768"] and head[-1] == "9216"
        assert alibi[1] == "24.22★" and inv_n[1] == "24.67" and alibi[-1] == "22.12★"
        assert ("a", {"href": "https://arxiv.org/abs/2307.10156"}) in page.tags
        assert "Not comparable." in page.words and "Compare trends only" in page.words
        expected = {
            "data": ["data-bin/stdlib", "WikiText-103", "no"],
            "tokeniser": ["4,096 types", "BPE, 50,265 types", "no"],
            "layers, width, heads": ["2 layers of width 128, 4 heads", "6 layers of width 512, 8 heads", "no"],
            "training length": ["64", "512", "no"],
            "schedule": ["inverse_sqrt", "inverse_sqrt", "yes"],
            "betas": ["0.9, 0.98", "0.9, 0.98", "yes"],
            "weight decay": ["0.01", "0.01", "yes"],
            # what the paper does not state is shown, and not said to be the same
            "activation": ["relu", "not stated", "not verified"],
            "embeddings": ["two tables", "not stated", "not verified"],
            "optimiser": ["AdamW", "Adam", "not verified"],
            "training sequences": ["across documents", "not stated", "not verified"],
        }
        check_same(page, expected)
        assert page.same()["gradients clipped at"][1:] == ["not stated", "not verified"]
        groups, head, alibi, inv_n = page.table("Trends")
        assert groups == ["", "2 L", "4 L"] and head == ["", *["here", "published"] * 2]
        assert alibi == ["alibi", "0.979", f"{23.06 / 24.22:.3f}", "0.968", f"{22.52 / 24.22:.3f}"]


def test_published_logarithms_are_shown_as_printed_and_compared_as_perplexities(tmp_path):
    values = {"alibi": {"64": 3.32, "128": 3.248}, "inv_n": {"64": 3.1, "128": 3.4}}
    given = {"source": "Table <4>", "measure": "log_ppl", "settings": {"tokens": 64}, **values}
    page = new_page(tmp_path, published=given)
    rows = [["published", "64", "128"], ["alibi", "3.320", "3.248★"], ["inv_n", "3.100★", "3.400"]]
    assert page.table("Published: Table") == rows
    _, _, alibi, inv_n = page.table("Trends")
    assert alibi[2] == f"{math.exp(3.248 - 3.32):.3f}" and inv_n[2] == f"{math.exp(0.3):.3f}"
    assert "| 3.248 |" in (tmp_path / "results.md").read_text()


def test_same_names_are_not_taken_for_the_same_data(tmp_path):
    known = published("extrapolation-wikitext103", vocabulary=4096, tokens=64)
    for name in ("wikitext103", "wikitext103-gpt2"):
        page = new_page(tmp_path / name, published=known, data=f"data-bin/{name}")
        expected = {"data": "not verified: the same name", "tokeniser": "not verified"}
        check_same(page, {**expected, "training length": "yes", "updates": "no"})


def test_blocks_within_documents_are_said_and_compared(tmp_path):
    page = new_page(tmp_path, published=published("fire-lm"), further={"blocks": "document"})
    assert "within documents" in page.words and "75 updates of up to 1,024 tokens" in page.words
    expected = {"training sequences": ["within documents", "within documents", "yes"]}
    check_same(page, {**expected, "sequences per update": "not verified"})
    assert "full sequences" in page.same()["sequences per update"][0]
    for name in ("betas", "weight decay", "schedule", "gradients clipped at", "embeddings", "updates of warm-up"):
        assert page.same()[name][1:] == ["not stated", "not verified"]


def test_results_on_other_blocks_are_no_results_of_a_sweep(tmp_path):
    write_sweep(tmp_path)
    results = tmp_path / "runs/alibi-seed1/eval.jsonl"
    json_files.append_json_line(results, {**json_files.read_json_lines(results)[0], "blocks": "document", "ppl": 7.0})
    page_of(tmp_path)
    found = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [float(one["ppl"]) for one in found if one["encoding"] == "alibi"] == list(PPL["alibi"].values())


def test_model_and_optimiser_are_compared_one_by_one(tmp_path):
    """A model of the same layers with another activation, untied, of more parameters is not the same."""
    of_brown = {"betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": "cosine", "min_lr": 6e-5}
    page = new_page(tmp_path, published=published("fire-lm", **of_brown, share_embeddings=True))
    expected = {
        "activation": ["relu", "gelu", "no"],
        "embeddings": ["two tables", "one table for input and output", "no"],
        "parameters": ["1,445,376", "125,000,000", "no"],
        "optimiser": ["AdamW", "AdamW", "yes"],
        "betas": ["0.9, 0.98", "0.9, 0.95", "no"],
        "training sequences": ["across documents", "within documents", "no"],
        "dropout of activations": ["0", "not stated", "not verified"],
    }
    check_same(page, expected)
    assert page.same()["schedule"][1:] == ["cosine", "no"] and "rate at its end" not in page.same()


def test_what_a_further_flag_may_have_changed_is_not_compared(tmp_path):
    printed = {"arch": "tiny", "model": "some", "betas": [0.9, 0.98], "weight_decay": 0.01, "activation_fn": "relu"}
    known = published("extrapolation-wikitext103") | {"settings": printed}
    flags = ["--weight-decay", "0.1", "--activation-fn=gelu"]
    page = new_page(tmp_path, published=known, further={"extra": flags})
    check_same(page, dict.fromkeys(("weight decay", "activation", "layers, width, heads"), "not verified"))
    assert {page.same()[name][0] for name in ("weight decay", "activation")} == {"not recorded"}
    check_same(page, {"betas": "yes"})

"""The report on a sweep over questions: by set, by length and by distance, beside what was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sweep_commands import table
from test_answer_recipes import GLUE, LENGTHS, SCROLLS

from fairseq_rpe.core import UserError
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.reports import perplexity_vs_retrieval, report_files
from fairseq_rpe.reports.chapters import question_answering
from fairseq_rpe.reports.kind_report import load_results
from fairseq_rpe.reports.write import check_delta, write_report
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.sweep_record import EvaluationQuestions, QuestionConfig, SweepFolder, SweepRecord, SweepSettings
from fairseq_rpe.utils import json_files


def scored(
    folder: Path, name: str, sets: dict[str, str], lengths: dict[int, float], seeds: int = 1, methods: int = 9
) -> SweepFolder:
    """A finished sweep of a recipe's methods: of each set by its metric, invented scores."""
    recipe = recipes.load(name)
    chosen = recipe.select_methods(recipe.preset("paper").methods)[:methods]
    together = len(sets) > 1 and name != "fire-scrolls"
    folders = {"glue-superglue": tuple(sets)} if together else {label: (label,) for label in sets}
    place, common = SweepFolder(folder), {"split": "valid", "arch": "tiny"}
    state = SweepRecord(
        SweepSettings(tokens=64, updates=400, batch_sentences=16, **common),
        tuple(method.name for method in chosen),
        tuple(range(1, seeds + 1)),
        tuple(lengths),
        {method.name: method for method in chosen},
        *(name, recipe.title, recipe.paper, recipe.published),
        data="data-bin/stdlib",
        questions={label: EvaluationQuestions(f"data-bin/{label}", label, own) for label, own in folders.items()},
        fine_tuning=SweepSettings(tokens=256, updates=200, batch_sentences=8, lr=5e-4, **common),
        question_config=QuestionConfig(),
    )
    place.write_record(state)
    for label, own in folders.items():
        for number, method in enumerate(chosen):
            for seed in state.seeds:
                run = place.run_folder(method, seed, label)
                json_files.write_json(
                    run.checkpoints.record_path, {"layout": 2, "finished": {"checkpoint": "c", "updates": 200}}
                )
                for a_set in own:
                    for length, share in lengths.items():
                        score = 20.0 + 5 * list(sets).index(a_set) + 3 * number * share + seed
                        result = QuestionResult(
                            checkpoint="c", data=label, set=a_set, split="valid", rpe=method.rpe_eval, length=length,
                            encoding=method.rpe, suite="own", questions=400, truncated_documents=100, lost_tokens=9,
                            empty=1, metrics={sets[a_set]: score, "em": score / 2}, published=sets[a_set], score=score,
                            transform="identity", seconds=2.0,
                        )  # fmt: skip
                        json_files.append_json_line(run.results, result.to_json())
    return place


def words_of(text: str) -> str:
    return " ".join(text.split())


def test_the_report_by_set_has_the_published_mean_beside(tmp_path):
    sets = {name: {"contract_nli": "em", "quality": "em", "qasper": "f1"}.get(name, "rgm") for name in SCROLLS}
    folder = scored(tmp_path, "fire-scrolls", sets, {8192: 1.0})
    section = write_report(folder)
    said = words_of(section.text)
    assert f"| method | {' | '.join(SCROLLS)} | mean | published mean |" in said
    assert "| fire | 39.00 | 44.00 | 49.00 | 54.00 | 59.00 | 64.00 | 69.00 | 54.00 | 25.64 |" in said
    assert "Published: Table 1" in said and "16.24" in said and "Documents truncated for 25.0% of all answers" in said
    for name in ("scores.csv", "scores.md", "scores.png", "scores.pdf", "report.html"):
        assert (tmp_path / name).stat().st_size > 0
    assert not (tmp_path / "extrapolation.csv").exists()
    page = (tmp_path / "report.html").read_text()
    assert "pre-training" in page and "Settings that are the same and that differ" in page
    assert "not verified: the same name" in page  # of the data
    assert (
        report_files.current_summary(folder) == section.text
        and load_results(folder, folder.read_record()).sets_in_mean() == SCROLLS
    )
    with pytest.raises(UserError, match="--delta is about perplexity"):
        check_delta(folder, 0.1)
    assert perplexity_vs_retrieval.comparison_sections([folder]) == []


def test_the_report_by_length_has_a_column_for_each(tmp_path, undrawn):
    lengths = dict(zip(LENGTHS["fire-narrativeqa"], (0.2, 0.5, 0.7, 1.0, 1.1, 1.0, 0.9), strict=True))
    folder = scored(tmp_path, "fire-narrativeqa", {"narrative_qa": "f1"}, lengths, seeds=2)
    said = words_of(write_report(folder).text)
    assert "| method | 512 | 2048 | 4096 | 8192 | 16384 | 24576 | 32768 | mean | published mean |" in said
    shown = ("| nope | 21.50 | 21.50 |", "| 21.50 (21.00 to 22.00) | 4.24 |", "| 8.70 |", "9.868", "Table 11")
    assert all(cells in said for cells in shown) and (tmp_path / "scores.png").exists()
    rows = table(tmp_path / "scores.csv")
    assert len(rows) == 8 * 7 * 2 * 2 and {row["counts"] for row in rows if row["metric"] == "f1"} == {"yes"}
    assert "by words between the answer" not in said
    # a result more, and the report is another
    run = folder.run_folder(folder.read_record().method("fire"), 1, "narrative_qa")
    row = json_files.read_json_lines(run.results)[-1]
    assert report_files.current_summary(folder) is not None
    json_files.append_json_line(run.results, {**row, "score": 99.0, "metrics": {"f1": 99.0}})
    assert report_files.current_summary(folder) is None


def test_the_report_by_distance_is_of_the_longest_context(tmp_path, undrawn):
    folder = scored(tmp_path, "fire-narrativeqa", {"gaps": "em"}, {256: 1.0, 512: 1.0}, seeds=2, methods=2)
    state = folder.read_record()
    for number, name in enumerate(state.methods):
        for seed in (1, 2):
            run = folder.run_folder(state.method(name), seed, "gaps")
            rows = json_files.read_json_lines(run.results)
            run.results.unlink()
            for row in rows:
                ends = [(0, 40), (41, 97)] if row["length"] == 512 else [(0, 30)]
                scores = [10.0 * number + seed + most for _, most in ends]
                found = [
                    {"least": least, "most": most, "questions": 200, "score": score}
                    for (least, most), score in zip(ends, scores, strict=True)
                ]
                json_files.append_json_line(run.results, {**row, "distances": found})
    said = words_of(write_report(folder).text)
    assert "gaps: em in % on 512 tokens, by words between the answer and the end of the document" in said
    assert "| method | 0–40 | 41–97 |" in said and "0–30" not in said
    assert "| nope | 41.50 | 98.50 |" in said and "| rope | 51.50 | 108.50 |" in said
    assert said.count("in % by context length") == 1  # of exact match alone, which is all that there is
    figure = question_answering.build_content(folder, state, [], load_results(folder, state)).figure
    assert [axes.get_ylabel() for axes in figure.axes] == ["em (%)", "em (%)"]
    (line,) = (line for line in figure.axes[1].lines if line.get_label() == "rope")
    assert list(line.get_xdata()) == [20, 69] and list(line.get_ydata()) == [51.5, 108.5]


def test_the_report_averages_the_sets_that_are_published_or_all(tmp_path, undrawn):
    folder = scored(tmp_path / "glue", "fire-glue", dict.fromkeys([*GLUE, "mnli_mismatched"], "accuracy"), {1024: 1.0})
    said, found = words_of(write_report(folder).text), load_results(folder, folder.read_record())
    assert found.sets_in_mean() == GLUE
    assert "| 71.15 |" in said and "mnli_mismatched | mean |" in said
    assert found.set_means("nope")[1024] == [pytest.approx(21 + 5 * 7)]
    own = {"gaps": "f1", "gaps-earlier": "f1"}
    folder = scored(tmp_path / "own", "fire-scrolls", own, {256: 1.0, 512: 1.0}, methods=3)
    said = write_report(folder).text
    assert "published mean" not in said and said.startswith("gaps: f1 in % by context length")
    assert load_results(folder, folder.read_record()).sets_in_mean() == list(own)


def test_answers_of_another_beam_or_length_penalty_are_not_reported(tmp_path):
    folder = scored(tmp_path, "fire-scrolls", {"gaps": "f1"}, {256: 1.0}, methods=1)
    state = folder.read_record()
    before = load_results(folder, state).results
    run = folder.run_folder(state.method("nope"), 1, "gaps")
    row = json_files.read_json_lines(run.results)[-1]
    for other in ({"beam": 4, "length_penalty": 1.0}, {"length_penalty": 0.5}, {"truncate": "start"}):
        json_files.append_json_line(run.results, {**row, **other, "score": 99.0, "metrics": {"f1": 99.0}})
        assert load_results(folder, state).results == before
    wide = replace(state, question_config=QuestionConfig(beam=4))
    assert [one.result.score for one in load_results(folder, wide).results] == [99.0]

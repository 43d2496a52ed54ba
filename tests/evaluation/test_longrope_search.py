"""The search for LongRoPE's factors: what evolves, that a killed search goes on, and what is refused."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from conftest import checkpoint_with, run_here
from measuring import refusal
from prepared_folder import make_folder
from torch.nn import functional as F

from fairseq_rpe.core.spec import parse
from fairseq_rpe.encodings import build, normalise
from fairseq_rpe.evaluation import longrope_search
from fairseq_rpe.evaluation.loading import load_model, read_stream
from fairseq_rpe.evaluation.longrope_search import STARTS, Candidate, SearchSpace, evolve
from fairseq_rpe.evaluation.records import EvalOverrides
from fairseq_rpe.utils import json_files

SMALL = ("--population", 5, "--iterations", 2, "--samples", 2, "--device", "cpu")
SPACE = SearchSpace(4.0)
SEEDS = [Candidate((400,) * 6, 0), Candidate((100, 132, 174, 230, 303, 400), 0), Candidate((100,) * 3 + (400,) * 3, 0)]


def check(one: Candidate) -> None:
    assert all(a <= b for a, b in itertools.pairwise(one.factors))
    assert 100 <= one.factors[0] and one.factors[-1] <= 500 and one.start in STARTS


def test_candidates_never_shrink_and_stay_in_range():
    draw, people = random.Random(0), list(SEEDS)
    for _ in range(300):
        people.append(SPACE.mutate(draw.choice(people), draw))
        people.append(SPACE.crossover(*draw.sample(people, 2), draw))
    for one in people:
        check(one)
    assert len(set(people)) > 300 and {one.start for one in people} == set(STARTS)
    assert SPACE.round_factors((1.0, 1.004, 2.566, 9.0)) == Candidate((100, 100, 257, 500), 0)


def test_evolution_comes_near_a_hidden_optimum():
    """From seeds that are far from it; and the best never gets worse."""
    wanted = Candidate((105, 110, 180, 350, 420, 470), 16)
    seen: list[Candidate] = []

    def judge(one: Candidate) -> float:
        check(one)
        seen.append(one)
        return sum(abs(a - b) for a, b in zip(one.factors, wanted.factors, strict=True)) + abs(one.start - wanted.start)

    found = [judge(best) for _, best in evolve(SPACE, SEEDS, 32, 25, 3, judge)]
    assert len(found) == 26 and found == sorted(found, reverse=True)
    assert found[-1] < 0.15 * min(judge(one) for one in SEEDS)
    assert set(SEEDS) <= set(seen) and len(set(seen)) <= 32 + 25 * 16
    assert [b for _, b in evolve(SPACE, SEEDS, 8, 3, 5, judge)] == [b for _, b in evolve(SPACE, SEEDS, 8, 3, 5, judge)]
    assert [b for _, b in evolve(SPACE, SEEDS, 8, 3, 6, judge)] != [b for _, b in evolve(SPACE, SEEDS, 8, 3, 5, judge)]


@pytest.fixture(scope="module")
def checkpoint(state, tmp_path_factory):
    return checkpoint_with(state, tmp_path_factory.mktemp("rope"), "rope:base=500,interleaved=true")


def test_it_ends_with_a_spec_of_the_perplexity_that_it_says(checkpoint, corpus, tmp_path):
    out = tmp_path / "kept.jsonl"
    lines = run_here("longrope-search", checkpoint, corpus, "--tokens", 80, *SMALL, "--out", out).stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["pi", "ntk", "yarn"]
    assert [line.split(":")[0] for line in lines[3:-1]] == [f"iteration {n} of 2" for n in (0, 1, 2)]
    spec = lines[-1]
    assert spec == normalise(spec)
    own = {"factor": "2.5", "original_length": "32", "base": "500", "interleaved": "true"}
    assert own.items() <= parse(spec)[1].items()
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["rpe"] for row in kept}) == len(kept) == int(lines[-2].split()[-2])
    best = min(kept, key=lambda row: row["loss_base2"])
    assert best["rpe"] == spec and f"perplexity {best['ppl']:.4f}" in lines[-2]
    # the same by loading the checkpoint with that encoding
    model, task = load_model(checkpoint, EvalOverrides(rpe=spec, device="cpu"), corpus)
    stream = read_stream(corpus, "valid", task.source_dictionary, 160)
    scores = model(stream[:-1].view(2, 80))[0].flatten(0, 1)
    assert float(F.cross_entropy(scores, stream[1:]).exp()) == pytest.approx(best["ppl"], rel=1e-5)
    build(spec, 4, 32)  # says all that it needs


def test_a_killed_search_goes_on(checkpoint, corpus, tmp_path, monkeypatch):
    words = ("longrope-search", checkpoint, corpus, "--tokens", 64, *SMALL, "--seed", 4)
    whole = run_here(*words).stdout
    out, write, left = tmp_path / "kept.jsonl", json_files.append_json_line, [4]

    def killed(path, row):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        write(path, row)

    monkeypatch.setattr(json_files, "append_json_line", killed)
    assert run_here(*words, "--out", out, ok=False).returncode == 130
    before = out.read_text()
    assert before.count("\n") == 3
    monkeypatch.setattr(json_files, "append_json_line", write)
    measured, count = longrope_search._CachedLosses._measure_loss, []
    monkeypatch.setattr(
        longrope_search._CachedLosses, "_measure_loss", lambda self, s: count.append(s) or measured(self, s)
    )
    assert run_here(*words, "--out", out).stdout == whole
    assert out.read_text().startswith(before) and len(count) == out.read_text().count("\n") - 3
    count.clear()
    assert run_here(*words, "--out", out).stdout == whole and not count


def test_questions_are_no_text_to_search_on(checkpoint, tmp_path):
    made = make_folder(tmp_path / "made").folder
    said = refusal("longrope-search", checkpoint, made, "--tokens", 64, "--out", tmp_path / "x")
    assert f"{made} holds questions" in said and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("spec", "flags", "words"),
    [
        ("rope", "32", "--tokens 32 is not above the training length, 32"),
        ("alibi", "64", "was trained with 'alibi': use a checkpoint with rope without scaling"),
        ("rope:scaling=linear,factor=2", "64", "use a checkpoint with rope without scaling"),
        ("rope", "900 --samples 90", "less than 90 blocks of 900: use more text or fewer --samples"),
        ("rope", "64 --split dev", "dev"),
        ("rope", "64 --population 2", "--population 2 is too small"),
        ("rope", "64 --out .", "--out ."),
    ],
)
def test_refusals_are_one_line(state, corpus, tmp_path, spec, flags, words):
    checkpoint = checkpoint_with(state, tmp_path, spec)
    assert words in refusal("longrope-search", checkpoint, corpus, "--tokens", *flags.split())

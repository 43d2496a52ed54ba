"""Random positions under data parallelism: real training in two processes, observed from inside each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import run

UPDATES, FREQUENCY = 3, 2
TOKENS, LARGEST = 32, 200
# Given to --rpe-module: an encoding that notes the positions it is given in training, and at exit the parameters.
SPY = """
import atexit
import hashlib
import json
import os

import torch
from fairseq_rpe.encodings import Absolute, register

largest = []


def note(**what):
    rank = int(os.environ.get("RANK", "0"))
    with open(os.path.join(os.environ["RANK_NOTES"], f"rank{rank}.jsonl"), "a") as file:
        file.write(json.dumps({"process": os.getpid(), **what}) + "\\n")


@register("test_spy")
class Spy(Absolute):
    \"\"\"A vector that grows with the position.\"\"\"

    formula = "x + i / 100"
    paper = "none"

    def vectors(self, at):
        if self.training:
            note(drawn=at.tolist())
        return (at / 100)[..., None].expand(*at.shape, self.width)


def keep_the_model(module, inputs):
    if not largest or len(list(module.parameters())) > len(list(largest[0].parameters())):
        largest[:] = [module]


torch.nn.modules.module.register_module_forward_pre_hook(keep_the_model)


@atexit.register
def parameters():
    if largest:
        digest = hashlib.sha256()
        for value in largest[0].parameters():
            digest.update(value.detach().numpy().tobytes())
        count = sum(value.numel() for value in largest[0].parameters())
        note(parameters=digest.hexdigest(), count=count, grouped=torch.distributed.is_initialized())
"""


class Seen:
    """What one run noted: per rank the draws in order, and the digest of its parameters at the end."""

    def __init__(self, folder: Path) -> None:
        self.draws: dict[int, list[list[list[float]]]] = {}
        self.parameters: dict[int, str] = {}
        processes = set()
        for path in sorted(folder.glob("rank*.jsonl")):
            rank = int(path.stem.removeprefix("rank"))
            *drawn, last = map(json.loads, path.read_text().splitlines())
            self.draws[rank] = [line["drawn"] for line in drawn]
            self.parameters[rank] = last["parameters"]
            # its threads can abort a process that ends beside them
            assert not last["grouped"], "the process group was left to itself"
            pids = {line["process"] for line in (*drawn, last)}
            assert len(pids) == 1
            processes |= pids
        assert len(processes) == len(self.draws)


@pytest.fixture(scope="module")
def observe(corpus, tmp_path_factory):
    """Train for a few updates in so many processes; returns what each rank saw."""

    def train(processes: int, seed: int = 1) -> Seen:
        folder = tmp_path_factory.mktemp(f"ranks{processes}")
        (folder / "spy.py").write_text(SPY)
        (folder / "notes").mkdir()
        command = [sys.executable, "-m", "fairseq_rpe.cli.main", "train", corpus, "--rpe", "test_spy"]
        command += ["--positions-train", f"randomized:max={LARGEST}", "--rpe-module", folder / "spy.py"]
        command += ["--tokens", TOKENS, "--batch-sentences", 4, "--updates", UPDATES, "--update-freq", FREQUENCY]
        command += ["--save-dir", folder / "run", "--device", "cpu", "--nproc", processes, "--seed", seed]
        command += ["--", "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64, "--disable-validation"]
        run(*command, env={**os.environ, "RANK_NOTES": str(folder / "notes")}, timeout=120)
        return Seen(folder / "notes")

    return train


@pytest.fixture(scope="module")
def two(observe) -> Seen:
    return observe(2)


def test_every_rank_draws_its_own_positions(two):
    assert set(two.draws) == {0, 1}
    for draws in two.draws.values():
        assert len(draws) == UPDATES * FREQUENCY
        for (row,) in draws:
            assert len(row) == TOKENS and row == sorted(set(row)) and 0 <= row[0] and row[-1] < LARGEST
    everything = [drawn for draws in two.draws.values() for drawn in draws]
    assert all(a != b for i, a in enumerate(everything) for b in everything[:i])


def test_both_ranks_end_with_the_same_parameters(two):
    assert two.parameters[0] == two.parameters[1]


def test_a_second_run_draws_the_same_and_one_process_draws_as_rank_0(two, observe):
    again = observe(2)
    assert again.draws == two.draws and again.parameters == two.parameters
    # all blocks are equally long, so that a single process draws as many numbers as rank 0, and from the same seed
    alone = observe(1)
    assert alone.draws == {0: two.draws[0]}
    assert alone.parameters[0] != two.parameters[0]

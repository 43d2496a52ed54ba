"""What tests of measurements share: the rows that a command prints, its refusals, and texts to measure on."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import refusal as refusals
import torch
from conftest import make_model, run_here

from fairseq_rpe.attention.reference import reference
from fairseq_rpe.data.folder import write_index

EOS, PAD = 2, 1


def rows_of(command: str, *words: object) -> list[dict]:
    """The rows that a command prints with --json on standard output."""
    done = run_here(command, "--device", "cpu", "--json", *map(str, words))
    return [json.loads(line) for line in done.stdout.splitlines()]


def refusal(command: str, *words: object) -> str:
    """Run a command on the CPU that must fail before any result: returns its error message."""
    return refusals.refusal(command, "--device", "cpu", *words)


def without_seconds(rows: list[dict]) -> list[dict]:
    return [{**row, "seconds": 0} for row in rows]


@torch.no_grad()
def make_sensitive(task, rpe: str, **changes):
    """A model whose predictions depend clearly on what it reads, and where."""
    model = make_model(task, rpe, **changes)
    for weight in model.decoder.layers.parameters():
        weight.mul_(3)
    return model


@torch.no_grad()
def seen_by(model, blocks, dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's weights (B, H, n, n), what the reference returns for unit vectors, and its values (B, H, n, D)."""
    found, inner = [], model.decoder.attend

    def attend(q, k, v, plan, dropout=0.0):
        units = torch.eye(k.shape[2], dtype=dtype).expand(*k.shape[:3], k.shape[2])
        weights = reference(q.to(dtype), k.to(dtype), units, replace(plan, relative_values=None))
        found.append((weights.double(), v.double()))
        return inner(q, k, v, plan, dropout)

    model.decoder.attend = attend
    model(blocks)
    model.decoder.attend = inner
    return found


def write_text(folder: Path, dictionary: Path, documents: Sequence[Sequence[Sequence[int]]]) -> Path:
    """A data folder whose test split has these documents of lines, a blank line after each."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(dictionary, folder / "dict.txt")
    items = [[*line, EOS] for document in documents for line in (*document, [])]
    np.concatenate(items).astype("<u2").tofile(folder / "test.bin")
    write_index(folder / "test.idx", io.BytesIO(np.array([len(x) for x in items], "<i4").tobytes()), "<u2")
    return folder


def reference_losses(model, text: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Nats of each target of a text whose target i is predicted from the inputs first[i] … i.

    The inputs are the end-of-sentence symbol and the targets, each block is read alone, and logits are in float64.
    """
    inputs = torch.cat([torch.tensor([EOS]), text[:-1]])
    nats = torch.zeros(len(text), dtype=torch.float64)
    for start in first.unique():
        block = first == start
        with torch.no_grad():
            logits = model(inputs[None, block])[0][0].double()
        nats[block] = torch.nn.functional.cross_entropy(logits, text[block], reduction="none")
    return nats


def sums_by_position(nats: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats, and targets, at each position, of the targets of :func:`reference_losses`."""
    positions = torch.arange(len(nats)) - first
    return torch.bincount(positions, nats, len(nats)), torch.bincount(positions, minlength=len(nats))


def bits(nats: float, tokens: int) -> float:
    return nats / tokens / math.log(2)

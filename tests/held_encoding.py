"""An encoding for ``--rpe-module`` that shows a training from inside, and can hold it at one of its batches.

It adds a line for each training batch to ``rankN.jsonl`` of the folder ``$HELD_NOTES``: its process, the positions of
the batch, and its learned scale. While that folder has a file ``hold``, whose text is a number of batches, a process
that has begun the next one waits.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from fairseq_rpe.encodings import Absolute, register

_batches = 0


def _note(**what: object) -> None:
    path = Path(os.environ["HELD_NOTES"]) / f"rank{os.environ.get('RANK', '0')}.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps({"process": os.getpid(), **what}) + "\n")


@register("held")
class Held(Absolute):
    """The same vector at all positions: random ones leave the training as it is."""

    formula = "x + scale c"
    paper = "none"

    def setup(self) -> None:
        self.scale = torch.nn.Parameter(torch.tensor(0.01))

    def vectors(self, at: Tensor) -> Tensor:
        if self.training and "HELD_NOTES" in os.environ:
            global _batches
            _note(positions=at.tolist(), scale=self.scale.item())
            _batches += 1
            hold = Path(os.environ["HELD_NOTES"]) / "hold"
            while hold.exists() and _batches > int(hold.read_text() or 0):
                time.sleep(0.01)
        return (self.scale * torch.arange(self.width, device=at.device)).expand(*at.shape, self.width)


@atexit.register
def _note_the_end() -> None:
    if "HELD_NOTES" in os.environ and _batches:
        _note(grouped=torch.distributed.is_initialized())

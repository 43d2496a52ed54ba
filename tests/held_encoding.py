"""An encoding for ``--rpe-module`` that records each batch of a training, and can make the training wait.

For each training batch it adds a line to ``rankN.jsonl`` in the folder ``$HELD_NOTES``, with the process, the positions
of the batch and the learned scale. While that folder has a file ``hold`` with a number of batches in it, a process that
has begun more batches waits.
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


def _note(**values: object) -> None:
    path = Path(os.environ["HELD_NOTES"]) / f"rank{os.environ.get('RANK', '0')}.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps({"process": os.getpid(), **values}) + "\n")


@register("held")
class Held(Absolute):
    """Adds the same vector at all positions, so that random positions do not change the training."""

    formula = "x + scale c"
    paper = "none"

    def setup(self) -> None:
        self.scale = torch.nn.Parameter(torch.tensor(0.01))

    def vectors(self, positions: Tensor) -> Tensor:
        if self.training and "HELD_NOTES" in os.environ:
            global _batches
            _note(positions=positions.tolist(), scale=self.scale.item())
            _batches += 1
            hold = Path(os.environ["HELD_NOTES"]) / "hold"
            while hold.exists() and _batches > int(hold.read_text() or 0):
                time.sleep(0.01)
        vector = self.scale * torch.arange(self.width, device=positions.device)
        return vector.expand(*positions.shape, self.width)


@atexit.register
def _note_the_end() -> None:
    if "HELD_NOTES" in os.environ and _batches:
        _note(grouped=torch.distributed.is_initialized())

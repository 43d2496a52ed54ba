"""What TensorBoard shows of the encodings while they are trained."""

import os
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from fairseq_rpe.analysis.bias_history import History
from fairseq_rpe.analysis.bias_map import bias_map, some_heads
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.figures.biases import maps_of_heads, of_heads

_DPI = 115  # two pictures of four heads side by side in a window of 1920 pixels


class Inspector:
    """Pictures, learned quantities and histograms of a decoder's encodings, every few updates of its training.

    A forward pre-hook of the decoder. What is written at step k is the state after k updates. A loaded checkpoint
    writes nothing: it hears of updates too, but runs no forward pass in training mode. Validation within a training
    run does look, at the update just made: that is how the last one is seen.

    The events, and profiles as JSON lines, go into the folder ``encodings`` of ``folder``, fairseq's
    --tensorboard-logdir. Pictures show ``length`` tokens, the training length. The first data-parallel rank writes.
    """

    def __init__(self, spec: str, every: int, folder: str, length: int, rank: int) -> None:
        self.spec, self.every, self.length, self.rank = spec, every, length, rank
        self.folder = os.path.join(folder, "encodings")
        self.trained, self.written = -1, -1
        self.before: list[Tensor] | None = None
        self.writer: SummaryWriter | None = None
        self.history: History | None = None

    def __getstate__(self) -> dict[str, Any]:
        """As new: a writer's thread cannot be copied, and a copied model is a model of its own."""
        return {**self.__dict__, "trained": -1, "written": -1, "before": None, "writer": None, "history": None}

    def __call__(self, decoder: Any, _inputs: Any) -> None:
        """Raises UserError if the encoding has no bias; here, since a checkpoint may be evaluated with another one."""
        update = decoder.moves.update
        if not decoder.training:
            if update == self.trained and self.before is not None and self._stepped(decoder.encodings):
                self.before = None
                self._look(decoder.encodings, update + 1)
            return
        if update == self.trained:
            return
        if self.trained < 0:
            if not decoder.encodings[0].adds_bias:
                raise UserError(
                    f"--rpe-inspect-every: '{self.spec}' has no bias to show: drop the flag, or name an encoding with "
                    "a bias"
                )
            if self.rank == 0:
                # what an interrupted run wrote from here on will be written again
                self.writer = SummaryWriter(self.folder, purge_step=update)
                self.history = History(self.folder, update, self.length)
        self.trained = update
        if self.rank == 0:
            self._look(decoder.encodings, update)
            due = (update + 1) % self.every == 0
            self.before = [p.detach().clone() for p in decoder.encodings.parameters()] if due else None

    def _stepped(self, encodings: nn.ModuleList) -> bool:
        """Whether the update was made: it is skipped where 16-bit gradients overflow."""
        now = list(encodings.parameters())
        return not now or any(not torch.equal(a, b) for a, b in zip(self.before, now, strict=True))

    @torch.no_grad()
    def _look(self, encodings: nn.ModuleList, step: int) -> None:
        if step % self.every or step == self.written:
            return
        self.written = step
        profiles = {}
        for index, encoding in enumerate(encodings):
            place = f"layer{index}" if len(encodings) > 1 else "model"
            device = next((p.device for p in encoding.parameters()), torch.device("cpu"))
            # an encoding that draws must not move the draws of the training
            forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
            with forked, torch.autocast(device.type, enabled=False):
                profiles[place] = encoding.bias_profile(self.length).cpu()
                self._write(encoding, place, profiles[place])
        self.history.add(step, profiles)
        self.writer.flush()

    def _write(self, encoding: Encoding, place: str, profile: Tensor) -> None:
        for name, value in encoding.logged_scalars().items():
            values = value.detach().double().cpu()
            if values.dim() == 0:
                self.writer.add_scalar(f"rpe/{name}/{place}", values.item(), self.written)
                continue
            for head, number in enumerate(values.flatten().tolist(), start=1):
                self.writer.add_scalar(f"rpe/{name}/{place}/head{head}", number, self.written)
            self._histogram(f"rpe_heads/{name}/{place}", values)
        for name, parameter in encoding.named_parameters():
            self._histogram(f"rpe_parameters/{place}/{name}", parameter.detach().double().cpu())
        title = f"{self.spec}, {place}, after {self.written} updates"
        self._picture(f"bias_profile/{place}", of_heads(profile, title))
        heads = some_heads(encoding.heads)
        bias, step = bias_map(encoding, self.length, heads)
        self._picture(f"exp_bias/{place}", maps_of_heads(bias, title, heads, step))

    def _histogram(self, tag: str, values: Tensor) -> None:
        values = values[values.isfinite()]
        if len(values):
            self.writer.add_histogram(tag, values.numpy(), self.written)

    def _picture(self, tag: str, figure: Figure) -> None:
        # not add_figure, which loads pyplot and with it a backend
        figure.set_dpi(_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        self.writer.add_image(tag, np.asarray(canvas.buffer_rgba())[..., :3], self.written, dataformats="HWC")

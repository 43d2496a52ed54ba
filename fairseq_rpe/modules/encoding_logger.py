"""Logs encodings to TensorBoard during training."""

import os
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from fairseq_rpe.analysis.bias_snapshots import BiasHistory, bias_map, spread_indices
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import parse
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.figures.biases import draw_head_maps, draw_head_profiles

_DPI = 115  # two figures of four heads side by side fit into a window of 1920 pixels


class EncodingLogger:
    """Forward pre-hook of a decoder that logs figures, learned scalars and histograms of its encodings.

    The values at step k are those after k updates. They are logged at the first forward pass of the next update, or in
    a validation before it, so the last update is logged too. A loaded checkpoint logs nothing, because it runs no
    forward pass in training mode. Only the first data-parallel rank writes.

    Args:
        spec: the encoding, for titles and messages.
        every: updates between two logs.
        folder: fairseq's --tensorboard-logdir; events and JSON lines of bias profiles go into its folder ``encodings``.
        length: tokens shown in figures, the training length.
        rank: data-parallel rank of this process.

    Attributes:
        last_update: number of updates before the last forward pass in training mode; -1 before the first one.
        last_logged: step of the last log, or -1.
        before: copies of the parameters before an update after which a log is due; None otherwise.
    """

    def __init__(self, spec: str, every: int, folder: str, length: int, rank: int) -> None:
        self.spec, self.every, self.length, self.rank = spec, every, length, rank
        self.folder = os.path.join(folder, "encodings")
        self.last_update, self.last_logged = -1, -1
        self.before: list[Tensor] | None = None
        self.writer: SummaryWriter | None = None
        self.history: BiasHistory | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the initial state: a writer's thread cannot be copied, and a copied model logs on its own."""
        return {**self.__dict__, "last_update": -1, "last_logged": -1, "before": None, "writer": None, "history": None}

    def __call__(self, decoder: Any, _inputs: Any) -> None:
        """Log if the update is due.

        Raises:
            UserError: no encoding has a bias. The constructor does not check this, because a checkpoint may be
                evaluated with another encoding.
        """
        update = decoder.position_transforms.update
        if decoder.training:
            if update != self.last_update:  # the first batch of this update
                self._start_update(decoder, update)
        elif update == self.last_update and self.before is not None and self._has_changed(decoder.encodings):
            # a validation after the update that was due
            self.before = None
            self._log(decoder.encodings, update + 1)

    def _start_update(self, decoder: Any, update: int) -> None:
        """Log the encodings as they are before an update, and copy their parameters if they are due after it."""
        if self.last_update < 0:
            self._open(decoder, update)
        self.last_update = update
        if self.rank == 0:
            self._log(decoder.encodings, update)
            due = (update + 1) % self.every == 0
            self.before = [p.detach().clone() for p in decoder.encodings.parameters()] if due else None

    def _open(self, decoder: Any, update: int) -> None:
        """Check that there is a bias to show, and open the files on the first rank."""
        if not any(encoding.adds_bias for encoding in decoder.encodings):
            raise UserError(
                f"--rpe-log-encodings-every: '{self.spec}' has no bias to show: drop the flag, or name one with a bias"
            )
        if self.rank == 0:
            # events that an interrupted run wrote after this update are written again
            self.writer = SummaryWriter(self.folder, purge_step=update)
            self.history = BiasHistory(self.folder, update, self.length)

    def _has_changed(self, encodings: LayerEncodings) -> bool:
        """Return whether the parameters changed; fairseq skips an update if 16-bit gradients overflow."""
        now = list(encodings.parameters())
        return not now or any(not torch.equal(a, b) for a, b in zip(self.before, now, strict=True))

    @torch.no_grad()
    def _log(self, encodings: LayerEncodings, step: int) -> None:
        if step % self.every or step == self.last_logged:
            return
        self.last_logged = step
        profiles = {}  # bias profile (H, length) of each encoding
        for index, encoding in enumerate(encodings):
            tag = _tag(encodings, index)
            device = next((p.device for p in encoding.parameters()), torch.device("cpu"))
            # an encoding that samples must not change the random numbers of the training
            forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
            with forked, torch.autocast(device.type, enabled=False):
                self._write_parameters(encoding, tag)
                if encoding.adds_bias:  # in a pattern of layers, some encodings may have none
                    profiles[tag] = encoding.bias_profile(self.length).cpu()
                    self._write_bias(encoding, tag, profiles[tag])
        self.history.add(step, profiles)
        self.writer.flush()

    def _write_parameters(self, encoding: Encoding, tag: str) -> None:
        for name, value in encoding.logged_scalars().items():
            values = value.detach().double().cpu()
            if values.dim() == 0:
                self.writer.add_scalar(f"rpe/{name}/{tag}", values.item(), self.last_logged)
                continue
            for head, scalar in enumerate(values.flatten().tolist(), start=1):
                self.writer.add_scalar(f"rpe/{name}/{tag}/head{head}", scalar, self.last_logged)
            self._histogram(f"rpe_heads/{name}/{tag}", values)
        for name, parameter in encoding.named_parameters():
            self._histogram(f"rpe_parameters/{tag}/{name}", parameter.detach().double().cpu())

    def _write_bias(self, encoding: Encoding, tag: str, profile: Tensor) -> None:
        title = f"{self.spec}, {tag}, after {self.last_logged} updates"
        self._figure(f"bias_profile/{tag}", draw_head_profiles(profile, title))
        heads = spread_indices(encoding.heads)
        bias, step = bias_map(encoding, self.length, heads)
        self._figure(f"exp_bias/{tag}", draw_head_maps(bias, title, heads, step))

    def _histogram(self, tag: str, values: Tensor) -> None:
        values = values[values.isfinite()]
        if len(values):
            self.writer.add_histogram(tag, values.numpy(), self.last_logged)

    def _figure(self, tag: str, figure: Figure) -> None:
        # add_figure would import pyplot and with it a GUI backend
        figure.set_dpi(_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        self.writer.add_image(tag, np.asarray(canvas.buffer_rgba())[..., :3], self.last_logged, dataformats="HWC")


def _tag(encodings: LayerEncodings, instance: int) -> str:
    """Return the name of an instance in TensorBoard: "model", "layer3", or "layer3.alibi" in a pattern of layers.

    The layer is the first one that uses the instance.
    """
    if len(encodings) == 1:
        return "model"
    layer = f"layer{encodings.layers(instance)[0]}"
    return f"{layer}.{parse(encodings.specs[instance])[0]}" if encodings.is_mixed else layer

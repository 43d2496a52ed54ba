"""Losses of the single tokens of a text, each at its index in the split, in blocks or in windows.

The split has T targets y_0 … y_(T-1). The stream x has T + 1 inputs: x_0 is the end-of-sentence symbol, and
x_(i+1) = y_i, so y_i is predicted from inputs up to x_i. A block with the targets y_b … y_(e-1) begins at input x_b.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.loss_aggregation import check_finite
from fairseq_rpe.evaluation.perplexity import token_losses
from fairseq_rpe.evaluation.sliding_window_loss import batch_by_shape, document_windows
from fairseq_rpe.tasks.language_modeling import document_slices, read_document_ends
from fairseq_rpe.utils.progress import Progress


def block_ends(data: Path, split: str, blocks: str, length: int) -> np.ndarray:
    """Return where the blocks of a split end.

    Args:
        data: binarised data folder.
        split: name of the split.
        blocks: stream, or document for blocks that do not cross documents.
        length: most tokens of a block.

    Returns:
        (blocks,) int64, increasing: number of targets up to the end of each block.

    Raises:
        UserError: blocks of documents are requested, and the split has no document boundaries.
    """
    if blocks == "document":
        return document_slices(read_document_ends(str(data / split)), length)[:, 1]
    tokens = corpus.count_tokens(data, split)
    return np.append(np.arange(length, tokens, length), tokens).astype(np.int64)


def block_begins(ends: np.ndarray) -> np.ndarray:
    """Return the first input of each block, (blocks,) int64, from the ``ends`` of the blocks."""
    return np.concatenate(([0], ends[:-1])).astype(np.int64)


def block_windows(ends: np.ndarray, length: int) -> np.ndarray:
    """Return one window for each block of at most ``length`` tokens; see :func:`short_windows` for the shape."""
    begins = block_begins(ends)
    return document_windows(begins, ends - begins, length, length)


def short_windows(ends: np.ndarray, short_context: int, stretch: int) -> np.ndarray:
    """Return windows in which a target sees at most K + S - 1 inputs of its block, for K short_context and S stretch.

    Inputs before a target are its context. The targets with K … K + S - 1 inputs before them share the window that
    starts at the first input of the block; the next S targets share the window that starts S inputs later, and so on.
    Every target after the first K - 1 ones of a block therefore sees K … K + S - 1 inputs.

    Args:
        ends: (blocks,) int64 ends of the blocks, in targets.
        short_context: K, in tokens, at least 1.
        stretch: S, in tokens, at least 1.

    Returns:
        (windows, 3) int64: first input, number of inputs and number of targets of each window. The targets of a window
        are the last ones. Every target of the split is in exactly one window.
    """
    begins = block_begins(ends)
    return document_windows(begins, ends - begins, short_context + stretch - 1, stretch)


def windows_with(windows: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the windows that score at least one of the targets ``indices``, sorted (k,) int64."""
    last = windows[:, 0] + windows[:, 1]  # (windows,): targets end before this index
    scored = np.searchsorted(indices, last) - np.searchsorted(indices, last - windows[:, 2])
    return windows[scored > 0]


def extend_to_blocks(windows: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return windows with the same targets that start at the first input of their blocks.

    Args:
        windows: (windows, 3) int64, see :func:`short_windows`.
        ends: (blocks,) int64 ends of the blocks, in targets.
    """
    last = windows[:, 0] + windows[:, 1]
    begins = block_begins(ends)[np.searchsorted(ends, last)]  # (windows,)
    return np.stack([begins, last - begins, windows[:, 2]], axis=1)


@torch.no_grad()
def losses_by_token(
    model: Any, stream: Tensor, windows: np.ndarray, batch_tokens: int, title: str, near: int | None = None
) -> np.ndarray:
    """Return the loss of each target in its window.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        stream: (T + 1,) int64, x_0 … x_T.
        windows: (windows, 3) int64, see :func:`short_windows`.
        batch_tokens: upper limit of the tokens in a batch; a longer window is a batch.
        title: title of the progress bar.
        near: None, or the number of inputs directly before the targets of a window that remain. All inputs farther
            back are replaced by other text: input i by input i + T/2 of the same split, modulo T. The windows must
            have at most T/2 inputs, so that other text does not overlap them.

    Returns:
        (T,) float64: losses in nats; NaN for targets that are in no window.

    Raises:
        UserError: a target has probability 0 or NaN.
    """
    tokens, device = len(stream) - 1, next(model.parameters()).device
    losses = np.full(tokens, np.nan)
    rows = max(1, batch_tokens // int(windows[:, 1].max(initial=1)))
    with Progress(title, "tokens", int(windows[:, 2].sum())) as bar:
        for starts, length, targets in batch_by_shape(windows, rows):
            indices = torch.as_tensor(starts)[:, None] + torch.arange(length)  # (B, n)
            inputs = stream[indices]
            if near is not None:
                far = length - targets - near  # the first inputs of each row
                far_indices = indices[:, : max(0, far)]
                inputs[:, : max(0, far)] = stream[1 + (far_indices + tokens // 2) % tokens]
            target_indices = indices[:, length - targets :]  # (B, s); target i is input i + 1
            nats = (
                token_losses(model, inputs.to(device), stream[target_indices + 1].to(device)).double().cpu()
            )  # (B·s,)
            check_finite(nats.sum())
            losses[target_indices.flatten().numpy()] = nats.numpy()
            bar.update(target_indices.numel())
    return losses

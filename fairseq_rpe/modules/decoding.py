"""Greedy decoding with the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def greedy(model: Any, prompts: Tensor, steps: int) -> Tensor:
    """The likeliest next token, ``steps`` times.

    Rows go on after the end of the sentence: whoever compares them with answers of ``steps`` tokens needs no more.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompts: (B, P) int64 without padding, P >= 1.
        steps: tokens to add, >= 1.

    Returns:
        (B, steps) int64.
    """
    decoder = model.decoder
    state: dict[str, Any] = {}
    rows = prompts
    for _ in range(steps):
        features = decoder(rows, incremental_state=state, features_only=True)[0]
        scores = decoder.output_layer(features[:, -1])
        scores[:, decoder.padding_idx] = -torch.inf
        rows = torch.cat([rows, scores.argmax(-1, keepdim=True)], dim=1)
    return rows[:, prompts.shape[1] :]

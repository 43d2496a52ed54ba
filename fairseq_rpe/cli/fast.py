"""The ``fast`` engine of ``eval``: one loaded model, fairseq's own batches, a loss without the logits."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from fairseq_rpe.cli import subjects


class Fast:
    """Scores blocks of any length with a model that is loaded once.

    Raises:
        UserError: the checkpoint is not one of a plain language model of this plugin.
    """

    def __init__(self, args: argparse.Namespace, cfg: dict[str, Any]) -> None:
        subjects.check_plain(args.checkpoint, cfg, otherwise=", or use --engine fairseq")
        self.args = args
        self.model, self.task = subjects.load(args, args.checkpoint)
        if args.attention_prune is not None:
            self.model.decoder.prune_attention(args.attention_prune)

    def __call__(self, length: int, batch_tokens: int) -> tuple[int, dict[str, Any]]:
        """Tokens scored in blocks of ``length``, and what the row says of them."""
        import torch
        from tqdm import tqdm

        from fairseq_rpe.evaluation.losses import BlockLoss

        if next(self.model.parameters()).is_cuda:
            torch.cuda.reset_peak_memory_stats()
        found = BlockLoss(self.model, length, self.task.source_dictionary.pad())
        with tqdm(desc=f"length {length}", unit=" tokens", disable=None, leave=False) as bar:
            for sample in self._batches(length, batch_tokens):
                found.add(sample["net_input"]["src_tokens"], sample["target"])
                bar.update(sample["ntokens"])
        loss = found.loss_base2()
        ppl = float(torch.tensor(loss, dtype=torch.float64).exp2())
        return found.tokens, {"loss_base2": loss, "ppl": ppl, "positions_loss": dataclasses.asdict(found.buckets())}

    def _batches(self, length: int, batch_tokens: int) -> Iterable[dict[str, Any]]:
        """What fairseq-eval-lm makes of the same flags: random positions depend on which blocks share a batch."""
        from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils

        dictionary = self.task.source_dictionary
        lines = data_utils.load_indexed_dataset(str(self.args.data / self.args.subset), dictionary)
        blocks = TokenBlockDataset(
            lines, lines.sizes, length, dictionary.pad(), dictionary.eos(), break_mode="none", include_targets=True
        )
        return self.task.eval_lm_dataloader(
            dataset=MonolingualDataset(blocks, blocks.sizes, dictionary, shuffle=True, targets=["future"]),
            max_tokens=batch_tokens,
            batch_size=self.args.batch_size,
            max_positions=self.model.max_positions(),
            num_workers=0,
            data_buffer_size=0,
        )

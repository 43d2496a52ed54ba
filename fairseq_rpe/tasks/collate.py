"""Rows of a prompt and its answer, made into the batches that ``answer_cross_entropy`` reads."""

from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils

from fairseq_rpe.core.errors import UserError


class AnswerRows(FairseqDataset):
    """Prompts with their answers, of which only the answers are to be learned.

    A sample of B rows has ``src_tokens`` (B, T) int64, padded on the right; ``target`` (B, T), the next token, padding
    included; ``answer`` (B, T) bool, where the next token belongs to the answer or ends it. ``sizes`` (rows,) are the
    tokens that a model reads of each row, all but its end. No row is ever left out for its length.
    """

    sizes: np.ndarray

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary

    def row(self, index: int) -> tuple[Any, int]:
        """The tokens of a row, prompt, answer and ``</s>``; and how many of them are the prompt, at least one."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    num_tokens = size

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: Any) -> tuple[np.ndarray, list[int]]:
        """All of them: the model reads any length, and :meth:`batch_by_size` refuses what a batch cannot hold."""
        return indices, []

    def batch_by_size(self, indices: np.ndarray, max_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Raises UserError: a row has more tokens than a batch may have."""
        longest = int(self.sizes[indices].max(initial=0))
        if max_tokens is not None and longest > max_tokens:
            raise UserError(f"--max-tokens {max_tokens} is less than a row of {longest} tokens: raise it")
        return super().batch_by_size(indices, max_tokens, *args, **kwargs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, prompt = self.row(index)
        return {"id": int(index), "row": torch.as_tensor(row), "prompt": prompt}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        source = data_utils.collate_tokens([s["row"][:-1] for s in samples], pad, eos)
        target = data_utils.collate_tokens([s["row"][1:] for s in samples], pad, eos)
        lengths = torch.tensor([len(s["row"]) - 1 for s in samples])
        starts = torch.tensor([s["prompt"] - 1 for s in samples])
        at = torch.arange(source.shape[1])
        return {
            "id": torch.tensor([s["id"] for s in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": {"src_tokens": source, "src_lengths": lengths},
            "target": target,
            "answer": (at >= starts[:, None]) & (at < lengths[:, None]),
        }

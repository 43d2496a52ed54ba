"""Base class of fairseq datasets with prompts and answers, and the batches that ``answer_cross_entropy`` reads."""

from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from torch.nn.utils.rnn import pad_sequence

from fairseq_rpe.core.errors import UserError


class PromptAnswerDataset(FairseqDataset):
    """Prompts with answers, of which only the answers are learned. Subclasses set ``sizes`` and define :meth:`row`.

    A batch of B rows has ``src_tokens`` (B, T) int64, padded on the right; ``target`` (B, T), the next token or
    padding; ``answer`` (B, T) bool, True where the target belongs to the answer or its end. A subclass may override
    :meth:`labels` for rows that have labels at other positions. No row is dropped for its length.

    Attributes:
        sizes: (rows,) tokens that a model reads of each row, all but its end.
    """

    sizes: np.ndarray

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary

    def row(self, index: int) -> tuple[Any, int]:
        """Return the tokens of a row, prompt, answer and ``</s>``, and the length of the prompt, at least 1."""
        raise NotImplementedError

    def labels(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what a model reads and learns of a row.

        Args:
            index: index of the row.

        Returns:
            Tokens (n,) int64, targets (n,) int64 and (n,) bool, True where the target belongs to the answer or its end.
        """
        row, prompt = self.row(index)
        tokens = torch.as_tensor(row)  # (n + 1,)
        # Target t is token t + 1 of a row, so the answer begins at the target of the prompt's last token.
        return tokens[:-1], tokens[1:], torch.arange(len(tokens) - 1) >= prompt - 1

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, index: int) -> int:
        """Return the tokens that a model reads of a row."""
        return int(self.sizes[index])

    num_tokens = size

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Return the sizes of several rows."""
        return self.sizes[indices]

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: Any) -> tuple[np.ndarray, list[int]]:
        """Return all rows: the model reads any length, and :meth:`batch_by_size` refuses rows that are too long."""
        return indices, []

    def batch_by_size(self, indices: np.ndarray, max_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Make batches of at most ``max_tokens`` tokens.

        Raises:
            UserError: a row has more tokens than a batch may have.
        """
        longest = int(self.sizes[indices].max(initial=0))
        if max_tokens is not None and longest > max_tokens:
            raise UserError(f"--max-tokens {max_tokens} is less than a row of {longest} tokens: raise it")
        return super().batch_by_size(indices, max_tokens, *args, **kwargs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, target, answer = self.labels(index)
        return {"id": int(index), "source": source, "target": target, "answer": answer}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a padded batch of rows."""
        if not samples:
            return {}
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        source = data_utils.collate_tokens([s["source"] for s in samples], pad, eos)  # (B, T)
        target = data_utils.collate_tokens([s["target"] for s in samples], pad, eos)  # (B, T)
        lengths = torch.tensor([len(s["source"]) for s in samples])  # (B,)
        return {
            "id": torch.tensor([s["id"] for s in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": {"src_tokens": source, "src_lengths": lengths},
            "target": target,
            "answer": pad_sequence([s["answer"] for s in samples], batch_first=True),  # (B, T)
        }

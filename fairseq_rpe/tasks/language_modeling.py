"""fairseq task ``rpe_language_modeling``: language modelling in which tokens attend only to their own document."""

import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus

# no `X | None` and no postponed annotations here: fairseq's parser reads these annotations at run time

TASK = "rpe_language_modeling"


@dataclass
class RPELanguageModelingConfig(LanguageModelingConfig):
    """Flags in addition to those of fairseq's language_modeling."""

    blocks: str = field(
        default="stream",
        metadata={"help": "stream: blocks run across documents; document: each block lies within one document"},
    )
    separate_documents: bool = field(
        default=False, metadata={"help": "in blocks of a stream, tokens attend only to their own document"}
    )


class DocumentBlockDataset(TokenBlockDataset):
    """fairseq's blocks of tokens within documents.

    Each document is divided into consecutive blocks of ``block_size`` tokens, the last one shorter; every token is in
    exactly one block. Items are (source, target, past target) as with ``--sample-break-mode none``: the first input
    of a document is the end-of-sentence symbol, that of a later block the token before it.

    Args:
        dataset: the items of a split, each a line.
        ends: (documents,) int64 ends of documents, in tokens from the beginning of the split, as
            :func:`~fairseq_rpe.data.folder.document_ends` gives them.
        block_size: most tokens of a block.
        dictionary: dictionary of the tokens.
    """

    def __init__(self, dataset: Any, ends: np.ndarray, block_size: int, dictionary: Dictionary) -> None:
        self._ends = ends
        pad, eos = dictionary.pad(), dictionary.eos()
        super().__init__(dataset, dataset.sizes, block_size, pad, eos, break_mode="none", include_targets=True)

    def _build_slice_indices(  # type: ignore[override]  # fairseq's is a static method, called through self
        self, sizes: np.ndarray, break_mode: str, document_sep_len: int, block_size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the size of each block, the items that it is in, and its first and last token (exclusive)."""
        from fairseq.data.token_block_utils_fast import _get_block_to_dataset_index_fast

        sizes, slices = np.asarray(sizes, dtype=np.int64), document_slices(self._ends, block_size)
        return np.diff(slices)[:, 0], _get_block_to_dataset_index_fast(sizes, slices), slices


def document_slices(ends: np.ndarray, length: int) -> np.ndarray:
    """Return blocks of at most ``length`` tokens within documents.

    Args:
        ends: (documents,) int64 ends of documents, in tokens.
        length: most tokens of a block, at least 1.

    Returns:
        (blocks, 2) int64: first and last token (exclusive) of each block, in the order of the text.
    """
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
    num_blocks = -(-(ends - starts) // length)  # (documents,), rounded up
    first = np.repeat(starts, num_blocks) + corpus.enumerate_groups(num_blocks) * length  # (blocks,)
    last = np.minimum(first + length, np.repeat(ends, num_blocks))
    return np.stack([first, last], axis=1).astype(np.int64)


class SeparateDocuments(MonolingualDataset):
    """fairseq's blocks of a stream with the document number of each token, as ``documents``.

    An input belongs to the document of its target: the end-of-sentence symbol before a document is its first input.

    Args:
        blocks: blocks of a stream.
        ends: (documents,) int64 ends of documents, in tokens from the beginning of the split.
        dictionary: dictionary of the inputs.
        options: further arguments of fairseq's MonolingualDataset.
    """

    def __init__(self, blocks: TokenBlockDataset, ends: np.ndarray, dictionary: Dictionary, **options: Any) -> None:
        super().__init__(blocks, blocks.sizes, dictionary, shuffle=True, **options)
        self._ends = ends

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = (int(x) for x in self.dataset.slice_indices[index])
        numbers = np.searchsorted(self._ends, np.arange(start, stop), side="right")
        return {**super().__getitem__(index), "documents": torch.from_numpy(numbers)}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return fairseq's batch with document numbers (B, n) in ``net_input``, -1 at padding."""
        batch = super().collater(samples)
        if batch:
            documents = data_utils.collate_tokens([s["documents"] for s in samples], -1)
            rows, length = batch["net_input"]["src_tokens"].shape  # fairseq pads both
            padding = (0, length - documents.shape[1], 0, rows - len(documents))
            batch["net_input"]["documents"] = F.pad(documents, padding, value=-1)
        return batch


def read_document_ends(path: str, combine: bool = False) -> np.ndarray:
    """Return the ends of the documents of a binarised split.

    Args:
        path: folder and name of the split, without extension.
        combine: also read the shards ``path``1, ``path``2, …, as fairseq does in training.

    Returns:
        (documents,) int64, in tokens from the beginning of the split.

    Raises:
        UserError: the ends of its documents are not recorded, see :func:`~fairseq_rpe.data.folder.check_documents`.
    """
    folder, split = Path(os.path.dirname(path)), os.path.basename(path)
    ends, tokens = [], 0
    for number in count():
        shard = split + (str(number) if number else "")
        if number and not (combine and (folder / f"{shard}.idx").is_file()):
            break
        corpus.check_documents(folder, shard)
        ends.append(tokens + corpus.document_ends(folder, shard))
        tokens = int(ends[-1][-1])
    return np.concatenate(ends)


def load_document_blocks(path: str, dictionary: Dictionary, length: int, combine: bool = False) -> DocumentBlockDataset:
    """Return the blocks of a binarised split within its documents.

    Args:
        path: folder and name of the split, without extension.
        dictionary: dictionary of the tokens.
        length: most tokens of a block.
        combine: also read the shards ``path``1, ``path``2, …, as fairseq does in training.

    Returns:
        The blocks, in the order of the text.

    Raises:
        FileNotFoundError: there is no such split.
        UserError: the ends of its documents are not recorded, see :func:`~fairseq_rpe.data.folder.check_documents`.
    """
    dataset = data_utils.load_indexed_dataset(path, dictionary, combine=combine)
    if dataset is None:
        raise FileNotFoundError(path)
    return DocumentBlockDataset(dataset, read_document_ends(path, combine), length, dictionary)


@register_task(TASK, dataclass=RPELanguageModelingConfig)
class RPELanguageModelingTask(LanguageModelingTask):
    """fairseq's language modelling with blocks within documents, or with separate documents in a block.

    Blocks within documents are shorter at the end of a document. fairseq batches rows of similar length, so use
    --max-tokens rather than --batch-size to have little padding.
    """

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> "RPELanguageModelingTask":
        """Build the task.

        Raises:
            UserError: unknown value of --blocks, or a flag without effect.
        """
        if args.blocks not in corpus.BLOCKS:
            raise UserError(f"--blocks is one of {', '.join(corpus.BLOCKS)}, not '{args.blocks}'")
        within = args.blocks == "document" or args.separate_documents
        if args.blocks == "document" and args.separate_documents:
            raise UserError("--separate-documents is for --blocks stream: blocks of --blocks document have one each")
        if within and str(args.sample_break_mode) not in ("None", "none"):
            raise UserError(f"--sample-break-mode {args.sample_break_mode} would cut documents elsewhere: drop it")
        if within and str(args.shorten_method) != "none":
            raise UserError("--shorten-method would shorten the text without its documents: drop it")
        if args.separate_documents and args.add_bos_token:
            raise UserError("--add-bos-token puts a token before each block, not each document: drop it")
        return super().setup_task(args, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a split.

        Args:
            split: name of the split.
            epoch: chooses among several data folders, as in fairseq.
            combine: also read further shards.
            kwargs: fairseq's further arguments.

        Raises:
            UserError: there is no such split, or the ends of its documents are not recorded.
        """
        paths = utils.split_paths(self.args.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        if self.args.blocks == "document":
            self.datasets[split] = self._load_document_blocks(path, split, combine)
            return
        super().load_dataset(split, epoch, combine, **kwargs)
        if self.args.separate_documents:
            self.datasets[split] = self._separate_documents(self.datasets[split], path, combine)

    def _separate_documents(self, stream: MonolingualDataset, path: str, combine: bool) -> SeparateDocuments:
        """Add the document number of each token to fairseq's dataset of a split."""
        return SeparateDocuments(
            stream.dataset,
            read_document_ends(path, combine),
            stream.vocab,
            tgt_vocab=stream.tgt_vocab,
            targets=stream.targets,
            fixed_pad_length=stream.fixed_pad_length,
            pad_to_bsz=stream.pad_to_bsz,
        )

    def _load_document_blocks(self, path: str, split: str, combine: bool) -> MonolingualDataset:
        """Load blocks within documents, with the options that fairseq's own task gives its dataset."""
        args = self.args
        try:
            blocks = load_document_blocks(path, self.dictionary, args.tokens_per_sample, combine)
        except FileNotFoundError:
            raise UserError(f"data {args.data}: no split '{split}' there (no {split}.idx)") from None
        rows = args.batch_size_valid if "valid" in split else args.batch_size
        return MonolingualDataset(
            blocks,
            blocks.sizes,
            self.dictionary,
            self.output_dictionary,
            shuffle=True,
            targets=self.targets,
            add_bos_token=args.add_bos_token,
            fixed_pad_length=args.tokens_per_sample if args.pad_to_fixed_length else None,
            pad_to_bsz=rows if args.pad_to_fixed_bsz else None,
        )

"""Records of key tokens: which tokens of a split need a long context, and the losses of models on these tokens.

Source: "What is Wrong with Perplexity for Long-context Language Modeling?" (arXiv 2410.23771).
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.records import Blocks, EvalOverrides, Result, TextKey, TextRequest
from fairseq_rpe.utils import files, json_files, records
from fairseq_rpe.utils.records import Count, Loss, Natural, NonNegative, Perplexity, Share, Unbounded, from_attributes

MIN_KEY_TOKENS = 500  # fewer are too few for a verdict
ALPHA, BETA = 2.0, -2.0  # nats, as in the paper
LENGTH_MULTIPLES = (16, 8, 4, 2)  # default length of a block, in short contexts


@dataclass(frozen=True, kw_only=True)
class KeyTokenSettings:
    """Everything that decides which tokens are key tokens.

    Attributes:
        evaluator: digest of the reference checkpoint.
        data: digest of the corpus.
        vocabulary: digest of the symbols of the corpus, in the order of their ids.
        split: name of the split.
        rpe: encoding in place of the reference's.
        module: digest of the file of ``--rpe-module``, which may define the encoding.
        positions: position transform in place of the reference's.
        blocks: stream, or document if a long context does not cross documents.
        length: tokens of a block; the long context of a token is all of its block before the token.
        short_context: K, the least number of tokens of the short context.
        stretch: number of consecutive tokens that share the start of their short context.
        alpha: least increase of the log-probability by the long context, in nats.
        beta: least log-probability with the long context, in nats.
    """

    evaluator: str
    data: str
    vocabulary: str
    split: str
    rpe: str | None = None
    module: str | None = None
    positions: str | None = None
    blocks: Blocks
    length: Count
    short_context: Count
    stretch: Count
    alpha: NonNegative
    beta: float

    @property
    def digest(self) -> str:
        """SHA-256 of the settings."""
        return _digest(records.to_dict(from_attributes(KeyTokenSettings, self)))


@dataclass(frozen=True, kw_only=True)
class KeyTokens(KeyTokenSettings):
    """The key tokens of a split: the file that ``fairseq-rpe key-tokens`` writes.

    Attributes:
        encoding: encoding of the reference model.
        tokens: number of tokens of the split.
        candidates: number of tokens with at least ``short_context`` tokens before them in their block.
        loss_base2: mean loss of the reference model over all tokens with the long context, in bits per token.
        key_loss_base2: the same over the key tokens.
        short_loss_base2: mean loss of the reference model over the key tokens with the short context.
        indices: index of each key token in the split, counted from 0, increasing.
    """

    encoding: str
    tokens: Count
    candidates: Count
    loss_base2: Loss
    key_loss_base2: Loss
    short_loss_base2: Loss
    indices: tuple[Natural, ...]

    @property
    def share(self) -> float:
        """Key tokens divided by all tokens of the split."""
        return len(self.indices) / self.tokens

    @property
    def selection_digest(self) -> str:
        """SHA-256 of the indices and of the settings that decide how they are scored."""
        names = ("data", "split", "blocks", "length", "short_context", "stretch", "indices")
        return _digest({name: getattr(self, name) for name in names})

    def fault(self) -> str | None:
        """Return the contradiction in these values as the end of a sentence, or None if there is none."""
        if not self.indices or any(later <= earlier for earlier, later in pairwise(self.indices)):
            return "has indices that do not increase"
        if self.indices[-1] >= self.tokens:
            return f"has the index {self.indices[-1]} where the split has {self.tokens} tokens"
        return None

    def check_text(self, data: Path, split: str) -> None:
        """Check that these are key tokens of a split.

        Args:
            data: binarised data folder.
            split: name of the split.

        Raises:
            UserError: they are those of another tokenizer, corpus or split.
        """
        remedy = "find the key tokens of this text with fairseq-rpe key-tokens"
        if self.vocabulary != files.vocabulary_digest(corpus.read_dictionary(data / "dict.txt")):
            raise UserError(f"--key-tokens: the key tokens are of another tokenizer than {data}: {remedy}")
        if self.data != corpus.corpus_digest(data):
            raise UserError(f"--key-tokens: the key tokens are of another corpus than {data}: {remedy}")
        if self.split != split:
            raise UserError(f"--key-tokens: the key tokens are of the split {self.split}: use --split {self.split}")


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def is_key_token_file(path: Path) -> bool:
    """Return whether a file is JSON, as :func:`write_key_tokens` writes it, rather than a checkpoint.

    Raises:
        UserError: there is no such file, or it is not a plain file.
    """
    try:
        with files.open_input(path) as file:
            return file.read(1) == b"{"
    except FileNotFoundError:
        raise UserError(f"--key-tokens {path} does not exist: name a checkpoint or a file of key tokens") from None


def read_key_tokens(path: Path) -> KeyTokens:
    """Read a file of key tokens.

    Raises:
        UserError: it is damaged, or has no key tokens.
    """
    return records.read_record(KeyTokens, json_files.read_json(path), str(path), "the file of key tokens", strict=False)


def write_key_tokens(path: Path, key_tokens: KeyTokens) -> None:
    """Write a file of key tokens atomically."""
    files.atomic_write(path, json.dumps(records.to_dict(key_tokens)) + "\n")


@dataclass(frozen=True, kw_only=True)
class KeyTokenRequest(EvalOverrides):
    """How to find the key tokens of a split: the options of ``fairseq-rpe key-tokens``.

    Attributes:
        checkpoint: checkpoint file of the reference model.
        data: binarised data folder.
        short_context: K, the least number of tokens of the short context.
        stretch: number of consecutive tokens that share the start of their short context; None: K/4, at least 1.
        length: tokens of a block; None: 16 · K, or 8, 4 or 2 · K if the text or the positions do not allow more.
        alpha: least increase of the log-probability by the long context, in nats.
        beta: least log-probability with the long context, in nats.
        split: name of the split.
        blocks: stream or document; None: document if the split has document boundaries.
        max_tokens: upper limit of the tokens in a batch.
        log: log file, named in error messages.
    """

    checkpoint: Path
    data: Path
    short_context: int
    stretch: int | None = None
    length: int | None = None
    alpha: float = ALPHA
    beta: float = BETA
    split: str = "test"
    blocks: Blocks | None = None
    max_tokens: int | None = None
    log: Path | None = None

    def settings(self, limits: dict[str, int]) -> KeyTokenSettings:
        """Fill in what is left open, and check it.

        Args:
            limits: upper limits of the length in tokens that the model sets, by the sentence that explains them.

        Raises:
            UserError: the checkpoint or the data cannot be used, or the text is too short for a long context.
        """
        if not math.isfinite(self.beta) or self.beta > 0:
            raise UserError(f"--beta {self.beta:g} is not a log-probability: use 0 or less, such as {BETA:g}")
        text = TextRequest(checkpoint=self.checkpoint, data=self.data, lengths=[1], split=self.split)
        [text_key] = text.keys()  # checks the files
        blocks = self.blocks or _default_blocks(self.data, self.split)
        stretch = self.stretch or max(1, self.short_context // 4)
        length = self.length or self._default_length(blocks, limits)
        if length < (least := self.short_context + stretch):
            raise UserError(
                f"--length {length}: tokens with more than their short context need at least {least} tokens: raise it "
                "or lower --short-context"
            )
        if self.max_tokens and self.max_tokens < length:
            raise UserError(f"--max-tokens {self.max_tokens} is less than length {length}: raise it")
        corpus.check_block_length(self.data, self.split, length)
        if blocks == "document":
            corpus.check_documents(self.data, self.split)
            corpus.check_document_block(self.data, self.split, length)
        return KeyTokenSettings(
            evaluator=text_key.checkpoint,
            data=text_key.data,
            vocabulary=files.vocabulary_digest(corpus.read_dictionary(self.data / "dict.txt")),
            split=self.split,
            rpe=self.rpe,
            module=self.module,
            positions=self.positions_eval,
            blocks=blocks,
            length=length,
            short_context=self.short_context,
            stretch=stretch,
            alpha=self.alpha,
            beta=self.beta,
        )

    def _default_length(self, blocks: Blocks, limits: dict[str, int]) -> int:
        """Return the longest of the default lengths that the text and the positions allow, or the shortest."""
        is_document = blocks == "document"
        longest = corpus.longest_document if is_document else corpus.count_tokens
        limit = min([longest(self.data, self.split), *limits.values()])
        lengths = [multiple * self.short_context for multiple in LENGTH_MULTIPLES]
        return next((length for length in lengths if length <= limit), lengths[-1])


def _default_blocks(data: Path, split: str) -> Blocks:
    """Return document if a split has document boundaries, else stream."""
    with contextlib.suppress(UserError):
        corpus.check_documents(data, split)
        return "document"
    return "stream"


@dataclass(frozen=True, kw_only=True)
class KeyTokenKey(TextKey):
    """Key of the losses of a model on key tokens in blocks of one length.

    Attributes:
        key_tokens: digest of the key tokens and of their short contexts.
        shuffle_far: True if the loss with other text in place of the far context was measured, too, else None.
    """

    key_tokens: str
    shuffle_far: bool | None = None


@dataclass(frozen=True, kw_only=True)
class KeyTokenResult(KeyTokenKey, Result):
    """Losses of a model on key tokens.

    Attributes:
        long_ppl: LongPPL, 2 ** ``key_loss_base2``.
        key_loss_base2: mean loss of the key tokens in blocks of ``length`` tokens, in bits per token.
        short_loss_base2: the same with the short context; its difference from ``key_loss_base2`` is what the model
            gains from the far context.
        shuffled_loss_base2: the same in blocks of ``length`` tokens, with other text in place of the tokens before the
            short context.
        key_count: number of key tokens.
        key_share: key tokens divided by all tokens.
        tokens: number of tokens of the split.
        loss_base2: mean loss of all tokens in blocks of ``length`` tokens, in bits per token.
        ppl: plain perplexity, 2 ** ``loss_base2``.
        evaluator: digest of the reference checkpoint that chose the key tokens.
        short_context: K, the least number of tokens of the short context.
        train_length: training length of the model in tokens.
        seconds: duration of the measurement.
    """

    key_type = KeyTokenKey
    long_ppl: Unbounded
    key_loss_base2: Loss
    short_loss_base2: Loss
    shuffled_loss_base2: Loss | None = None
    key_count: Count
    key_share: Share
    tokens: Count
    loss_base2: Loss
    ppl: Perplexity
    evaluator: str
    short_context: Count
    train_length: Count | None = None
    seconds: float | None = None

    @classmethod
    def is_stored_in(cls, row: Mapping[str, object]) -> bool:
        """Whether a row is a result on key tokens."""
        return "key_tokens" in row

    @property
    def has_enough_tokens(self) -> bool:
        """Whether there are enough key tokens for a verdict."""
        return self.key_count >= MIN_KEY_TOKENS


@dataclass(frozen=True, kw_only=True)
class KeyTokenEvalRequest(TextRequest):
    """Losses of a checkpoint on key tokens at several block lengths: the options of ``eval --key-tokens``.

    Attributes:
        shuffle_far: whether to measure the loss with other text in place of the far context, too.
        allow_self_evaluation: whether the checkpoint may be the reference that chose the key tokens.
    """

    shuffle_far: bool = False
    allow_self_evaluation: bool = False

    def check_options(self) -> None:
        """Check that no option contradicts ``--key-tokens``.

        Raises:
            UserError: an option does.
        """
        flags: dict[str, Any] = {
            "--engine fairseq": self.engine == "fairseq",
            "--blocks": self.blocks,
            "--separate-documents": self.separate_documents is not None,
            "--position-samples": self.position_samples,
            "--batch-size": self.batch_size,
        }
        if flag := next((flag for flag, value in flags.items() if value), None):
            why = "the key tokens decide the blocks" if flag in ("--blocks", "--separate-documents") else ""
            raise UserError(f"{flag} does not go with --key-tokens{': ' * bool(why)}{why}: drop one of them")

    def check_not_evaluator(self, evaluator: str) -> None:
        """Check that the checkpoint is not the reference that chose the key tokens.

        Args:
            evaluator: digest of the reference.

        Raises:
            UserError: it is, and ``allow_self_evaluation`` is not set.
        """
        checkpoint_file.check_file(self.checkpoint)
        if not self.allow_self_evaluation and evaluator == files.sha256_of_files(self.checkpoint):
            raise UserError(
                f"{self.checkpoint} would be evaluated on key tokens that it chose itself, which is circular: use the "
                "key tokens of another checkpoint, or add --allow-self-evaluation"
            )

    def key_token_keys(self, key_tokens: KeyTokens) -> list[KeyTokenKey]:
        """Return one key for each length.

        Args:
            key_tokens: the key tokens; the blocks of the request must be theirs.

        Raises:
            UserError: the checkpoint, the data or a length cannot be used, or the text is too short for other text.
        """
        keys: Sequence[TextKey] = self.keys()
        longest = max(self.lengths)
        if self.shuffle_far and 2 * longest > key_tokens.tokens:
            raise UserError(
                f"--shuffle-far: {self.data}/{self.split} has {key_tokens.tokens} tokens, less than two blocks of "
                f"{longest}: use a smaller length"
            )
        digest = key_tokens.selection_digest
        return [
            from_attributes(KeyTokenKey, key, key_tokens=digest, shuffle_far=self.shuffle_far or None) for key in keys
        ]

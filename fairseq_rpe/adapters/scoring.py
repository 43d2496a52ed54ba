"""Perplexity of a transformers model at several lengths, with the blocks of ``fairseq-rpe eval``."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairseq_rpe.adapters.attention_interface import (  # first, because it checks that transformers is installed
    NAME,
    EncodingAdapter,
    base_model,
    check_model_type,
)

# isort: split

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.data.tokenization import EOS
from fairseq_rpe.evaluation.loss_aggregation import (
    SegmentSums,
    add_units,
    check_all_scored,
    peak_memory_mb,
    text_result,
)
from fairseq_rpe.evaluation.records import BATCH_TOKENS, TextKey, TextResult, default_draws, resume_results
from fairseq_rpe.modules.cross_entropy import target_losses
from fairseq_rpe.utils.progress import Progress


def evaluate(
    model: PreTrainedModel,
    data: Path | str | Sequence[int] | Tensor,
    lengths: Sequence[int],
    *,
    split: str = "test",
    start: int | None = None,
    max_tokens: int | None = None,
    out: Path | str | None = None,
) -> list[TextResult]:
    """Compute the perplexity at each length, in blocks of that many tokens without overlap; the last may be shorter.

    The inputs of a block begin with the token before the block, for the first block with ``start``. So a target at
    position p of its block, counted from 0, is predicted from p + 1 inputs. Every token is scored once. The logits of
    all tokens are never stored together. Blocks, batches and results file are those of ``fairseq-rpe eval``, so reports
    accept the results of both.

    Args:
        model: a model with a language-modelling head and a type in ``MODEL_TYPES``, with an encoding or its own
            rotation.
        data: (T,) token ids of the model's tokenizer; or a binarised data folder, if the model was trained on ids of
            the same dict.txt, including fairseq's four special symbols.
        lengths: lengths in tokens, each at most T.
        split: split of a data folder; for ids only a name in the results.
        start: id before the first token; None: eos_token_id of the model's config, or fairseq's for a data folder.
        max_tokens: tokens per batch, at least one block; None: 2048.
        out: JSON-lines file of results; lengths in it are not computed again.

    Returns:
        One result per length in the given order; ``loss_base2`` is in bits per token.

    Raises:
        UserError: the data does not exist, the model lacks some ids, a length exceeds T, the perplexity is NaN, or not
            all tokens were scored.
    """
    head = _head(model)
    text, digest, units = _text(data, split)
    ends = corpus.document_ends_if_recorded(Path(data), split) if isinstance(data, (str, Path)) else None
    stream = torch.cat([torch.tensor([_first_token(model, data, start)]), text])
    scorer = _Scorer(model, head, stream, ends, max_tokens)
    scorer.check_ids()
    scorer.check_lengths(lengths)
    adapter = getattr(base_model(model), NAME, None)
    encoding, positions = _encoding_and_positions(model, adapter)
    identity = {"checkpoint": _digest(model, encoding), "data": digest, "split": split, "positions": positions}
    keys = [TextKey(**identity, draws=default_draws(positions), length=length) for length in lengths]
    unigram = corpus.unigram_ppl(text.numpy())

    def measure(key: TextKey) -> TextResult:
        result = add_units(scorer.measure(key), units)
        return replace(result, encoding=encoding, engine="transformers", unigram_ppl=unigram)

    training = model.training
    model.eval()
    try:
        return list(resume_results(TextResult, None if out is None else Path(out), keys, lambda _: measure))
    finally:
        model.train(training)


def _head(model: PreTrainedModel) -> Tensor:
    """Return the weight (V, C) of the output layer."""
    check_model_type(model)
    layer = model.get_output_embeddings()
    if layer is None or base_model(model) is model:
        raise UserError(f"{type(model).__name__} has no head for language modelling: load it as a …ForCausalLM")
    if getattr(layer, "bias", None) is not None:
        raise UserError("the model's output layer has a bias, which this evaluation does not know: leave it out")
    return layer.weight


def _first_token(model: PreTrainedModel, data: object, start: int | None) -> int:
    """Return the id before the first token of the text."""
    first = start if start is not None else EOS if isinstance(data, (str, Path)) else model.config.eos_token_id
    if not isinstance(first, int):
        raise UserError("the model's config names no single end-of-text token: give start=ID, the one before the text")
    return first


def _text(data: Path | str | Sequence[int] | Tensor, split: str) -> tuple[Tensor, str, corpus.Units | None]:
    """Return token ids (T,) on the CPU, their digest, and the words and bytes of the text if they are recorded."""
    if isinstance(data, (str, Path)):
        folder = Path(data)
        corpus.check_text_folder(folder, split)
        ids = torch.from_numpy(corpus.read_split(folder, split)[0].astype("int64"))
        return ids, corpus.corpus_digest(folder), corpus.read_units(folder, split)
    ids = torch.as_tensor(data).cpu()
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise UserError(f"a text is the ids of its tokens in one row, not {ids.dtype} of shape {tuple(ids.shape)}")
    ids = ids.long()
    return ids, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), None


def _encoding_and_positions(model: PreTrainedModel, adapter: EncodingAdapter | None) -> tuple[str, str | None]:
    """Return the name of the model's encoding and its position transform in evaluation."""
    if adapter is None:
        parameters = model.config.rope_parameters or {}
        by_layer_type = [x for x in parameters.values() if isinstance(x, dict)] or [parameters]
        kinds = sorted({x.get("rope_type", "default") for x in by_layer_type})
        return f"{model.config.model_type}'s own rotation ({', '.join(kinds)})", None
    return adapter.spec, adapter.positions


def _digest(model: PreTrainedModel, encoding: str) -> str:
    """Return a digest of the config, the encoding and every weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "transformers_version", NAME)}
    # rotations and positions may depend on the training length, and random positions on the seed
    settings = getattr(base_model(model).config, NAME, None) or {}
    identity = [config, encoding, settings.get("length"), settings.get("seed")]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Scorer:
    """A model and the text that it predicts.

    Attributes:
        model: the model, with its head.
        head: (V, C) weight of the output layer.
        stream: (T + 1,) token ids on the CPU: the first token, and the text of T tokens.
        document_ends: (documents,) int64 ends of the documents in tokens; None if they are not known.
        max_tokens: tokens per batch, at least one block; None: 2048.
    """

    model: Any
    head: Tensor
    stream: Tensor
    document_ends: np.ndarray | None
    max_tokens: int | None

    def check_ids(self) -> None:
        """Raise UserError if the model has no embedding for an id of the text."""
        types = self.model.get_input_embeddings().num_embeddings
        extremes = int(self.stream.min()), int(self.stream.max())
        for token_id in extremes:
            if not 0 <= token_id < types:
                raise UserError(
                    f"the text holds the id {token_id} and the model has {types} types: take the ids that it knows"
                )

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Raise UserError if a length exceeds the text or the batch."""
        tokens = len(self.stream) - 1
        for length in lengths:
            if not 1 <= length <= tokens:
                raise UserError(f"length {length} is not between 1 and the {tokens} tokens of the text")
        if self.max_tokens is not None and self.max_tokens < max(lengths):
            raise UserError(f"max_tokens={self.max_tokens} is less than length {max(lengths)}: raise it")

    def measure(self, key: TextKey) -> TextResult:
        """Return the losses in blocks of ``key.length`` tokens, with the time and the peak memory."""
        tokens, start_time = len(self.stream) - 1, time.monotonic()
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        segments = SegmentSums(tokens, self.document_ends, self.head.device)
        with Progress(f"length {key.length}", "tokens", tokens) as bar:
            nats, count = self._losses_by_position(key.length, bar.update, segments)
        result = text_result(key, nats, count)
        check_all_scored(result, tokens)
        seconds, peak = round(time.monotonic() - start_time, 3), round(peak_memory_mb(device.type), 1)
        return replace(result, seconds=seconds, peak_mb=peak, segments=segments.pack(key.length, draws=1))

    @torch.no_grad()
    def _losses_by_position(
        self, length: int, on_tokens: Callable[[int], Any], segments: SegmentSums
    ) -> tuple[Tensor, Tensor]:
        """Sum the losses of the targets at each position of a block.

        Args:
            length: tokens of a block.
            on_tokens: called with the number of targets of each batch.
            segments: sums by segment, to which the losses are added.

        Returns:
            Sums of losses in nats (length,) float64, and numbers of targets (length,) int64.
        """
        nats, count = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
        rows, device = max(1, (self.max_tokens or BATCH_TOKENS) // length), self.head.device
        base, (factor, softcap) = base_model(self.model), _logit_scaling(self.model.config)
        scored = 0
        for inputs, targets in _blocks(self.stream, length, rows):
            states = base(input_ids=inputs.to(device), use_cache=False).last_hidden_state  # (B, n, C)
            states = states.flatten(0, 1) * factor
            losses = target_losses(states, self.head, targets.flatten().to(device), softcap).view(targets.shape)
            nats[: targets.shape[1]] += losses.double().sum(0).cpu()
            count[: targets.shape[1]] += len(targets)
            begins = scored + targets.shape[1] * torch.arange(len(targets))  # (B,)
            segments.add(begins, losses, torch.ones_like(targets, dtype=torch.bool))
            scored += targets.numel()
            on_tokens(targets.numel())
        return nats, count


def _logit_scaling(config: Any) -> tuple[float, float]:
    """Return the factor of the logits of a model, and c of the softcap c·tanh(s/c) after it; 0: none."""
    factor = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return factor, getattr(config, "final_logit_softcapping", None) or 0.0


def _blocks(stream: Tensor, length: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets (B, n), B <= ``rows``: whole blocks, then the shorter last block; without padding."""
    tokens = len(stream) - 1
    blocks = tokens // length
    # (blocks, length) each
    inputs, targets = (side[: blocks * length].view(blocks, length) for side in (stream[:-1], stream[1:]))
    yield from zip(inputs.split(rows), targets.split(rows), strict=True)
    if blocks * length < tokens:
        yield stream[None, blocks * length : -1], stream[None, blocks * length + 1 :]

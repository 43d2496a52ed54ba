"""Perplexity of a transformers model over lengths, in the blocks that ``fairseq-rpe eval`` cuts, every token once."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rpe.adapters.attention_interface import NAME, Adapter, check_type  # first: it finds the package

# isort: split

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.data.encoders import EOS
from fairseq_rpe.evaluation.loss_aggregation import check_scored, peak_mb, result_of, with_units
from fairseq_rpe.evaluation.records import BATCH_TOKENS, TextKey, TextResult, draws_of, resumed
from fairseq_rpe.modules.cross_entropy import target_losses
from fairseq_rpe.utils.progress import Progress


def evaluate(
    model: PreTrainedModel,
    data: Path | str | Sequence[int] | Tensor,
    lengths: Sequence[int],
    *,
    subset: str = "test",
    start: int | None = None,
    max_tokens: int | None = None,
    out: Path | str | None = None,
) -> list[TextResult]:
    """Perplexity at each of ``lengths``, in blocks of so many tokens without overlap, the last one shorter.

    The token before the first is ``start``, and the first of any other block is predicted from the last before it: a
    target at position p of its block is predicted from p + 1 inputs. Every token is scored once; logits are never in
    memory as a whole. Blocks, rows and file are those of ``fairseq-rpe eval``, so that reports take both.

    Args:
        model: with a head for language modelling, of a type in ``TYPES``, with an encoding of ours or its own rotation.
        data: ids of tokens, (T,), of the model's own tokenizer; or a binarised data folder, whose ids are then the
            model's: it was trained on ids of the same dict.txt, fairseq's four special symbols included.
        lengths: in tokens, each at most T.
        subset: split of a data folder; of ids only a name in the results.
        start: id before the first token; None: eos_token_id of the model's config, of a data folder fairseq's.
        max_tokens: in a batch, at least one block; None: 2048.
        out: JSON-lines file to which each result is added; a length that is in it is not computed again.

    Returns:
        A result for each length, in the order asked for; ``loss_base2`` is in bits per token.

    Raises:
        UserError: no such data, ids that the model does not have, a length of more than T tokens, a perplexity that is
            not a number, or other than all tokens scored.
    """
    head = _head(model)
    text, digest, units = _text(data, subset)
    first = start if start is not None else EOS if isinstance(data, (str, Path)) else model.config.eos_token_id
    if not isinstance(first, int):
        raise UserError("the model's config names no single end-of-text token: give start=ID, the one before the text")
    stream = torch.cat([torch.tensor([first]), text])
    types = model.get_input_embeddings().num_embeddings
    if int(stream.min()) < 0 or int(stream.max()) >= types:
        odd = next(i for i in (int(stream.min()), int(stream.max())) if not 0 <= i < types)
        raise UserError(f"the text holds the id {odd} and the model has {types} types: take the ids that it knows")
    for length in lengths:
        if not 1 <= length <= len(text):
            raise UserError(f"length {length} is not between 1 and the {len(text)} tokens of the text")
    if max_tokens is not None and max_tokens < max(lengths):
        raise UserError(f"max_tokens={max_tokens} is less than length {max(lengths)}: raise it")
    adapter = getattr(model.base_model, NAME, None)
    encoding, positions = _named(model, adapter)
    of = {"checkpoint": _digest(model, encoding), "data": digest, "subset": subset, "positions": positions}
    keys = [TextKey(**of, draws=draws_of(positions), length=length) for length in lengths]

    unigram = corpus.unigram_ppl(text.numpy())

    def measure(key: TextKey) -> TextResult:
        begin, device = time.monotonic(), next(model.parameters()).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        rows = max(1, (max_tokens or BATCH_TOKENS) // key.length)
        with Progress(f"length {key.length}", "tokens", len(text)) as bar:
            nats, count = _by_position(model, head, stream, key.length, rows, bar.update)
        found = result_of(key, nats, count)
        check_scored(found, len(text))
        seconds, peak = round(time.monotonic() - begin, 3), round(peak_mb(device.type), 1)
        return replace(
            with_units(found, units),
            encoding=encoding,
            seconds=seconds,
            engine="transformers",
            peak_mb=peak,
            unigram_ppl=unigram,
        )

    training = model.training
    model.eval()
    try:
        return list(resumed(TextResult, None if out is None else Path(out), keys, lambda _: measure))
    finally:
        model.train(training)


def _head(model: PreTrainedModel) -> Tensor:
    """The weight (V, C) that makes logits of the last states."""
    check_type(model)
    layer = model.get_output_embeddings()
    if layer is None or model.base_model is model:
        raise UserError(f"{type(model).__name__} has no head for language modelling: load it as a …ForCausalLM")
    if getattr(layer, "bias", None) is not None:
        raise UserError("the model's output layer has a bias, which this evaluation does not know: leave it out")
    return layer.weight


def _text(data: Path | str | Sequence[int] | Tensor, subset: str) -> tuple[Tensor, str, corpus.Units | None]:
    """Token ids (T,) on the CPU, their digest, and their units where they are known."""
    if isinstance(data, (str, Path)):
        folder = Path(data)
        corpus.check_text(folder, subset)
        ids = torch.from_numpy(corpus.read_split(folder, subset)[0].astype("int64"))
        return ids, corpus.digest(folder), corpus.read_units(folder, subset)
    ids = torch.as_tensor(data).cpu()
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise UserError(f"a text is the ids of its tokens in one row, not {ids.dtype} of shape {tuple(ids.shape)}")
    ids = ids.long()
    return ids, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), None


def _named(model: PreTrainedModel, adapter: Adapter | None) -> tuple[str, str | None]:
    """The model's encoding, and the transform of its positions in evaluation."""
    if adapter is None:
        kind = (model.config.rope_parameters or {}).get("rope_type", "default")
        return f"{model.config.model_type}'s own rotation ({kind})", None
    return adapter.spec, adapter.positions


def _digest(model: PreTrainedModel, encoding: str) -> str:
    """Of all that makes the numbers: the config, the encoding and every weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "transformers_version")}
    found = hashlib.sha256(json.dumps([config, encoding], sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _blocks(stream: Tensor, length: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, n): whole blocks, so many together, and then the rest; no row is padded."""
    tokens = len(stream) - 1
    whole = tokens // length
    inputs, targets = (part[: whole * length].view(whole, length) for part in (stream[:-1], stream[1:]))
    yield from zip(inputs.split(rows), targets.split(rows), strict=True)
    if whole * length < tokens:
        yield stream[None, whole * length : -1], stream[None, whole * length + 1 :]


@torch.no_grad()
def _by_position(
    model: Any, head: Tensor, stream: Tensor, length: int, rows: int, tick: Callable[[int], Any]
) -> tuple[Tensor, Tensor]:
    """Sums of losses in nats (length,) float64, and the targets in them (length,), at each position of a block."""
    nats, count = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
    for inputs, targets in _blocks(stream, length, rows):
        states = model.base_model(input_ids=inputs.to(head.device), use_cache=False).last_hidden_state
        found = target_losses(states.flatten(0, 1), head, targets.flatten().to(head.device)).view(targets.shape)
        nats[: targets.shape[1]] += found.double().sum(0).cpu()
        count[: targets.shape[1]] += len(targets)
        tick(targets.numel())
    return nats, count

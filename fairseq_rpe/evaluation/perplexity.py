"""Perplexity in blocks of any length: the loss that fairseq-eval-lm computes, with every token of the split scored.

A block has positions 0 … L-1; the target at position p is predicted from p + 1 inputs.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

# before the imports of fairseq: it patches fairseq, and imports fairseq with lazy modules in place of slow ones
from fairseq_rpe import compat

# isort: split

import numpy as np
import torch
from fairseq import options
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from fairseq_rpe.attention.forward import positions_from_documents
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.evaluation.loading import (
    check_language_model,
    load_model,
    one_line_errors,
    separates_documents,
    training_blocks,
)
from fairseq_rpe.evaluation.loss_aggregation import (
    SegmentSums,
    add_units,
    check_all_scored,
    peak_memory_mb,
    text_result,
)
from fairseq_rpe.evaluation.records import BATCH_TOKENS, TextKey, TextRequest, TextResult, document_context
from fairseq_rpe.modules.cross_entropy import target_losses
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.tasks.language_modeling import SeparateDocuments, load_document_blocks, read_document_ends
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.files import PACKAGE_DIR
from fairseq_rpe.utils.progress import Progress

logger = logging.getLogger(__name__)
ADAPTIVE_CHUNK = 512  # targets of an adaptive softmax whose log-probabilities are in memory at a time
Engine = Callable[[TextKey, int], TextResult]  # function of a key and the largest number of tokens in a batch


class TokenBatch(NamedTuple):
    """Blocks of a text, padded at the end of rows.

    Attributes:
        inputs: (B, n) int64.
        targets: (B, n) int64.
        documents: (B, n) document index of each token, if positions restart with each document.
        begins: (B,) int64, index in the split of the first target of each row; only :class:`SegmentSums` needs it.
    """

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None
    begins: Tensor | None = None


def make_evaluator(request: TextRequest) -> Callable[[TextKey], TextResult]:
    """Load the model and return the function that measures one length.

    Args:
        request: checkpoint, text and engine.

    Returns:
        Function from the key of a length to its result.

    Raises:
        UserError: the checkpoint cannot be used. The returned function raises it if the evaluation fails or does not
            score all tokens.
    """
    checkpoint = checkpoints.load(request.checkpoint)
    request = _with_blocks(request, checkpoint)
    engine = _fairseq_engine(request) if request.engine == "fairseq" else _fast_engine(request, checkpoint)
    ids, _ = corpus.read_split(request.data, request.split)
    tokens, unigram_ppl = len(ids), corpus.unigram_ppl(ids)
    units = corpus.read_units(request.data, request.split)

    def evaluate(key: TextKey) -> TextResult:
        start = time.monotonic()
        with one_line_errors(f"evaluation at length {key.length} failed", request.log):
            result = engine(key, request.max_tokens or max(key.length, BATCH_TOKENS))
        logger.info("length %d, engine %s: scored tokens: %d of %d", key.length, request.engine, result.tokens, tokens)
        check_all_scored(result, tokens)
        return replace(
            add_units(result, units),
            encoding=checkpoint.encoding,
            seconds=round(time.monotonic() - start, 3),
            engine=request.engine,
            peak_mb=round(peak_memory_mb(devices.resolve_device(request.device)), 1),
            unigram_ppl=unigram_ppl,
            train_length=checkpoint.train_length() or None,
            context=document_context(request.blocks or "stream", bool(request.separate_documents)),
            updates=checkpoint.num_updates or None,
            tokens_trained=checkpoint.tokens_trained,
        )

    return evaluate


def _with_blocks(request: TextRequest, checkpoint: RpeCheckpoint) -> TextRequest:
    """Fill in blocks and separate documents from the checkpoint's training where the request leaves them open."""
    separate, blocks = request.separate_documents, request.blocks or training_blocks(checkpoint)
    if separate is None:
        separate = blocks == "stream" and separates_documents(checkpoint)
    request = replace(request, blocks=blocks, separate_documents=separate)
    if separate:
        checkpoint.require_rpe_model(", or drop --separate-documents")
    request.check_documents()
    return request


def _fast_engine(request: TextRequest, checkpoint: RpeCheckpoint) -> Engine:
    """Engine ``fast``: one loaded model, fairseq's batches, a loss that does not store the logits."""
    check_language_model(checkpoint, remedy=", or use --engine fairseq")
    model, task = load_model(request.checkpoint, request, request.data, request.log)
    transforms, draws = model.decoder.position_transforms, request.position_samples or 1
    if request.position_samples and not transforms.evaluation.random:
        raise UserError(
            f"--position-samples {request.position_samples}: positions are not random in this evaluation: leave it "
            "out, or use a random transform, such as --positions-eval randomized"
        )
    if request.separate_documents:
        model.decoder.check_separate_documents()
    if request.attention_prune is not None:
        model.decoder.prune_attention(request.attention_prune)
    pad, tokens = task.source_dictionary.pad(), corpus.count_tokens(request.data, request.split)
    document_ends = corpus.document_ends_if_recorded(request.data, request.split)

    def evaluate(key: TextKey, batch_tokens: int) -> TextResult:
        if next(model.parameters()).is_cuda:
            torch.cuda.reset_peak_memory_stats()
        sums = torch.zeros(key.length, dtype=torch.float64)
        count = torch.zeros(key.length, dtype=torch.int64)
        segments = SegmentSums(tokens, document_ends, next(model.parameters()).device)
        with Progress(f"length {key.length}", "tokens", draws * tokens) as bar:
            for sample in range(draws):
                transforms.sample = sample  # part of the seed of random positions
                batches = make_batches(request, task, key.length, batch_tokens)
                nats, count = losses_by_position(model, batches, key.length, pad, bar.update, segments)
                sums += nats
        result = text_result(key, sums / draws, count)  # the count is the same in each draw
        return replace(result, segments=segments.pack(key.length, draws))

    return evaluate


def make_batches(request: TextRequest, task: Any, length: int, batch_tokens: int) -> Iterator[TokenBatch]:
    """Yield the same batches as fairseq-eval-lm with the same flags.

    Args:
        request: data, split and kind of blocks.
        task: fairseq task with the dictionary.
        length: tokens of a block.
        batch_tokens: upper limit of the tokens in a batch.

    Yields:
        The batches, with the first target of each row, and the document index of each token if documents are separate.
    """
    dictionary, path = task.source_dictionary, str(request.data / request.split)
    if request.blocks == "document":
        blocks = load_document_blocks(path, dictionary, length)
    else:
        lines = data_utils.load_indexed_dataset(path, dictionary)
        blocks = TokenBlockDataset(
            lines, lines.sizes, length, dictionary.pad(), dictionary.eos(), break_mode="none", include_targets=True
        )
    if request.separate_documents:
        examples = SeparateDocuments(blocks, read_document_ends(path), dictionary, targets=["future"])
    else:
        # shuffle=True, as in fairseq's own task: blocks are sorted by length, those of one length in an order that
        # fairseq's fixed seed determines. Without it the batches would differ from those of fairseq-eval-lm.
        examples = MonolingualDataset(blocks, blocks.sizes, dictionary, shuffle=True, targets=["future"])
    serial = {"num_workers": 0, "data_buffer_size": 0}
    # A language-modelling task of its own, because `task` may be that of a model fine-tuned on questions.
    lm_task = LanguageModelingTask(SimpleNamespace(add_bos_token=False), dictionary)
    for sample in lm_task.eval_lm_dataloader(examples, batch_tokens, request.batch_size, **serial):
        net_input = sample["net_input"]
        # (B,); the indices of the dataset are unsigned
        begins = torch.from_numpy(blocks.slice_indices[sample["id"].numpy(), 0].astype(np.int64))
        yield TokenBatch(net_input["src_tokens"], sample["target"], net_input.get("documents"), begins)


@torch.no_grad()
def losses_by_position(
    model: Any,
    batches: Iterable[TokenBatch],
    length: int,
    pad: int,
    on_tokens: Callable[[int], Any],
    segments: SegmentSums | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the losses at each position of a block.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        batches: blocks of at most ``length`` tokens.
        length: largest number of positions.
        pad: index of the padding symbol.
        on_tokens: called after each batch with its number of targets.
        segments: sums by segment, to which the losses are added; the batches must have ``begins``.

    Returns:
        Sums of losses in nats, (length,) float64, and numbers of targets, (length,) int64.
    """
    device = next(model.parameters()).device
    nats = torch.zeros(length, dtype=torch.float64, device=device)
    count = torch.zeros(length, dtype=torch.int64)
    for inputs, targets, documents, begins in batches:
        not_pad = targets.ne(pad)
        inputs, targets = inputs.to(device), targets.to(device)
        losses = torch.zeros(targets.shape, device=device)
        documents = None if documents is None else documents.to(device)
        features = model.decoder(inputs, features_only=True, documents=documents)[0]  # (B, n, C)
        losses[not_pad] = _feature_losses(model, features[not_pad], targets[not_pad])
        if documents is not None:
            positions, _ = positions_from_documents(documents)
            indices = positions.k.long().flatten()  # (B·n,): position in the document
            nats.index_add_(0, indices, losses.double().flatten())
            count.index_add_(0, indices.cpu(), not_pad.flatten().long())
        else:
            nats[: targets.shape[1]] += losses.double().sum(0)
            count[: targets.shape[1]] += not_pad.sum(0)
        if segments is not None:
            assert begins is not None  # make_batches yields them
            segments.add(begins, losses, not_pad)
        on_tokens(int(not_pad.sum()))
    return nats.cpu(), count


def token_losses(model: Any, inputs: Tensor, targets: Tensor, cache: DecoderCache | None = None) -> Tensor:
    """Return the losses of targets that are predicted at the last positions of the inputs.

    Gradients are recorded unless the caller runs it under ``torch.no_grad()``, as the evaluations do.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        inputs: (B, n) int64.
        targets: (B, s) int64, s <= n.
        cache: KV cache of the earlier tokens, or None.

    Returns:
        Negative log-likelihoods in nats, (B·s,).
    """
    features = model.decoder(inputs, incremental_state=cache, features_only=True)[0][:, -targets.shape[1] :]
    return _feature_losses(model, features.flatten(0, 1), targets.flatten())


def _feature_losses(model: Any, features: Tensor, targets: Tensor) -> Tensor:
    """Return the losses in nats, (N,), of targets (N,) that are predicted from features (N, C).

    An adaptive softmax gives log-probabilities of the whole vocabulary, hence the chunks of ``ADAPTIVE_CHUNK`` targets.
    """
    decoder = model.decoder
    if decoder.adaptive_softmax is None:
        softcap = getattr(decoder, "logit_softcap", 0.0)  # fairseq's own decoder has none
        return target_losses(features, decoder.output_projection.weight, targets, softcap)
    losses = []
    chunks = zip(features.split(ADAPTIVE_CHUNK), targets.split(ADAPTIVE_CHUNK), strict=True)
    for chunk_features, chunk_targets in chunks:
        # fairseq expects the sample and the decoder's output, a pair, with a batch dimension.
        sample = {"target": chunk_targets[None].contiguous()}
        log_probs = model.get_normalized_probs((chunk_features[None], None), log_probs=True, sample=sample)
        target_log_probs = log_probs.float().gather(-1, chunk_targets[None, :, None])  # (1, chunk, V) -> (1, chunk, 1)
        losses.append(-target_log_probs.flatten())
    return torch.cat(losses)


def _fairseq_engine(request: TextRequest) -> Engine:
    """Engine ``fairseq``: runs fairseq-eval-lm's own code, once per length."""
    _check_fairseq_engine(request)
    flags = _eval_lm_flags(request)

    # Importing eval_lm configures logging unless log_to has done so: import it after log_to, only for this engine.
    from fairseq_cli import eval_lm

    # Importing the models patches eval_lm, to count scored tokens, only if it is loaded already; so patch it here.
    compat.count_scored_tokens(eval_lm)

    def evaluate(key: TextKey, batch_tokens: int) -> TextResult:
        command = [*flags, "--tokens-per-sample", str(key.length), "--max-tokens", str(batch_tokens)]
        args = options.parse_args_and_arch(options.get_eval_lm_parser(), input_args=command)
        try:
            scores = eval_lm.main(convert_namespace_to_omegaconf(args))
        finally:
            # Parsing stored --rpe-eval and the like here; later checkpoints of this process must not get them.
            compat.overrides.clear()
        tokens = scores["scored_tokens"]  # from the patch above
        return TextResult(**vars(key), tokens=tokens, loss_base2=float(scores["loss"]), ppl=float(scores["perplexity"]))

    return evaluate


def _check_fairseq_engine(request: TextRequest) -> None:
    """Refuse options that fairseq-eval-lm does not have."""
    if request.attention_prune is not None:
        raise UserError("--attention-prune needs --engine fast: fairseq-eval-lm cannot prune")
    if request.attention_backend is not None:
        raise UserError("--attention-backend needs --engine fast: fairseq-eval-lm uses the checkpoint's")
    if request.position_samples is not None:
        raise UserError("--position-samples needs --engine fast: fairseq-eval-lm samples positions once for each block")


def _eval_lm_flags(request: TextRequest) -> list[str]:
    """Return the flags of fairseq-eval-lm for a request, except those that depend on the length of the blocks."""
    task_flags = ["language_modeling", "--sample-break-mode", "none"]
    if request.blocks == "document":
        task_flags = ["rpe_language_modeling", "--blocks", "document"]
    if request.separate_documents:
        task_flags = ["rpe_language_modeling", "--separate-documents"]
    flags = [str(request.data), "--path", str(request.checkpoint), "--user-dir", str(PACKAGE_DIR)]
    flags += ["--task", *task_flags, "--gen-subset", request.split]
    flags += ["--num-workers", "0", "--data-buffer-size", "0", "--no-progress-bar", "--log-format", "none"]
    flags += ["--cpu"] if request.device == "cpu" else []
    optional_flags: dict[str, object] = {
        "--batch-size": request.batch_size,
        "--compute-dtype": request.compute_dtype,
        "--rpe-eval": request.rpe,
        "--positions-eval": request.positions_eval,
        "--rpe-module": request.rpe_module,
    }
    for flag, value in optional_flags.items():
        flags += [flag, str(value)] if value else []
    return flags

"""Perplexity in blocks of any length: what fairseq-eval-lm gives, every token of the split accounted for.

A block has positions 0 … L-1; the target at position p is predicted from p + 1 inputs.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fairseq_rpe import compat  # before fairseq, which then starts quicker

# isort: split

import torch
from fairseq import options
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from fairseq_rpe.attention.forward import separated
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.loading import blocks_of, check_plain, load, one_line, separates_documents
from fairseq_rpe.evaluation.loss_aggregation import check_scored, peak_mb, result_of, with_units
from fairseq_rpe.evaluation.records import BATCH_TOKENS, TextKey, TextRequest, TextResult, context_of
from fairseq_rpe.modules.cross_entropy import target_losses
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import Checkpoint
from fairseq_rpe.tasks.language_modeling import SeparateDocuments, load_document_blocks, read_document_ends
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.files import PACKAGE
from fairseq_rpe.utils.progress import Progress

logger = logging.getLogger(__name__)
ADAPTIVE = 512  # targets of an adaptive softmax whose scores are in memory at a time
Engine = Callable[[TextKey, int], TextResult]  # the int: tokens of a batch
Cache = dict[str, dict[str, Tensor]]  # fairseq's incremental state: keys, values and padding by layer


def measuring(request: TextRequest) -> Callable[[TextKey], TextResult]:
    """Make what is asked for ready to be measured, one length at a time.

    Raises UserError if the checkpoint cannot be used; a measurement does if it failed, or scored other than all tokens.
    """
    checkpoint = checkpoints.load(request.checkpoint)
    request = _with_blocks(request, checkpoint)
    engine = _fairseq_engine(request) if request.engine == "fairseq" else _fast_engine(request, checkpoint)
    ids, _ = corpus.read_split(request.data, request.subset)
    tokens, unigram, units = len(ids), corpus.unigram_ppl(ids), corpus.read_units(request.data, request.subset)

    def measure(key: TextKey) -> TextResult:
        start = time.monotonic()
        with one_line(f"evaluation at length {key.length} failed", request.log):
            found = engine(key, request.max_tokens or max(key.length, BATCH_TOKENS))
        scored = f"{found.tokens} of {tokens}"
        logger.info("length %d, engine %s: scored tokens: %s", key.length, request.engine, scored)
        check_scored(found, tokens)
        return replace(
            with_units(found, units),
            encoding=checkpoint.encoding,
            seconds=round(time.monotonic() - start, 3),
            engine=request.engine,
            peak_mb=round(peak_mb(devices.chosen(request.device)), 1),
            unigram_ppl=unigram,
            train_length=checkpoint.train_length() or None,
            context=context_of(request.blocks or "stream", bool(request.separate_documents)),
        )

    return measure


def _with_blocks(request: TextRequest, checkpoint: Checkpoint) -> TextRequest:
    """The request with the blocks of the checkpoint's training, and its separate documents, where it says nothing."""
    separate, blocks = request.separate_documents, request.blocks or blocks_of(checkpoint)
    if separate is None:
        separate = blocks == "stream" and separates_documents(checkpoint)
    found = replace(request, blocks=blocks, separate_documents=separate)
    if separate:
        checkpoint.require_ours(", or drop --separate-documents")
    found.check_documents()
    return found


def _fast_engine(request: TextRequest, checkpoint: Checkpoint) -> Engine:
    """The engine ``fast``: one loaded model, fairseq's own batches, a loss without the logits."""
    check_plain(checkpoint, otherwise=", or use --engine fairseq")
    model, task = load(request.checkpoint, request, request.data, request.log)
    moves, draws = model.decoder.moves, request.draws or 1
    if request.draws and not moves.evaluation.random:
        raise UserError(
            f"--draws {request.draws}: positions are not random in this evaluation: leave it out, or name random ones "
            "with --positions, e.g. randomized"
        )
    if request.separate_documents:
        model.decoder.check_separable()
    if request.attention_prune is not None:
        model.decoder.prune_attention(request.attention_prune)
    pad, total = task.source_dictionary.pad(), corpus.count_tokens(request.data, request.subset)

    def measure(key: TextKey, batch_tokens: int) -> TextResult:
        if next(model.parameters()).is_cuda:
            torch.cuda.reset_peak_memory_stats()
        sums = torch.zeros(key.length, dtype=torch.float64)
        count = torch.zeros(key.length, dtype=torch.int64)
        with Progress(f"length {key.length}", "tokens", draws * total) as bar:
            for moves.draw in range(draws):
                found = batches(request, task, key.length, batch_tokens)
                nats, count = by_position(model, found, key.length, pad, bar.update)
                sums += nats
        return result_of(key, sums / draws, count)

    return measure


def batches(request: TextRequest, task: Any, length: int, batch_tokens: int) -> Iterator[tuple[Tensor, ...]]:
    """Inputs and targets (B, n) of all blocks, padded at the end of rows; where documents are separate, theirs too.

    They are what fairseq-eval-lm makes of the same flags.
    """
    dictionary, path = task.source_dictionary, str(request.data / request.subset)
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
        examples = MonolingualDataset(blocks, blocks.sizes, dictionary, shuffle=True, targets=["future"])
    serial = {"num_workers": 0, "data_buffer_size": 0}
    # a model that was fine-tuned on questions reads text as one that was trained on text
    reading = LanguageModelingTask(SimpleNamespace(add_bos_token=False), dictionary)
    for sample in reading.eval_lm_dataloader(examples, batch_tokens, request.batch_size, **serial):
        documents = sample["net_input"].get("documents")
        yield sample["net_input"]["src_tokens"], sample["target"], *([] if documents is None else [documents])


@torch.no_grad()
def by_position(
    model: Any, batches: Iterable[tuple[Tensor, ...]], length: int, pad: int, tick: Callable[[int], Any]
) -> tuple[Tensor, Tensor]:
    """Sums of losses in nats (length,) float64, and the targets in them (length,), at each position of a block.

    ``batches``: inputs and targets (B, n), n <= length, rows padded at their end with the symbol ``pad``, and perhaps
    the document of each token, in which its position is then counted; ``tick`` is told how many targets each has.
    ``model``: a ``transformer_rpe_lm`` in evaluation mode.
    """
    device = next(model.parameters()).device
    nats = torch.zeros(length, dtype=torch.float64, device=device)
    count = torch.zeros(length, dtype=torch.int64)
    for inputs, targets, *separate in batches:
        kept = targets.ne(pad)
        inputs, targets = inputs.to(device), targets.to(device)
        found = torch.zeros(targets.shape, device=device)
        documents = separate[0].to(device) if separate else None
        features = model.decoder(inputs, features_only=True, documents=documents)[0]
        found[kept] = _feature_losses(model, features[kept], targets[kept])
        if documents is not None:
            at = separated(documents)[0].k.long()
            nats.index_add_(0, at.flatten(), found.double().flatten())
            count.index_add_(0, at.flatten().cpu(), kept.flatten().long())
        else:
            nats[: targets.shape[1]] += found.double().sum(0)
            count[: targets.shape[1]] += kept.sum(0)
        tick(int(kept.sum()))
    return nats.cpu(), count


def losses(model: Any, inputs: Tensor, targets: Tensor, state: Cache | None = None) -> Tensor:
    """Negative log-likelihoods in nats (B·s,) of targets (B, s), predicted at the last s of inputs (B, n)."""
    features = model.decoder(inputs, incremental_state=state, features_only=True)[0][:, -targets.shape[1] :]
    return _feature_losses(model, features.flatten(0, 1), targets.flatten())


def _feature_losses(model: Any, features: Tensor, targets: Tensor) -> Tensor:
    """The same (N,) from features (N, C)."""
    decoder = model.decoder
    if decoder.adaptive_softmax is None:
        return target_losses(features, decoder.output_projection.weight, targets)
    found = []
    for x, y in zip(features.split(ADAPTIVE), targets.split(ADAPTIVE), strict=True):
        scores = model.get_normalized_probs((x[None], None), log_probs=True, sample={"target": y[None].contiguous()})
        found.append(-scores.float().gather(-1, y[None, :, None]).flatten())
    return torch.cat(found)


def _fairseq_engine(request: TextRequest) -> Engine:
    """The engine ``fairseq``: fairseq-eval-lm's own code, once per length."""
    if request.attention_prune is not None:
        raise UserError("--attention-prune goes with --engine fast: fairseq-eval-lm cannot prune")
    if request.attention_backend is not None:
        raise UserError("--attention-backend goes with --engine fast: fairseq-eval-lm takes the checkpoint's")
    if request.draws is not None:
        raise UserError("--draws goes with --engine fast: fairseq-eval-lm draws random positions once for each block")
    same = [str(request.data), "--path", str(request.checkpoint), "--user-dir", str(PACKAGE)]
    kind = ["language_modeling", "--sample-break-mode", "none"]
    if request.blocks == "document":
        kind = ["rpe_language_modeling", "--blocks", "document"]
    if request.separate_documents:
        kind = ["rpe_language_modeling", "--separate-documents"]
    same += ["--task", *kind, "--gen-subset", request.subset]
    same += ["--num-workers", "0", "--data-buffer-size", "0", "--no-progress-bar", "--log-format", "none"]
    same += ["--cpu"] if request.device == "cpu" else []
    given: dict[str, object] = {"--batch-size": request.batch_size, "--compute-dtype": request.compute_dtype}
    given |= {"--rpe-eval": request.rpe, "--positions-eval": request.positions, "--rpe-module": request.rpe_module}
    for flag, value in given.items():
        same += [flag, str(value)] if value else []

    # When it is imported it settles where all messages go: after log_to, and only where it is asked for.
    from fairseq_cli import eval_lm

    # Where the models were imported before this module of fairseq's, nothing has guarded it yet.
    compat.guard_module(eval_lm)

    def measure(key: TextKey, batch_tokens: int) -> TextResult:
        flags = [*same, "--tokens-per-sample", str(key.length), "--max-tokens", str(batch_tokens)]
        args = options.parse_args_and_arch(options.get_eval_lm_parser(), input_args=flags)
        try:
            found = eval_lm.main(convert_namespace_to_omegaconf(args))
        finally:
            compat.overrides.clear()
        tokens = found["scored_tokens"]  # counted by the plugin's guard around fairseq's own evaluation loop
        return TextResult(**vars(key), tokens=tokens, loss_base2=float(found["loss"]), ppl=float(found["perplexity"]))

    return measure

"""Perplexity in blocks of any length: what fairseq-eval-lm gives, every token of the split accounted for."""

import contextlib
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch import Tensor
from tqdm import tqdm

from fairseq_rpe import compat
from fairseq_rpe.core import devices
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import PACKAGE
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.data.units import read_units
from fairseq_rpe.evaluation.loading import check_plain, load, one_line
from fairseq_rpe.evaluation.losses import buckets, by_position, defined
from fairseq_rpe.evaluation.measurements import BATCH_TOKENS, TextRequest
from fairseq_rpe.evaluation.results import TextKey, TextResult
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import Checkpoint

logger = logging.getLogger(__name__)
Engine = Callable[[TextKey, int], TextResult]  # the int: tokens of a batch


def measuring(request: TextRequest) -> Callable[[TextKey], TextResult]:
    """Make what is asked for ready to be measured, one length at a time.

    Raises:
        UserError: the checkpoint cannot be used. In a measurement: it failed, or scored other than all tokens.
    """
    checkpoint = checkpoints.load(request.checkpoint)
    engine = _fairseq_engine(request) if request.engine == "fairseq" else _fast_engine(request, checkpoint)
    tokens, units = corpus.count_tokens(request.data, request.subset), read_units(request.data, request.subset)

    def measure(key: TextKey) -> TextResult:
        start = time.monotonic()
        with one_line(f"evaluation at length {key.length} failed", request.log):
            found = engine(key, request.max_tokens or max(key.length, BATCH_TOKENS))
        scored = f"{found.tokens} of {tokens}"
        logger.info("length %d, engine %s: scored tokens: %s", key.length, request.engine, scored)
        if found.tokens != tokens:
            raise UserError(
                f"length {key.length}: {scored} tokens were scored, so the result is not kept: "
                "the model must accept this length, and the data hold no padding"
            )
        return replace(
            found,
            encoding=checkpoint.encoding,
            seconds=round(time.monotonic() - start, 3),
            bits_per_byte=units.bits_per_byte(found.loss_base2) if units else None,
            word_ppl=units.word_ppl(found.loss_base2) if units else None,
            engine=request.engine,
            peak_mb=round(peak_mb(devices.chosen(request.device)), 1),
        )

    return measure


def _fast_engine(request: TextRequest, checkpoint: Checkpoint) -> Engine:
    """The engine ``fast``: one loaded model, fairseq's own batches, a loss without the logits."""
    check_plain(checkpoint, otherwise=", or use --engine fairseq")
    model, task = load(request.checkpoint, request, request.data, request.log)
    if request.attention_prune is not None:
        model.decoder.prune_attention(request.attention_prune)
    pad = task.source_dictionary.pad()

    def measure(key: TextKey, batch_tokens: int) -> TextResult:
        if next(model.parameters()).is_cuda:
            torch.cuda.reset_peak_memory_stats()
        with tqdm(desc=f"length {key.length}", unit=" tokens", disable=None, leave=False) as bar:
            found = batches(request, task, key.length, batch_tokens)
            nats, count = by_position(model, found, key.length, pad, bar.update)
        tokens = int(count.sum())
        loss = defined(nats.sum()) / tokens / math.log(2)
        ppl = float(torch.tensor(loss, dtype=torch.float64).exp2())
        return TextResult(**vars(key), tokens=tokens, loss_base2=loss, ppl=ppl, positions_loss=buckets(nats, count))

    return measure


def batches(request: TextRequest, task: Any, length: int, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, n) of all blocks, padded at the end of rows.

    They are what fairseq-eval-lm makes of the same flags: random positions depend on which blocks share a batch.
    """
    dictionary = task.source_dictionary
    lines = data_utils.load_indexed_dataset(str(request.data / request.subset), dictionary)
    blocks = TokenBlockDataset(
        lines, lines.sizes, length, dictionary.pad(), dictionary.eos(), break_mode="none", include_targets=True
    )
    examples = MonolingualDataset(blocks, blocks.sizes, dictionary, shuffle=True, targets=["future"])
    serial = {"num_workers": 0, "data_buffer_size": 0}
    for sample in task.eval_lm_dataloader(examples, batch_tokens, request.batch_size, **serial):
        yield sample["net_input"]["src_tokens"], sample["target"]


def _fairseq_engine(request: TextRequest) -> Engine:
    """The engine ``fairseq``: fairseq-eval-lm's own code, once per length."""
    if request.attention_prune is not None:
        raise UserError("--attention-prune goes with --engine fast: fairseq-eval-lm knows no pruning")
    if request.attention_backend is not None:
        raise UserError("--attention-backend goes with --engine fast: fairseq-eval-lm takes the checkpoint's")
    same = [str(request.data), "--path", str(request.checkpoint), "--user-dir", str(PACKAGE)]
    same += ["--task", "language_modeling", "--gen-subset", request.subset, "--sample-break-mode", "none"]
    same += ["--num-workers", "0", "--no-progress-bar", "--log-format", "none"]
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
            compat.forget_overrides()
        tokens = found["scored_tokens"]  # counted by the plugin's guard around fairseq's own evaluation loop
        return TextResult(**vars(key), tokens=tokens, loss_base2=float(found["loss"]), ppl=float(found["perplexity"]))

    return measure


def peak_mb(device: str) -> float:
    """MiB: the most that this process has had in memory so far; on a GPU, of the GPU's."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(OSError, IndexError):
        # not getrusage: after an exec it starts from what the parent had
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)

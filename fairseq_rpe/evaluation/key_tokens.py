"""Key tokens, which a reference model predicts better from a long context, and LongPPL on these tokens.

Source: "What is Wrong with Perplexity for Long-context Language Modeling?" (arXiv 2410.23771); LSD is Eq. 2 there. For
the reference model P_E and token i of a block,

    LSD_i = log P_E(x_i | all tokens of the block before i) - log P_E(x_i | short context),
    LCL_i = log P_E(x_i | all tokens of the block before i).

Token i is a key token if LSD_i > α and LCL_i > β. LongPPL of a model P is exp(-mean of log P(x_i | all before)) over
the key tokens. In the paper K = 4096, the stretch is 1024, and blocks are whole documents.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.checkpoint_defaults import position_limits
from fairseq_rpe.evaluation.key_token_records import (
    KeyTokenEvalRequest,
    KeyTokenKey,
    KeyTokenRequest,
    KeyTokenResult,
    KeyTokens,
    KeyTokenSettings,
    is_key_token_file,
    read_key_tokens,
    write_key_tokens,
)
from fairseq_rpe.evaluation.loading import check_language_model, load_model, one_line_errors, read_stream
from fairseq_rpe.evaluation.loss_aggregation import MAX_BITS, too_large_error
from fairseq_rpe.evaluation.losses_by_token import (
    block_begins,
    block_ends,
    block_windows,
    extend_to_blocks,
    losses_by_token,
    short_windows,
    windows_with,
)
from fairseq_rpe.evaluation.records import BATCH_TOKENS, EvalOverrides
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.utils.output_checks import check_overwrite


def select_key_tokens(
    long_losses: np.ndarray, short_losses: np.ndarray, context: np.ndarray, settings: KeyTokenSettings
) -> np.ndarray:
    """Return the indices of the key tokens.

    Args:
        long_losses: (T,) losses of the reference model with the long context, in nats.
        short_losses: (T,) losses of the reference model with the short context, in nats.
        context: (T,) number of tokens before each token in its block.
        settings: K, α and β.

    Returns:
        (k,) int64, increasing.
    """
    increase = short_losses - long_losses  # LSD
    has_short_context = context >= settings.short_context
    is_key = has_short_context & (increase > settings.alpha) & (-long_losses > settings.beta)
    return np.flatnonzero(is_key)


def context_lengths(ends: np.ndarray) -> np.ndarray:
    """Return the number of inputs before each target in its block, (T,) int64, from the ``ends`` of the blocks.

    The first input of a block, which is the token or the end-of-sentence symbol before it, counts.
    """
    begins = block_begins(ends)
    return corpus.enumerate_groups(ends - begins) + 1


def resolve_settings(request: KeyTokenRequest) -> KeyTokenSettings:
    """Return the complete settings of a request.

    Raises:
        UserError: the checkpoint or the data cannot be used, or the text is too short for a long context.
    """
    checkpoint = checkpoints.load(request.checkpoint)
    check_language_model(checkpoint)
    transform = str(request.positions_eval or checkpoint.model.get("positions_eval") or "")
    train_length = checkpoint.train_length() or 1
    return request.settings(position_limits(request.rpe or checkpoint.encoding, transform or None, train_length))


def find_key_tokens(request: KeyTokenRequest, settings: KeyTokenSettings, out: Path | None) -> KeyTokens:
    """Find the key tokens of a split with a reference model, or read them if they are stored.

    Args:
        request: reference model, text and definition.
        settings: settings of the request, see :func:`resolve_settings`.
        out: file of the key tokens, which is written atomically; a file with the same settings is read instead. None:
            nothing is stored.

    Returns:
        The key tokens.

    Raises:
        UserError: the checkpoint, the data or the file cannot be used, or no token is a key token.
    """
    if out is not None:
        check_overwrite("--out", out, ".json")
        if out.exists():
            return _read_stored(out, settings)
    model, task = _load(request, request.checkpoint, request.data, request.log)
    stream = read_stream(
        request.data, request.split, task.source_dictionary, corpus.count_tokens(request.data, request.split)
    )
    ends = block_ends(request.data, request.split, settings.blocks, settings.length)
    batch_tokens = request.max_tokens or max(settings.length, BATCH_TOKENS)
    with one_line_errors(f"finding key tokens with {request.checkpoint} failed", request.log):
        windows = block_windows(ends, settings.length)
        long_losses = losses_by_token(model, stream, windows, batch_tokens, f"context up to {settings.length}")
        windows = short_windows(ends, settings.short_context, settings.stretch)
        short_losses = losses_by_token(model, stream, windows, batch_tokens, f"context {settings.short_context}")
    context = context_lengths(ends)
    indices = select_key_tokens(long_losses, short_losses, context, settings)
    if not len(indices):
        raise UserError(
            f"{request.checkpoint} finds no key tokens in {request.data}/{request.split}: use a reference that was "
            "trained on longer texts, a smaller --alpha or a larger --length"
        )
    key_tokens = KeyTokens(
        **vars(settings),
        encoding=checkpoints.load(request.checkpoint).encoding,
        tokens=len(stream) - 1,
        candidates=int((context >= settings.short_context).sum()),
        loss_base2=mean_bits(long_losses),
        key_loss_base2=mean_bits(long_losses[indices]),
        short_loss_base2=mean_bits(short_losses[indices]),
        indices=tuple(indices.tolist()),
    )
    if out is not None:
        write_key_tokens(out, key_tokens)
    return key_tokens


def _read_stored(out: Path, settings: KeyTokenSettings) -> KeyTokens:
    """Read stored key tokens; refuse those of other settings."""
    stored = read_key_tokens(out)
    if stored.digest != settings.digest:
        names = [name for name, value in vars(settings).items() if getattr(stored, name) != value]
        raise UserError(f"--out {out} has key tokens with another {names[0]}: name another file or delete it")
    return stored


def _load(overrides: EvalOverrides, checkpoint: Path, data: Path, log: Path | None) -> tuple[Any, Any]:
    """Load a model and its task; refuse random positions, which would differ between windows."""
    model, task = load_model(checkpoint, overrides, data, log)
    if model.decoder.position_transforms.evaluation.random:
        raise UserError(
            f"{checkpoint}: random positions are sampled for every window, so contexts cannot be compared: use another "
            "--positions-eval"
        )
    return model, task


def mean_bits(losses: np.ndarray) -> float:
    """Return the mean of losses (N,) in nats, as bits per token."""
    return float(losses.mean()) / math.log(2)


def load_or_find_key_tokens(request: KeyTokenEvalRequest, source: Path, out: Path | None) -> KeyTokens:
    """Read key tokens, or find them with a reference checkpoint and default settings.

    With a checkpoint, K is the training length of the evaluated model. The key tokens are stored in the folder of
    ``out``, under a name that depends on all settings, and read from there by a later call.

    Args:
        request: the model to evaluate and its text.
        source: a file of key tokens, or the checkpoint file of the reference model.
        out: JSON-lines file of the results; None: nothing is stored.

    Raises:
        UserError: the source cannot be used, is of another text or is the evaluated model itself, or the model does not
            record its training length.
    """
    request.check_options()
    corpus.check_text_folder(request.data, request.split)
    if is_key_token_file(source):
        key_tokens = read_key_tokens(source)
        key_tokens.check_text(request.data, request.split)
        request.check_not_evaluator(key_tokens.evaluator)
        return key_tokens
    train_length = checkpoints.load(request.checkpoint).train_length()
    if not train_length:
        raise UserError(
            f"{request.checkpoint} does not record its training length: write a file for --key-tokens with fairseq-rpe "
            "key-tokens --short-context N"
        )
    reference = KeyTokenRequest(
        checkpoint=source,
        data=request.data,
        split=request.split,
        short_context=train_length,
        device=request.device,
        rpe_module=request.rpe_module,
        log=request.log,
    )
    settings = resolve_settings(reference)
    request.check_not_evaluator(settings.evaluator)
    stored = None if out is None else out.parent / f"key-tokens-{settings.digest[:12]}.json"
    return find_key_tokens(reference, settings, stored)


def make_evaluator(request: KeyTokenEvalRequest, key_tokens: KeyTokens) -> Callable[[KeyTokenKey], KeyTokenResult]:
    """Load a model and return the function that measures its losses on key tokens at one length.

    Args:
        request: the model, its text and options; its blocks are those of the key tokens.
        key_tokens: the key tokens.

    Returns:
        Function from the key of a length to its result.

    Raises:
        UserError: the checkpoint cannot be used. The returned function raises it if the evaluation fails.
    """
    checkpoint = checkpoints.load(request.checkpoint)
    check_language_model(checkpoint)
    model, task = _load(request, request.checkpoint, request.data, request.log)
    if request.attention_prune is not None:
        model.decoder.prune_attention(request.attention_prune)
    stream = read_stream(request.data, request.split, task.source_dictionary, key_tokens.tokens)
    indices = np.array(key_tokens.indices)
    short_loss: list[float] = []  # bits per token, measured at the first length: it does not depend on the length

    def evaluate(key: KeyTokenKey) -> KeyTokenResult:
        start = time.monotonic()
        batch_tokens = request.max_tokens or max(key.length, BATCH_TOKENS)
        with one_line_errors(f"evaluation at length {key.length} failed", request.log):
            if not short_loss:
                short_loss.append(_short_loss(model, stream, key_tokens, request.data, batch_tokens))
            ends = block_ends(request.data, request.split, key_tokens.blocks, key.length)
            losses = losses_by_token(
                model, stream, block_windows(ends, key.length), batch_tokens, f"length {key.length}"
            )
            shuffled = _shuffled_loss(model, stream, key_tokens, ends, batch_tokens) if key.shuffle_far else None
        bits, key_bits = mean_bits(losses), mean_bits(losses[indices])
        largest = max(bits, key_bits, short_loss[0], shuffled or 0.0)
        if largest >= MAX_BITS:
            raise too_large_error(largest)
        return KeyTokenResult(
            **vars(key),
            encoding=checkpoint.encoding,
            long_ppl=2.0**key_bits,
            key_loss_base2=key_bits,
            short_loss_base2=short_loss[0],
            shuffled_loss_base2=shuffled,
            key_count=len(indices),
            key_share=key_tokens.share,
            tokens=key_tokens.tokens,
            loss_base2=bits,
            ppl=2.0**bits,
            evaluator=key_tokens.evaluator,
            short_context=key_tokens.short_context,
            train_length=checkpoint.train_length() or None,
            seconds=round(time.monotonic() - start, 3),
        )

    return evaluate


def _short_loss(model: Any, stream: Tensor, key_tokens: KeyTokens, data: Path, batch_tokens: int) -> float:
    """Return the mean loss of the key tokens with their short contexts, in bits per token."""
    indices = np.array(key_tokens.indices)
    ends = block_ends(data, key_tokens.split, key_tokens.blocks, key_tokens.length)
    windows = windows_with(short_windows(ends, key_tokens.short_context, key_tokens.stretch), indices)
    title = f"context {key_tokens.short_context}"
    return mean_bits(losses_by_token(model, stream, windows, batch_tokens, title)[indices])


def _shuffled_loss(model: Any, stream: Tensor, key_tokens: KeyTokens, ends: np.ndarray, batch_tokens: int) -> float:
    """Return the mean loss of the key tokens, in bits, with other text in place of all tokens before the short context.

    The blocks with these ``ends`` need not be those in which the key tokens were chosen.
    """
    indices, near = np.array(key_tokens.indices), key_tokens.short_context - 1
    windows = windows_with(short_windows(ends, key_tokens.short_context, key_tokens.stretch), indices)
    windows = extend_to_blocks(windows, ends)
    return mean_bits(losses_by_token(model, stream, windows, batch_tokens, "far text replaced", near)[indices])

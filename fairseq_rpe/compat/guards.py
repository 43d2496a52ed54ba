"""Checks that fairseq-eval-lm scores every token of the set with its true context."""

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import utils
from fairseq.tasks.language_modeling import LanguageModelingTask

from fairseq_rpe.compat.monkeypatch import patch
from fairseq_rpe.core.errors import UserError

logger = logging.getLogger("fairseq_rpe.eval")
_tokens = SimpleNamespace(expected=None, scored=0)  # in the current evaluation; expected is None if unknown


@patch(LanguageModelingTask, "eval_lm_dataloader")
def check_eval_workers(original: Any, self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a context window with several workers: it is kept in the collater, so contexts would be wrong."""
    shards = kwargs.get("num_shards", 1)
    if kwargs.get("context_window", 0) > 0 and max(kwargs.get("num_workers", 1), shards) > 1:
        raise UserError("--context-window is wrong with more than one worker or shard: use --num-workers 1")
    longest, limit = int(dataset.sizes.max()), args[0] if args else kwargs.get("max_tokens")
    if limit is not None and longest > limit:
        raise UserError(f"--max-tokens {limit} is less than a block of {longest} tokens: raise it or lower the block's")
    _tokens.expected = int(dataset.sizes.sum()) if shards == 1 else None
    return original(self, dataset, *args, **kwargs)


@patch(LanguageModelingTask, "setup_dictionary")
def check_data_folder(original: Any, args: Any, **kwargs: Any) -> Any:
    """Raise UserError for a missing data folder; fairseq prints a traceback."""
    if args.data:
        folder = utils.split_paths(args.data)[0]
        if not os.path.isfile(os.path.join(folder, "dict.txt")):
            raise UserError(f"data {folder}: no dict.txt there; name a folder made by fairseq-preprocess")
    return original(args, **kwargs)


@patch(LanguageModelingTask, "load_dataset")
def check_split(original: Any, self: Any, split: str, *args: Any, **kwargs: Any) -> Any:
    """Raise UserError for a missing split; fairseq prints a traceback."""
    try:
        return original(self, split, *args, **kwargs)
    except FileNotFoundError:
        raise UserError(f"data {self.args.data}: no split '{split}' there (no {split}.idx)") from None


def check_scored_tokens() -> None:
    """Compare scored with expected tokens in fairseq-eval-lm, which silently drops blocks that are too long."""
    for name in ("fairseq_cli.eval_lm", "__main__"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "eval_lm") and hasattr(module, "SequenceScorer"):
            count_scored_tokens(module)


def count_scored_tokens(module: Any) -> None:
    """Patch the ``eval_lm`` function of a module, once, to count scored tokens."""
    if hasattr(module.eval_lm, "__wrapped__"):
        return

    class CountingScorer(module.SequenceScorer):
        """Counts scores, and refuses infinite and NaN scores, which fairseq would leave out of the mean."""

        def generate(self, models: Any, sample: Any, **kwargs: Any) -> Any:
            """Return the hypotheses of a batch after counting their scores."""
            hypotheses = super().generate(models, sample, **kwargs)
            for best, *_ in hypotheses:
                scores = best["positional_scores"]
                if not torch.isfinite(scores).all():
                    raise UserError(
                        "the model gives a target token probability 0 or NaN: its perplexity is not defined"
                    )
                _tokens.scored += scores.numel()
            return hypotheses

    module.SequenceScorer = CountingScorer

    @patch(module, "eval_lm")
    def eval_lm(original: Any, *args: Any, remove_bos_token: bool = False, **kwargs: Any) -> Any:
        _tokens.scored = 0
        results = original(*args, remove_bos_token=remove_bos_token, **kwargs)
        scored, expected = _tokens.scored, _tokens.expected
        if expected is None or remove_bos_token:
            logger.warning("scored tokens: %d; not compared with the set (shards or --add-bos-token)", scored)
        elif scored != expected:
            raise UserError(
                f"scored {scored} of {expected} tokens, so the perplexity is not that of the set: blocks "
                "longer than the model's limit were dropped; lower --tokens-per-sample or raise max_target_positions"
            )
        else:
            logger.info("scored tokens: %d of %d", scored, expected)
        results["scored_tokens"] = scored
        return results

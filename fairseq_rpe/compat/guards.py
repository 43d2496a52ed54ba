"""Checks that a perplexity printed by fairseq-eval-lm is over every token of the set, with its true context."""

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import utils
from fairseq.tasks.language_modeling import LanguageModelingTask

from fairseq_rpe.compat.monkeypatch import replaces
from fairseq_rpe.core.errors import UserError

logger = logging.getLogger("fairseq_rpe.eval")
_tokens = SimpleNamespace(expected=None, scored=0)  # in the evaluation at hand; None: not known


@replaces(LanguageModelingTask, "eval_lm_dataloader")
def guard_workers(original: Any, self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """A context window is kept in the collater, so several workers or shards feed wrong contexts: refuse."""
    shards = kwargs.get("num_shards", 1)
    if kwargs.get("context_window", 0) > 0 and max(kwargs.get("num_workers", 1), shards) > 1:
        raise UserError("--context-window is wrong with more than one worker or shard: use --num-workers 1")
    longest, limit = int(dataset.sizes.max()), args[0] if args else kwargs.get("max_tokens")
    if limit is not None and longest > limit:
        raise UserError(f"--max-tokens {limit} is less than a block of {longest} tokens: raise it or lower the block's")
    _tokens.expected = int(dataset.sizes.sum()) if shards == 1 else None
    return original(self, dataset, *args, **kwargs)


@replaces(LanguageModelingTask, "setup_dictionary")
def guard_data(original: Any, args: Any, **kwargs: Any) -> Any:
    """A data folder that is not there ends in a traceback of fairseq's: say it in one line."""
    if args.data:
        folder = utils.split_paths(args.data)[0]
        if not os.path.isfile(os.path.join(folder, "dict.txt")):
            raise UserError(f"data {folder}: no dict.txt there; name a folder made by fairseq-preprocess")
    return original(args, **kwargs)


@replaces(LanguageModelingTask, "load_dataset")
def guard_split(original: Any, self: Any, split: str, *args: Any, **kwargs: Any) -> Any:
    """So does a split that is not there."""
    try:
        return original(self, split, *args, **kwargs)
    except FileNotFoundError:
        raise UserError(f"data {self.args.data}: no split '{split}' there (no {split}.idx)") from None


def guard_eval_lm() -> None:
    """fairseq-eval-lm drops blocks longer than the model allows, to ppl 1.00 over zero tokens: count and compare."""
    for name in ("fairseq_cli.eval_lm", "__main__"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "eval_lm") and hasattr(module, "SequenceScorer"):
            guard_module(module)


def guard_module(module: Any) -> None:
    """Guard the ``eval_lm`` function of a module that holds fairseq's command; once is enough."""
    if hasattr(module.eval_lm, "__wrapped__"):
        return

    class CountingScorer(module.SequenceScorer):
        """Counts the scores handed out and refuses ones that fairseq would leave out of the mean."""

        def generate(self, models: Any, sample: Any, **kwargs: Any) -> Any:
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

    @replaces(module, "eval_lm")
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

"""Checks that a perplexity printed by fairseq-eval-lm is over every token of the set, with its true context."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

import torch

from .core import UserError

logger = logging.getLogger("fairseq_rpe.eval")
_expected: dict[str, Any] = {"tokens": None}


def guard_workers() -> None:
    """A context window is kept in the collater, so several workers or shards feed wrong contexts: refuse."""
    from fairseq.tasks.language_modeling import LanguageModelingTask

    original = LanguageModelingTask.eval_lm_dataloader

    @functools.wraps(original)
    def dataloader(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("context_window", 0) > 0 and (
            kwargs.get("num_workers", 1) > 1 or kwargs.get("num_shards", 1) > 1
        ):
            raise UserError("--context-window is wrong with more than one worker or shard: use --num-workers 1")
        whole = kwargs.get("num_shards", 1) == 1
        _expected["tokens"] = int(dataset.sizes.sum()) if whole else None
        return original(self, dataset, *args, **kwargs)

    LanguageModelingTask.eval_lm_dataloader = dataloader


def guard_data() -> None:
    """A data folder or split that is not there ends in a traceback of fairseq's: say it in one line."""
    from fairseq import utils
    from fairseq.tasks.language_modeling import LanguageModelingTask

    make_dictionary = LanguageModelingTask.setup_dictionary.__func__
    load = LanguageModelingTask.load_dataset

    @functools.wraps(make_dictionary)
    def setup_dictionary(cls: Any, args: Any, **kwargs: Any) -> Any:
        if args.data:
            folder = utils.split_paths(args.data)[0]
            if not os.path.isfile(os.path.join(folder, "dict.txt")):
                raise UserError(f"data {folder}: no dict.txt there; name a folder made by fairseq-preprocess")
        return make_dictionary(cls, args, **kwargs)

    @functools.wraps(load)
    def load_dataset(self: Any, split: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(self, split, *args, **kwargs)
        except FileNotFoundError:
            raise UserError(f"data {self.args.data}: no split '{split}' there (no {split}.idx)") from None

    LanguageModelingTask.setup_dictionary = classmethod(setup_dictionary)
    LanguageModelingTask.load_dataset = load_dataset


def guard_eval_lm() -> None:
    """fairseq-eval-lm drops blocks longer than the model allows, to ppl 1.00 over zero tokens: count and compare."""
    for name in ("fairseq_cli.eval_lm", "__main__"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "eval_lm") and hasattr(module, "SequenceScorer"):
            guard_module(module)


def guard_module(module: Any) -> None:
    """Guard the ``eval_lm`` function of a module that holds fairseq's command."""
    if getattr(module.eval_lm, "guarded", False):
        return
    counted = {"tokens": 0}

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
                counted["tokens"] += scores.numel()
            return hypotheses

    original = module.eval_lm

    @functools.wraps(original)
    def eval_lm(*args: Any, remove_bos_token: bool = False, **kwargs: Any) -> Any:
        counted["tokens"] = 0
        results = original(*args, remove_bos_token=remove_bos_token, **kwargs)
        expected = _expected["tokens"]
        if expected is None or remove_bos_token:
            logger.warning(
                "scored tokens: %d; not compared with the set (shards or --add-bos-token)", counted["tokens"]
            )
        elif counted["tokens"] != expected:
            raise UserError(
                f"scored {counted['tokens']} of {expected} tokens, so the perplexity is not that of the set: blocks "
                "longer than the model's limit were dropped; lower --tokens-per-sample or raise max_target_positions"
            )
        else:
            logger.info("scored tokens: %d of %d", counted["tokens"], expected)
        results["scored_tokens"] = counted["tokens"]
        return results

    eval_lm.guarded = True
    module.SequenceScorer, module.eval_lm = CountingScorer, eval_lm

"""The criterion ``lm_cross_entropy``."""

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss, AdaptiveLossConfig
from fairseq.logging import metrics
from omegaconf import II

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.modules.cross_entropy import linear_cross_entropy

logger = logging.getLogger(__name__)
WATCHED = "rpe_"


@dataclass
class LMCrossEntropyConfig(AdaptiveLossConfig):
    """Nothing of its own."""

    distributed_world_size: int = II("distributed_training.distributed_world_size")


@register_criterion("lm_cross_entropy", dataclass=LMCrossEntropyConfig)
class LMCrossEntropy(AdaptiveLoss):
    """fairseq's ``cross_entropy``, computed a few hundred tokens at a time.

    loss = -Σ ln p(target) in nats over all non-padding targets; the log shows bits per token and ppl = 2^loss. Also
    logs the encodings' learned quantities: ``rpe_<name>_l<layer>`` is the mean over heads, ``rpe_<name>_h<head>`` the
    mean over layers. With an adaptive softmax it runs fairseq's ``adaptive_loss`` and says so.
    """

    def __init__(self, task, sentence_avg, ddp_backend="legacy_ddp", distributed_world_size=1):
        super().__init__(task, sentence_avg)
        self._splits_gradients = distributed_world_size > 1 and ddp_backend in {"c10d", "pytorch_ddp"}
        self._said = False

    @classmethod
    def build_criterion(cls, cfg, task):
        """Of any --ddp-backend: what an adaptive softmax asks of it is known with the model."""
        return cls(task, cfg.sentence_avg, cfg.ddp_backend, cfg.distributed_world_size)

    def forward(self, model, sample, reduce=True):
        """Returns the summed loss (or one per target), the sample size and what to log."""
        if model.decoder.adaptive_softmax is not None:
            if self._splits_gradients:
                raise UserError("an adaptive softmax on several processes needs --ddp-backend legacy_ddp")
            if not self._said:
                logger.info("lm_cross_entropy: the model has an adaptive softmax, computing fairseq's adaptive_loss")
                self._said = True
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
            return loss, sample_size, {**logging_output, **watched(model)}
        features = model(**sample["net_input"], features_only=True)[0]
        target = sample["target"]
        # the logits in the model's --compute-dtype in training; a validation is computed as an evaluation is
        computing = getattr(model.decoder, "computing", None) if model.training else None
        with computing(features.device) if computing else contextlib.nullcontext():
            weight = model.decoder.output_projection.weight
            loss = linear_cross_entropy(features.flatten(0, 1), weight, target.flatten(), self.padding_idx, reduce)
        sample_size = target.size(0) if self.sentence_avg else sample["ntokens"]
        counts = {"ntokens": sample["ntokens"], "nsentences": target.size(0), "sample_size": sample_size}
        return loss, sample_size, {"loss": loss.detach(), **counts, **watched(model)}

    @staticmethod
    def reduce_metrics(logging_outputs):
        """Sums over workers to bits per token, perplexity and the watched means."""
        AdaptiveLoss.reduce_metrics(logging_outputs)
        log_watched(logging_outputs)


@torch.no_grad()
def watched(model) -> dict[str, Any]:
    """The encodings' learned quantities as 0-d tensors, keyed for logging; empty where there are none."""
    found = [encoding.logged_scalars() for encoding in getattr(model.decoder, "encodings", ())]
    values: dict[str, Any] = {}
    for name in found[0] if found else ():
        stack = torch.stack([scalars[name].float().reshape(-1) for scalars in found])
        values.update({f"{WATCHED}{name}_l{i}": v for i, v in enumerate(stack.mean(1))})
        if stack.shape[1] > 1:
            values.update({f"{WATCHED}{name}_h{i + 1}": v for i, v in enumerate(stack.mean(0))})
    return {**values, "rpe_count": 1} if values else {}


def log_watched(logging_outputs) -> None:
    """Log the mean over workers and batches of what :func:`watched` gave."""
    counts = sum(utils.item(log.get("rpe_count", 0)) for log in logging_outputs)
    for key in logging_outputs[0] if logging_outputs and counts else ():
        if key.startswith(WATCHED) and key != "rpe_count":
            value = sum(utils.item(log.get(key, 0)) for log in logging_outputs) / counts
            metrics.log_scalar(key, value, priority=2000, round=4)

"""fairseq criterion ``lm_cross_entropy``: the language-modelling loss without storing all logits."""

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
SCALAR_PREFIX = "rpe_"  # of an encoding's scalars in fairseq's log


@dataclass
class LMCrossEntropyConfig(AdaptiveLossConfig):
    """Configuration of ``lm_cross_entropy``; it adds no flag to fairseq's adaptive loss."""

    distributed_world_size: int = II("distributed_training.distributed_world_size")


@register_criterion("lm_cross_entropy", dataclass=LMCrossEntropyConfig)
class LMCrossEntropy(AdaptiveLoss):
    """fairseq's ``cross_entropy``, computed in chunks of tokens.

    loss = -Σ ln p(target) in nats over all non-padding targets; the log shows bits per token and ppl = 2^loss. It also
    logs the encodings' learned scalars: ``rpe_<name>_l<layer>`` is the mean over heads, ``rpe_<name>_h<head>`` the mean
    over layers. With an adaptive softmax it computes fairseq's ``adaptive_loss``.
    """

    def __init__(self, task, sentence_avg, ddp_backend="legacy_ddp", distributed_world_size=1):
        super().__init__(task, sentence_avg)
        self._splits_gradients = distributed_world_size > 1 and ddp_backend in {"c10d", "pytorch_ddp"}
        self._logged_adaptive = False

    @classmethod
    def build_criterion(cls, cfg, task):
        """Build the criterion for any --ddp-backend; an adaptive softmax checks it later, when the model is known."""
        return cls(task, cfg.sentence_avg, cfg.ddp_backend, cfg.distributed_world_size)

    def forward(self, model, sample, reduce=True):
        """Compute the loss of a batch.

        Args:
            model: with an :class:`RPEDecoder`.
            sample: batch of fairseq.
            reduce: sum the loss over targets.

        Returns:
            The loss in nats, the sample size and the values to log.
        """
        if model.decoder.adaptive_softmax is not None:
            if self._splits_gradients:
                raise UserError("an adaptive softmax on several processes needs --ddp-backend legacy_ddp")
            if not self._logged_adaptive:
                logger.info("lm_cross_entropy: the model has an adaptive softmax, computing fairseq's adaptive_loss")
                self._logged_adaptive = True
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
            return loss, sample_size, {**logging_output, **scalars_for_logging(model)}
        features = model(**sample["net_input"], features_only=True)[0]
        target = sample["target"]
        # training computes logits in the model's --compute-dtype, validation in float32 like an evaluation
        autocast = getattr(model.decoder, "autocast", None) if model.training else None
        with autocast(features.device) if autocast else contextlib.nullcontext():
            weight = model.decoder.output_projection.weight
            softcap = getattr(model.decoder, "logit_softcap", 0.0)
            loss = linear_cross_entropy(
                features.flatten(0, 1), weight, target.flatten(), self.padding_idx, reduce, softcap
            )
        sample_size = target.size(0) if self.sentence_avg else sample["ntokens"]
        counts = {"ntokens": sample["ntokens"], "nsentences": target.size(0), "sample_size": sample_size}
        return loss, sample_size, {"loss": loss.detach(), **counts, **scalars_for_logging(model)}

    @staticmethod
    def reduce_metrics(logging_outputs):
        """Log bits per token, perplexity and the mean scalars of all workers."""
        AdaptiveLoss.reduce_metrics(logging_outputs)
        log_scalars(logging_outputs)


@torch.no_grad()
def scalars_for_logging(model) -> dict[str, Any]:
    """Return the learned scalars of a model's encodings as 0-d tensors by log name; empty without scalars.

    A name has the layer, the first of those that share the encoding, or the head, as a mean over the encodings that
    have this scalar.
    """
    encodings = getattr(model.decoder, "encodings", ())
    scalars: dict[str, dict[int, Any]] = {}  # name -> layer -> (H,) or (1,)
    for instance, encoding in enumerate(encodings):
        for name, value in encoding.logged_scalars().items():
            scalars.setdefault(name, {})[encodings.layers(instance)[0]] = value.float().reshape(-1)
    values: dict[str, Any] = {}
    for name, by_layer in scalars.items():
        values.update({f"{SCALAR_PREFIX}{name}_l{layer}": value.mean() for layer, value in by_layer.items()})
        of_heads = [value for value in by_layer.values() if len(value) > 1]
        if of_heads:
            values.update({f"{SCALAR_PREFIX}{name}_h{i + 1}": v for i, v in enumerate(torch.stack(of_heads).mean(0))})
    return {**values, "rpe_count": 1} if values else {}


def log_scalars(logging_outputs) -> None:
    """Log the mean of :func:`scalars_for_logging` over workers and batches."""
    counts = sum(utils.item(log.get("rpe_count", 0)) for log in logging_outputs)
    for key in logging_outputs[0] if logging_outputs and counts else ():
        if key.startswith(SCALAR_PREFIX) and key != "rpe_count":
            value = sum(utils.item(log.get(key, 0)) for log in logging_outputs) / counts
            metrics.log_scalar(key, value, priority=2000, round=4)

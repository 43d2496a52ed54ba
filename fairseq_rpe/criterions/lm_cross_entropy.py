"""The criterion ``lm_cross_entropy``."""

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.constants import DDP_BACKEND_CHOICES
from fairseq.logging import metrics
from omegaconf import II

from ..core import UserError
from ..modules.cross_entropy import linear_cross_entropy

logger = logging.getLogger(__name__)
WATCHED = "rpe_"


@dataclass
class LMCrossEntropyConfig(FairseqDataclass):
    """Nothing of its own."""

    sentence_avg: bool = II("optimization.sentence_avg")
    ddp_backend: DDP_BACKEND_CHOICES = II("distributed_training.ddp_backend")
    distributed_world_size: int = II("distributed_training.distributed_world_size")


@register_criterion("lm_cross_entropy", dataclass=LMCrossEntropyConfig)
class LMCrossEntropy(FairseqCriterion):
    """fairseq's ``cross_entropy``, computed a few hundred tokens at a time.

    loss = -Σ ln p(target) in nats over all non-padding targets; the log shows bits per token and ppl = 2^loss. Also
    logs the encodings' learned quantities: ``rpe_<name>_l<layer>`` is the mean over heads, ``rpe_<name>_h<head>`` the
    mean over layers. With an adaptive softmax it runs fairseq's ``adaptive_loss`` and says so.
    """

    def __init__(self, task, sentence_avg, ddp_backend="legacy_ddp", distributed_world_size=1):
        super().__init__(task)
        self.sentence_avg = sentence_avg
        self._splits_gradients = distributed_world_size > 1 and ddp_backend in {"c10d", "pytorch_ddp"}
        self._adaptive = AdaptiveLoss(task, sentence_avg)
        self._said = False

    def forward(self, model, sample, reduce=True):
        """Returns the summed loss (or one per target), the sample size and what to log."""
        if model.decoder.adaptive_softmax is not None:
            return self._adaptive_forward(model, sample, reduce)
        features = model(**sample["net_input"], features_only=True)[0]
        target = sample["target"]
        with _computing(model, features.device):
            loss = linear_cross_entropy(
                features.flatten(0, 1),
                model.decoder.output_projection.weight,
                target.flatten(),
                self.padding_idx,
                reduce,
            )
        sample_size = target.size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": target.size(0),
            "sample_size": sample_size,
            **watched(model),
        }
        return loss, sample_size, logging_output

    def _adaptive_forward(self, model, sample, reduce):
        if self._splits_gradients:
            raise UserError("an adaptive softmax on several processes needs --ddp-backend legacy_ddp")
        if not self._said:
            logger.info("lm_cross_entropy: the model has an adaptive softmax, computing fairseq's adaptive_loss")
            self._said = True
        loss, sample_size, logging_output = self._adaptive(model, sample, reduce)
        return loss, sample_size, {**logging_output, **watched(model)}

    @staticmethod
    def reduce_metrics(logging_outputs):
        """Sums over workers to bits per token, perplexity and the watched means."""
        total = {key: sum(log.get(key, 0) for log in logging_outputs) for key in ("loss", "ntokens", "sample_size")}
        total = {key: utils.item(value) for key, value in total.items()}
        metrics.log_scalar("loss", total["loss"] / total["sample_size"] / math.log(2), total["sample_size"], round=3)
        per_token = "loss"
        if total["sample_size"] != total["ntokens"]:
            per_token = "nll_loss"
            metrics.log_scalar(per_token, total["loss"] / total["ntokens"] / math.log(2), total["ntokens"], round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters[per_token].avg))
        log_watched(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed():
        """They can: everything logged is a sum or is divided by ``rpe_count``."""
        return True


def _computing(model, device):
    """The logits in the model's --compute-dtype in training; a validation is computed as an evaluation is."""
    computing = getattr(model.decoder, "computing", None)
    return computing(device) if computing and model.training else contextlib.nullcontext()


@torch.no_grad()
def watched(model) -> dict[str, Any]:
    """The encodings' learned quantities as 0-d tensors, keyed for logging; empty where there are none."""
    encodings = getattr(model.decoder, "encodings", None)
    found = [encoding.scalars() for encoding in encodings or ()]
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

"""fairseq criterion ``answer_cross_entropy``: the loss of answers given their prompts."""

import math

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.criterions.lm_cross_entropy import log_scalars, scalars_for_logging


@register_criterion("answer_cross_entropy", dataclass=FairseqDataclass)
class AnswerCrossEntropy(FairseqCriterion):
    """Cross-entropy of the answer given the prompt; the prompt has no loss.

    loss = -Σ ln p(token) in nats over the answer's tokens and its end; the sample size is their number. Logs bits per
    answer token, ``accuracy`` (answer tokens that are the most likely ones) and ``exact`` (rows in which all of them
    are, i.e. that greedy decoding answers correctly), both in per cent. Padding is never predicted.
    """

    def forward(self, model, sample, reduce=True):
        """Compute the loss of a batch.

        Args:
            model: with an :class:`RPEDecoder`.
            sample: batch with ``answer`` (B, T) bool, where the target belongs to an answer.
            reduce: sum the loss over answer tokens.

        Returns:
            The loss in nats, the number of answer tokens and the values to log.
        """
        if "answer" not in sample:
            raise UserError(
                "answer_cross_entropy needs examples with answers: use it with --task rpe_algorithmic or rpe_answers"
            )
        if model.decoder.adaptive_softmax is not None:
            raise UserError("answer_cross_entropy does not support an adaptive softmax: drop --adaptive-softmax-cutoff")
        features = model(**sample["net_input"], features_only=True)[0]
        answer, target = sample["answer"], sample["target"]
        logits = model.decoder.output_layer(features[answer]).float()  # (answer tokens, V)
        loss = F.cross_entropy(logits, target[answer], reduction="sum" if reduce else "none")
        with torch.no_grad():
            prediction = logits.detach().clone()
            prediction[:, self.padding_idx] = -torch.inf
            wrong = torch.zeros_like(answer)
            wrong[answer] = prediction.argmax(-1) != target[answer]
        tokens, rows = int(answer.sum()), answer.shape[0]
        logging_output = {
            "loss": loss.detach(),
            "tokens": tokens,
            "right_tokens": tokens - wrong.sum(),
            "rows": rows,
            "right_rows": rows - wrong.any(1).sum(),
            # fairseq reads these three
            "ntokens": sample["ntokens"],
            "nsentences": rows,
            "sample_size": tokens,
            **scalars_for_logging(model),
        }
        return loss, tokens, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs):
        """Log bits per answer token and the two accuracies of all workers."""
        counts = ("loss", "tokens", "right_tokens", "rows", "right_rows")
        total = {key: utils.item(sum(log.get(key, 0) for log in logging_outputs)) for key in counts}
        metrics.log_scalar("loss", total["loss"] / total["tokens"] / math.log(2), total["tokens"], round=4)
        metrics.log_scalar("accuracy", 100 * total["right_tokens"] / total["tokens"], total["tokens"], round=2)
        metrics.log_scalar("exact", 100 * total["right_rows"] / total["rows"], total["rows"], round=2)
        log_scalars(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed():
        """Return True: all logged values are sums or divided by ``rpe_count``."""
        return True

"""The criterion ``answer_cross_entropy``."""

import math

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.criterions.lm_cross_entropy import log_watched, watched


@register_criterion("answer_cross_entropy", dataclass=FairseqDataclass)
class AnswerCrossEntropy(FairseqCriterion):
    """Cross-entropy of the answer given the prompt; what the prompt says is not learned.

    loss = -Σ ln p(word) in nats over the answer's words and its end, sample size = their number. Logs bits per answer
    token, ``accuracy`` (share of those tokens that are the likeliest) and ``exact`` (share of rows whose every answer
    token is: the rows that greedy decoding gets right), both in per cent; padding is never taken for an answer.
    """

    def forward(self, model, sample, reduce=True):
        """Returns the summed loss (or one per answer token), the number of answer tokens and what to log."""
        if "answer" not in sample:
            raise UserError(
                "answer_cross_entropy needs examples with answers: use it with --task rpe_algorithmic or rpe_answers"
            )
        if model.decoder.adaptive_softmax is not None:
            raise UserError("answer_cross_entropy does not support an adaptive softmax: drop --adaptive-softmax-cutoff")
        features = model(**sample["net_input"], features_only=True)[0]
        answer, target = sample["answer"], sample["target"]
        logits = model.decoder.output_layer(features[answer]).float()
        loss = F.cross_entropy(logits, target[answer], reduction="sum" if reduce else "none")
        with torch.no_grad():
            guess = logits.detach().clone()
            guess[:, self.padding_idx] = -torch.inf
            wrong = torch.zeros_like(answer)
            wrong[answer] = guess.argmax(-1) != target[answer]
        tokens, rows = int(answer.sum()), answer.shape[0]
        logging_output = {
            "loss": loss.detach(),
            "tokens": tokens,
            "right_tokens": tokens - wrong.sum(),
            "rows": rows,
            "right_rows": rows - wrong.any(1).sum(),
            # fairseq itself reads these three
            "ntokens": sample["ntokens"],
            "nsentences": rows,
            "sample_size": tokens,
            **watched(model),
        }
        return loss, tokens, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs):
        """Sums over workers to bits per answer token and the two accuracies."""
        counts = ("loss", "tokens", "right_tokens", "rows", "right_rows")
        total = {key: utils.item(sum(log.get(key, 0) for log in logging_outputs)) for key in counts}
        metrics.log_scalar("loss", total["loss"] / total["tokens"] / math.log(2), total["tokens"], round=4)
        metrics.log_scalar("accuracy", 100 * total["right_tokens"] / total["tokens"], total["tokens"], round=2)
        metrics.log_scalar("exact", 100 * total["right_rows"] / total["rows"], total["rows"], round=2)
        log_watched(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed():
        """They can: everything logged is a sum or is divided by ``rpe_count``."""
        return True

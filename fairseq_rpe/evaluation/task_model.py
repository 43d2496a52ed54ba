"""A model that was trained on an algorithmic task, with the positions of an example fixed before it answers."""

from torch import Tensor

from fairseq_rpe import algorithms, positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.generation import check_length_independent
from fairseq_rpe.evaluation.loading import load_model
from fairseq_rpe.evaluation.records import ExactMatchRequest
from fairseq_rpe.positions import registry
from fairseq_rpe.positions.position_transforms import seeded_generator
from fairseq_rpe.runs.checkpoints import RpeCheckpoint


def checkpoint_algorithm(checkpoint: RpeCheckpoint) -> algorithms.Algorithm:
    """Return the algorithmic task that a checkpoint was trained on.

    Args:
        checkpoint: a loaded checkpoint.

    Raises:
        UserError: it was trained on text.
    """
    spec = checkpoint.task.get("algorithm")
    if not spec:
        raise UserError(f"{checkpoint.path} was not trained on an algorithmic task: use fairseq-rpe eval for text")
    return algorithms.build(str(spec))


def explicit_ratio(spec: str, train_length: int, length: int) -> str:
    """Return ``spec`` with an automatic interpolation ratio replaced by its value, min(1, train_length / length).

    Args:
        spec: spec of a position transform; one without an automatic ratio is returned as it is.
        train_length: training length, in items or tokens.
        length: evaluation length, in the same unit.

    >>> explicit_ratio("interpolate", 20, 80)
    'interpolate:ratio=0.25'
    """
    cls, _, config = registry.resolve(spec)
    return cls.spec_for_length(config, train_length, length) or spec


def cut_after(tokens: list[int], end: int | None) -> list[int]:
    """Return the tokens up to the first ``end``, included; all of them if there is none."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


class TaskModel:
    """A model that was trained on an algorithmic task, whose positions are fixed before it answers.

    Args:
        request: checkpoint and the settings that replace those of the checkpoint.
        checkpoint: the loaded checkpoint.

    Attributes:
        algorithm: the algorithmic task.
        model: the ``transformer_rpe_lm`` in evaluation mode.
        task: its fairseq task.

    Raises:
        UserError: the checkpoint cannot be used.
    """

    def __init__(self, request: ExactMatchRequest, checkpoint: RpeCheckpoint) -> None:
        self.algorithm = checkpoint_algorithm(checkpoint)
        self.model, self.task = load_model(request.checkpoint, request, log=request.log)
        check_length_independent(self.model)
        self._ratio_unit, self._transforms = request.ratio_unit, self.model.decoder.position_transforms
        default = self._transforms.train.evaluation
        # Spec of the position transform; an automatic ratio is replaced for each length.
        self._transform = str(request.positions_eval or checkpoint.model.get("positions_eval") or default)

    def fix_positions(self, length: int, prompts: Tensor | None) -> str:
        """Fix the positions of prompt and answer of ``length`` items before decoding.

        Args:
            length: number of items.
            prompts: (B, P) prompts, for each of which random positions are sampled; None: random positions are only
                checked.

        Returns:
            Spec of the position transform, with an automatic ratio replaced by its value.

        Raises:
            UserError: the transform has no positions for this length.
        """
        tokens, train_tokens = self.algorithm.num_tokens(length), self.task.train_tokens
        if self._ratio_unit == "items":
            spec = explicit_ratio(self._transform, self.algorithm.max_length("train"), length)
        else:
            spec = explicit_ratio(self._transform, train_tokens, tokens)
        transform = positions.build(spec, train_tokens)
        if prompts is None or not transform.random:
            frozen = positions.freeze(transform, tokens, seeded_generator(self._transform, length))
        else:
            generators = [seeded_generator(self._transform, length, prompt) for prompt in prompts.tolist()]
            frozen = positions.freeze_rows(transform, [tokens] * len(generators), generators)
        self._transforms.evaluation = frozen
        return spec

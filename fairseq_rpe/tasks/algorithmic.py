"""The fairseq task ``rpe_algorithmic``: generated sequences, of which only the answer is to be learned."""

from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import open_dict
from torch import Tensor

from fairseq_rpe.algorithms import Algorithm, Example, build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.tasks.collate import AnswerRows

# no `X | None` and no postponed annotations here: fairseq's parser reads these annotations at run time


@dataclass
class AlgorithmicConfig(FairseqDataclass):
    """The flag that names the task; the other fields are what fairseq's language models ask of one."""

    algorithm: str = field(
        default="copy",
        metadata={"help": "name or name:key=value,key=value ('fairseq-rpe list --algorithms' shows all)"},
    )
    tokens_per_sample: int = field(default=0, metadata={"help": "refused: the task knows its longest example"})
    max_target_positions: Optional[int] = field(default=None, metadata={"help": "refused: any length is accepted"})
    add_bos_token: bool = field(default=False, metadata={"help": "refused: a prompt begins with its verb"})


class AnswerDataset(AnswerRows):
    """The examples of an algorithm; a word that the closed vocabulary ``dictionary`` lacks is an error."""

    def __init__(self, examples: list[Example], dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.examples = examples
        self.items = np.array([e.length for e in examples])
        self.sizes = np.array([len(e.prompt) + len(e.answer) for e in examples])

    def encode(self, words: tuple[str, ...]) -> list[int]:
        return [self.dictionary.indices[word] for word in words]

    def row(self, index: int) -> tuple[list[int], int]:
        example = self.examples[index]
        row = [*self.encode(example.prompt), *self.encode(example.answer), self.dictionary.eos()]
        return row, len(example.prompt)

    def prompts(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Prompts (B, P) and answers with the end of the sentence (B, A) of examples with equally many items."""
        chosen = [self.examples[i] for i in indices]
        prompts = torch.tensor([self.encode(e.prompt) for e in chosen])
        return prompts, torch.tensor([[*self.encode(e.answer), self.dictionary.eos()] for e in chosen])


@register_task("rpe_algorithmic", dataclass=AlgorithmicConfig)
class AlgorithmicTask(FairseqTask):
    """Learn an algorithm on few items, be tested on many. Splits train, valid and test are generated from a seed.

    The training length that encodings and position transforms ask for is that of the longest training example, prompt
    and answer, in tokens.
    """

    def __init__(self, cfg: AlgorithmicConfig, algorithm: Algorithm) -> None:
        super().__init__(cfg)
        self.algorithm = algorithm
        self.train_tokens = algorithm.tokens(algorithm.longest("train"))
        self._dictionary = Dictionary()
        for word in algorithm.words():
            self._dictionary.add_symbol(word)

    @classmethod
    def setup_task(cls, cfg: AlgorithmicConfig, **kwargs: Any) -> "AlgorithmicTask":
        """Raises UserError for an algorithm or option that does not exist, and for flags that would have no effect."""
        for name in ("tokens_per_sample", "max_target_positions", "add_bos_token"):
            if getattr(cfg, name, None):
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} has no effect on rpe_algorithmic, whose examples are whole: drop it")
        return cls(cfg, build(str(cfg.algorithm)))

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        self.datasets[split] = AnswerDataset(list(self.algorithm.examples(split)), self._dictionary)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        with open_dict(cfg):
            cfg.tokens_per_sample = cfg.rpe_train_length = self.train_tokens
        return super().build_model(cfg, from_checkpoint)

    @property
    def source_dictionary(self) -> Dictionary:
        return self._dictionary

    target_dictionary = source_dictionary

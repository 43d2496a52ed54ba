"""The fairseq task ``rpe_algorithmic``: generated sequences, of which only the answer is to be learned."""

from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import open_dict
from torch import Tensor

from ..algorithms import Algorithm, Example, build
from ..core import UserError

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


class AnswerDataset(FairseqDataset):
    """Prompts with their answers.

    A sample of B rows has ``src_tokens`` (B, T) int64, padded on the right; ``target`` (B, T), the next word, padding
    included; ``answer`` (B, T) bool, where the next word belongs to the answer or ends it. A word that the closed
    vocabulary ``dictionary`` lacks is an error.
    """

    def __init__(self, examples: list[Example], dictionary: Dictionary) -> None:
        self.examples, self.dictionary = examples, dictionary
        self.items = np.array([e.length for e in examples])
        self.sizes = np.array([len(e.prompt) + len(e.answer) for e in examples])

    def encode(self, words: tuple[str, ...]) -> list[int]:
        return [self.dictionary.indices[word] for word in words]

    def __len__(self) -> int:
        return len(self.examples)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    num_tokens = size

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        row = [*self.encode(example.prompt), *self.encode(example.answer), self.dictionary.eos()]
        return {"id": index, "row": torch.tensor(row), "prompt": len(example.prompt)}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        source = data_utils.collate_tokens([s["row"][:-1] for s in samples], pad, eos)
        target = data_utils.collate_tokens([s["row"][1:] for s in samples], pad, eos)
        lengths = torch.tensor([len(s["row"]) - 1 for s in samples])
        starts = torch.tensor([s["prompt"] - 1 for s in samples])
        at = torch.arange(source.shape[1])
        return {
            "id": torch.tensor([s["id"] for s in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": {"src_tokens": source, "src_lengths": lengths},
            "target": target,
            "answer": (at >= starts[:, None]) & (at < lengths[:, None]),
        }

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

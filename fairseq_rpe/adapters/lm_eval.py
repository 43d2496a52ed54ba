"""Model ``fairseq_rpe`` of lm-evaluation-harness: a checkpoint, or a folder of ``fairseq-rpe export``.

Importing this module registers the model. The token before the first one of a text is ``</s>``, as in training, also in
prompts of ``generate_until`` and contexts of ``loglikelihood``.
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError

if find_spec("lm_eval") is None:
    raise UserError('the package lm_eval is not installed: pip install -e ".[lm-eval]"')

from fairseq_rpe.adapters.export import ExportRequest, export  # before lm_eval, because it checks for transformers

# isort: split

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from fairseq_rpe.adapters.pretrained_config import UNLIMITED_POSITIONS
from fairseq_rpe.data.folder import EOS_ID


@register_model("fairseq_rpe")
class FairseqRpeLM(HFLM):
    """A model of this package for the tasks of lm-evaluation-harness.

    Args:
        checkpoint: checkpoint file, or folder of an exported model.
        rpe_eval: encoding in place of the checkpoint's, or None.
        positions_eval: position transform in evaluation in place of the checkpoint's, or None.
        data: data folder with the dictionary and the tokenizer; None: the one that the checkpoint names.
        max_length: largest number of tokens that are read at once; older ones are cut off. None: no limit.
        batch_size: rows that are computed together.
        others: further arguments of ``HFLM``, such as ``device``; ``softmax_dtype`` is float64 unless it is given,
            because sums of float32 log-probabilities differ by 1e-5 nats and more from the exact sum.

    Raises:
        UserError: the checkpoint cannot be exported or has no tokenizer, an option has no effect on an exported model,
            or the encoding depends on the length of a row, which batches change.
    """

    def __init__(
        self,
        checkpoint: str,
        rpe_eval: str | None = None,
        positions_eval: str | None = None,
        data: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = 1,
        **others: Any,
    ) -> None:
        folder = Path(checkpoint)
        if folder.is_dir():
            self._check_folder(folder, {"rpe_eval": rpe_eval, "positions_eval": positions_eval, "data": data})
        else:
            self._temporary = tempfile.TemporaryDirectory(prefix="fairseq-rpe-lm-eval-")
            folder = Path(self._temporary.name) / "model"
            source = None if data is None else Path(data)
            export(ExportRequest(Path(checkpoint), folder, source, rpe=rpe_eval, positions_eval=positions_eval))
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"{checkpoint} has no tokenizer, and tasks are texts: name a model of text with --data")
        if str(batch_size).startswith("auto") and max_length is None:
            raise UserError("batch_size=auto tries rows of max_length tokens: give max_length=N, or a number of rows")
        if not str(others.get("device")).startswith("mps"):  # which has no float64
            others.setdefault("softmax_dtype", "float64")
        super().__init__(
            pretrained=str(folder), tokenizer=str(folder), max_length=max_length, batch_size=batch_size, **others
        )
        config: Any = self.model.config
        if self.model.decoder.length_dependent and str(batch_size) != "1":
            raise UserError(
                f"'{config.rpe}' depends on the length of a row, and lm_eval pads rows to one length: use batch_size=1"
            )
        if not config.use_cache:  # HFLM asks for a cache
            generate = self.model.generate
            self.model.generate = lambda *args, **options: generate(*args, **{**options, "use_cache": False})
        self._is_text = config.eos_token_id is None
        limit = "without a limit" if self.max_length == UNLIMITED_POSITIONS else f"up to {self.max_length} tokens"
        print(f"{config.rpe}: trained on {config.train_length} tokens, reads texts {limit}", file=sys.stderr)

    @staticmethod
    def _check_folder(folder: Path, options: dict[str, str | None]) -> None:
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json: name a checkpoint, or a folder of fairseq-rpe export")
        for name, value in options.items():
            if value is not None:
                raise UserError(f"{name} has no effect on an exported model: export it again, or name the checkpoint")

    @property
    def prefix_token_id(self) -> int:
        """Id before the first token of a text."""
        return EOS_ID

    @property
    def eot_token_id(self) -> int:
        """Id that ends a generated text: ``</s>``, or padding, which never comes, where ``</s>`` is only a newline."""
        return int(self.model.config.pad_token_id) if self._is_text else EOS_ID

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        text: str = super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def tok_batch_encode(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the ids and the mask (B, n) of prompts, each with ``</s>`` before its first token."""
        ids, mask = super().tok_batch_encode(*args, **kwargs)  # padded on the left
        first = mask.shape[1] - mask.sum(1, keepdim=True)  # (B, 1), columns of padding: a column more is put before
        ids, mask = (torch.nn.functional.pad(x, (1, 0)) for x in (ids, mask))
        return ids.scatter(1, first, EOS_ID), mask.scatter(1, first, 1)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return [EOS_ID, *context_ids], continuation_ids

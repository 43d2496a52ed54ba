"""How long a whole language model takes to read a block, by encoding, in turns on this machine; nothing is trained.

Source of the measurement: FIRE (arXiv 2310.04418), Figure 5: time at a length of 2,048, mean of 10 runs.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import fairseq_rpe.models  # noqa: F401  (before fairseq: registers, and lets it start quicker)

# isort: split
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from fairseq_rpe.analysis.speed import DTYPES, Timing, Way, check_backends, free_memory, in_turns, machine, refusal
from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.checkpoints.model_sizes import SIZES, full_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel
from fairseq_rpe.utils.table import Cell, Row, Table

STEP = "inference"
SHARED = " (shared)"  # after an encoding of which all layers have the same one, as FIRE-S


@dataclass(frozen=True)
class Setting:
    """What takes turns: ``encodings``, and those of ``shared`` with one module for all layers, by each of ``backends``.

    ``model``: a size of :data:`fairseq_rpe.checkpoints.model_sizes.SIZES`; ``lengths`` in tokens; ``vocabulary``: types
    of the dictionary; ``batch``: texts at a time; ``dtype``: a key of ``analysis.speed.DTYPES``, of all weights;
    ``repeats``: the mean of so many turns counts. ``shared`` is fire where that is among the encodings and
    nothing is said.
    """

    device: str
    model: str
    encodings: Sequence[str] = ("nope", "rope", "alibi", "kerple_log", "t5_bias", "fire")
    shared: Sequence[str] | None = None
    backends: Sequence[str] = ("auto",)
    lengths: Sequence[int] = (2048,)
    batch: int = 1
    vocabulary: int = 4096
    dtype: str = "fp32"
    repeats: int = 10

    def check(self) -> None:
        """Raises UserError: no such backend, or nothing is named."""
        check_backends(self.backends, self.encodings, {"auto": None, **BACKENDS})

    def measurements(self) -> list[Callable[[], tuple[list[Timing], list[str]]]]:
        """What to call for the timings of each length."""
        return [partial(measure, self, length) for length in self.lengths]

    def ways(self) -> list[dict[str, str]]:
        """The model's settings of encoding, sharing and backend, in their order."""
        named = tuple(self.backends)
        shared = [spec for spec in self.encodings if spec == "fire"] if self.shared is None else self.shared
        asked = [(spec, "auto") for spec in self.encodings] + [(spec, "model") for spec in shared]
        backends = tuple(BACKENDS) if named == ("all",) else named
        return [{"rpe": spec, "rpe_share": share, "attention_backend": b} for spec, share in asked for b in backends]

    def __str__(self) -> str:
        """Machine and setting in one line."""
        size = SIZES[self.model]
        model = f"{self.model}: {size.layers} layers of {size.width}, {size.heads} heads, vocabulary {self.vocabulary}"
        return machine(self.device, f"{model}, batch {self.batch}, {self.dtype}, means of {self.repeats}")


def measure(setting: Setting, length: int) -> tuple[list[Timing], list[str]]:
    """A forward pass to the logits for each way in turns, and a line on each that is left out.

    ``ratio`` is to the first that is timed. Raises UserError: an encoding is unknown, nothing can be timed, or
    memory is short.
    """
    needed = 4 * setting.batch * length * max(setting.vocabulary, SIZES[setting.model].ffn)
    if needed > free_memory(setting.device):
        raise UserError(
            f"a block of {setting.batch} x {length} tokens needs about {needed / 2**30:.0f} GiB, and there is "
            "not enough memory: choose smaller --lengths, --batch or --vocabulary"
        )
    left_out: list[str] = []
    ways = dict(_ways(setting, length, left_out))
    if not ways:
        raise UserError(f"nothing can be timed at {length} tokens ({left_out[0]}): choose another backend or length")
    timings: list[Timing] = []
    first = 0.0  # mean seconds of the first way, not rounded
    for key, found in in_turns(ways, setting.repeats, setting.device).items():
        mean, least, most = (round(1000 * of(found), 3) for of in (statistics.fmean, min, max))
        seconds = statistics.fmean(found)
        first = first or seconds
        timings.append(Timing(*key, STEP, length, mean, round(seconds / first, 3), least, most))
    return timings, left_out


def _ways(setting: Setting, length: int, left_out: list[str]) -> Iterator[tuple[tuple[str, str], Way]]:
    """A function for each encoding and backend, called once already. All models have the same weights in memory."""
    dictionary = Dictionary()
    for number in range(setting.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    task = LanguageModelingTask(SimpleNamespace(add_bos_token=False), dictionary)
    inputs = torch.randint(4, len(dictionary), (setting.batch, length), generator=torch.Generator().manual_seed(0))
    weights: dict[str, Tensor] = {}
    for chosen in setting.ways():
        name, backend = chosen["rpe"] + SHARED * (chosen["rpe_share"] == "model"), chosen["attention_backend"]
        way = partial(_read, _model(setting, task, length, weights, chosen), inputs.to(setting.device))
        why = refusal(way, f"{name}, {backend}", f"{name}, {backend} at {length} tokens")
        if why:
            left_out.append(why)
        else:
            yield (name, backend), way


def _model(setting: Setting, task: Any, length: int, weights: dict[str, Tensor], chosen: dict[str, str]) -> Any:
    """A model in evaluation mode; what is not of its encoding is that of ``weights``, which the first one fills."""
    args = SimpleNamespace(tokens_per_sample=length, **chosen)
    ARCH_CONFIG_REGISTRY[full_name(setting.model)](args)
    torch.manual_seed(0)
    model = TransformerRPELanguageModel.build_model(args, task).eval()
    model = model.to(device=setting.device, dtype=DTYPES[setting.dtype])
    for name, parameter in model.named_parameters():
        if not name.startswith("decoder.encodings."):
            parameter.data = weights.setdefault(name, parameter.data)
    return model


@torch.inference_mode()
def _read(model: Any, tokens: Tensor) -> None:
    model(tokens)


def tables(timings: Sequence[Timing]) -> list[Table]:
    """Encoding and backend × length: mean with least and most in milliseconds, and the multiple of the first."""
    lengths = list(dict.fromkeys(t.length for t in timings))
    found = {(t.encoding, t.backend, t.length): t for t in timings}
    head = ["encoding, backend", *(f"{n} tokens {unit}" for n in lengths for unit in ("(ms)", "(ratio)"))]
    rows = []
    for encoding, backend in dict.fromkeys(key[:2] for key in found):
        own = [found.get((encoding, backend, n)) for n in lengths]
        cells = [
            (f"{t.milliseconds:.1f} ({t.least:.1f} to {t.most:.1f})", f"{t.ratio:.2f}") if t else ("", "") for t in own
        ]
        rows.append(Row(f"{encoding}, {backend}", [Cell(text) for pair in cells for text in pair]))
    return [Table("Inference time of whole models", head, rows)]

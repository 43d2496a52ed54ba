"""Times forward passes of whole language models by encoding, interleaved on this machine. Nothing is trained.

Source of the measurement: FIRE (arXiv 2310.04418), Figure 5: time at a length of 2,048, mean of 10 runs.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import fairseq_rpe.models  # noqa: F401  (before fairseq: registers the plugin, and fairseq starts faster)

# isort: split
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from fairseq_rpe.analysis.speed import (
    DTYPES,
    TimedCall,
    Timing,
    check_backends,
    describe_machine,
    failure_reason,
    free_memory,
    time_interleaved,
)
from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.checkpoints.model_sizes import MODEL_SIZES, full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel
from fairseq_rpe.utils.table import Cell, Table, TableRow

STEP = "inference"
SHARED = " (shared)"  # suffix of an encoding with one module for all layers, such as FIRE-S


@dataclass(frozen=True)
class ModelBenchmark:
    """A benchmark: the options of ``fairseq-rpe bench``.

    Attributes:
        device: device of the models.
        model: key of :data:`fairseq_rpe.checkpoints.model_sizes.MODEL_SIZES`.
        encodings: encodings with one module for each layer.
        shared: encodings with one module for all layers; None: fire, if it is among ``encodings``.
        backends: attention back ends; each encoding is timed with each of them.
        lengths: tokens of a block.
        batch: blocks of a batch.
        vocabulary: types of the dictionary.
        dtype: key of ``analysis.speed.DTYPES``, for all weights.
        repeats: number of passes; the mean is reported.
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
        """Check that the back ends exist and there is something to time.

        Raises:
            UserError: a back end is unknown, or none or no encoding is given.
        """
        check_backends(self.backends, self.encodings, {"auto": None, **BACKENDS})

    def measurements(self) -> list[Callable[[], tuple[list[Timing], list[str]]]]:
        """Return one function for each length, which returns the timings and lines on what is left out."""
        return [partial(time_forward_passes, self, length) for length in self.lengths]

    def model_settings(self) -> list[dict[str, str]]:
        """Return the settings of each model: encoding, sharing and back end."""
        shared = [spec for spec in self.encodings if spec == "fire"] if self.shared is None else self.shared
        variants = [(spec, "auto") for spec in self.encodings] + [(spec, "model") for spec in shared]
        backends = tuple(BACKENDS) if tuple(self.backends) == ("all",) else tuple(self.backends)
        return [
            {"rpe": spec, "rpe_share": share, "attention_backend": backend}
            for spec, share in variants
            for backend in backends
        ]

    def __str__(self) -> str:
        """Describe the machine and the benchmark in one line."""
        size = MODEL_SIZES[self.model]
        model = f"{self.model}: {size.layers} layers of {size.width}, {size.heads} heads, vocabulary {self.vocabulary}"
        return describe_machine(self.device, f"{model}, batch {self.batch}, {self.dtype}, means of {self.repeats}")


def time_forward_passes(setting: ModelBenchmark, length: int) -> tuple[list[Timing], list[str]]:
    """Time a forward pass to the logits for each model, interleaved.

    Args:
        setting: the benchmark.
        length: tokens of a block.

    Returns:
        Timings, whose ``ratio`` is relative to the first model, and a line on each model that is left out.

    Raises:
        UserError: an encoding is unknown, nothing can be timed, or there is not enough memory.
    """
    # the largest activation, in bytes: the float32 logits or a feed-forward layer
    needed = 4 * setting.batch * length * max(setting.vocabulary, MODEL_SIZES[setting.model].ffn)
    if needed > free_memory(setting.device):
        raise UserError(
            f"a block of {setting.batch} x {length} tokens needs about {needed / 2**30:.0f} GiB, and there is "
            "not enough memory: choose smaller --lengths, --batch or --vocabulary"
        )
    calls, left_out = _forward_passes(setting, length)
    if not calls:
        raise UserError(f"nothing can be timed at {length} tokens ({left_out[0]}): choose another backend or length")
    seconds_by_model = time_interleaved(calls, setting.repeats, setting.device)
    first_mean = statistics.fmean(next(iter(seconds_by_model.values())))
    timings = [
        Timing(
            encoding=encoding,
            backend=backend,
            step=STEP,
            length=length,
            milliseconds=_round_milliseconds(statistics.fmean(seconds)),
            ratio=round(statistics.fmean(seconds) / first_mean, 3),
            least=_round_milliseconds(min(seconds)),
            most=_round_milliseconds(max(seconds)),
        )
        for (encoding, backend), seconds in seconds_by_model.items()
    ]
    return timings, left_out


def _round_milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _forward_passes(setting: ModelBenchmark, length: int) -> tuple[dict[tuple[str, str], TimedCall], list[str]]:
    """Build the models, which share all weights outside of their encodings, and call each once.

    Returns:
        The function that runs a forward pass, by encoding and back end; and a line on each model that failed in its
        first call.
    """
    dictionary = Dictionary()
    for number in range(setting.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    task = LanguageModelingTask(SimpleNamespace(add_bos_token=False), dictionary)
    first_word = dictionary.nspecial  # 4: no padding among the inputs
    inputs = torch.randint(
        first_word, len(dictionary), (setting.batch, length), generator=torch.Generator().manual_seed(0)
    )
    weights: dict[str, Tensor] = {}
    calls: dict[tuple[str, str], TimedCall] = {}
    left_out = []
    for settings in setting.model_settings():
        name = settings["rpe"] + (SHARED if settings["rpe_share"] == "model" else "")
        backend = settings["attention_backend"]
        model = _build_model(setting, task, length, weights, settings)
        forward = partial(_forward, model, inputs.to(setting.device))
        reason = failure_reason(forward, f"{name}, {backend}", f"{name}, {backend} at {length} tokens")
        if reason:
            left_out.append(reason)
        else:
            calls[name, backend] = forward
    return calls, left_out


def _build_model(
    setting: ModelBenchmark, task: Any, length: int, weights: dict[str, Tensor], settings: dict[str, str]
) -> Any:
    """Build a model in evaluation mode; its parameters outside of the encoding come from ``weights``, or go there."""
    args = SimpleNamespace(tokens_per_sample=length, **settings)
    ARCH_CONFIG_REGISTRY[full_arch_name(setting.model)](args)  # fills in the sizes of the architecture
    torch.manual_seed(0)
    model = TransformerRPELanguageModel.build_model(args, task).eval()
    model = model.to(device=setting.device, dtype=DTYPES[setting.dtype])
    for name, parameter in model.named_parameters():
        if not name.startswith("decoder.encodings."):
            parameter.data = weights.setdefault(name, parameter.data)
    return model


@torch.inference_mode()
def _forward(model: Any, tokens: Tensor) -> None:
    """Run a forward pass to the logits."""
    model(tokens)


def tables(timings: Sequence[Timing]) -> list[Table]:
    """Return a table of encoding and back end × length: mean, least and most in milliseconds, ratio to the first."""
    lengths = list(dict.fromkeys(t.length for t in timings))
    by_model = {(t.encoding, t.backend, t.length): t for t in timings}
    header = ["encoding, backend", *(f"{n} tokens {unit}" for n in lengths for unit in ("(ms)", "(ratio)"))]
    rows = []
    for encoding, backend in dict.fromkeys((t.encoding, t.backend) for t in timings):
        texts = []
        for length in lengths:
            t = by_model.get((encoding, backend, length))  # None if the model was left out at this length
            texts += [f"{t.milliseconds:.1f} ({t.least:.1f} to {t.most:.1f})", f"{t.ratio:.2f}"] if t else ["", ""]
        rows.append(TableRow(f"{encoding}, {backend}", list(map(Cell, texts))))
    return [Table("Inference time of whole models", header, rows)]

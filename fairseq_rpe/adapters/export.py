"""Exports a checkpoint as a folder that Hugging Face transformers loads."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.adapters.pretrained import (  # first, because it checks for transformers
    FairseqRpeForCausalLM,
    FairseqRpeModel,
)

# isort: split

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from fairseq_rpe import algorithms
from fairseq_rpe.adapters.export_as import export_as
from fairseq_rpe.adapters.export_tokenizer import NOT_EXPORTED, can_reorder, export_tokenizer
from fairseq_rpe.adapters.model_card import ModelCard, write_model_card
from fairseq_rpe.adapters.pretrained_config import MODEL_TYPE, UNLIMITED_POSITIONS, FairseqRpeConfig
from fairseq_rpe.checkpoints.checkpoint import check_model_size, check_vocabulary
from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.data.atomic_folder import scratch_folder
from fairseq_rpe.data.folder import EOS_ID, FAIRSEQ_SPECIALS
from fairseq_rpe.data.transformers_tokenizer import CONFIG_FILE, load_model_vocabulary
from fairseq_rpe.encodings import load_module
from fairseq_rpe.evaluation.checkpoint_defaults import position_limits
from fairseq_rpe.evaluation.loading import load_model
from fairseq_rpe.evaluation.records import EvalOverrides
from fairseq_rpe.questions import dataset
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.utils.json_files import read_json, write_json
from fairseq_rpe.utils.output_checks import check_output_folder

REMOTE_FILE = "modeling_fairseq_rpe.py"
_REMOTE_CODE = '''"""Loads the model from the package fairseq_rpe, which must be installed."""

try:
    from fairseq_rpe.adapters.pretrained import FairseqRpeConfig, FairseqRpeForCausalLM, FairseqRpeModel
except ImportError as error:
    raise ImportError("this model needs the package fairseq_rpe: pip install 'fairseq_rpe[transformers]'") from error

__all__ = ["FairseqRpeConfig", "FairseqRpeForCausalLM", "FairseqRpeModel"]
'''
# setting of a checkpoint that uses classes of fairseq -> its flag
_FAIRSEQ_ONLY = {
    "adaptive_softmax_cutoff": "--adaptive-softmax-cutoff",
    "adaptive_input": "--adaptive-input",
    "decoder_layerdrop": "--decoder-layerdrop",
    "quant_noise_pq": "--quant-noise-pq",
    "quant_noise_scalar": "--quant-noise-scalar",
}
_CHECKED_TOKENS, _TOLERANCE = 24, 1e-4


@dataclass(frozen=True)
class ExportRequest:
    """What is exported.

    Attributes:
        checkpoint: checkpoint file.
        out: folder to be written, which must be missing or empty.
        data: folder with the dictionary and the tokenizer; None: the one that the checkpoint names.
        architecture: "fairseq_rpe", or "gpt_neox" or "llama" for a model without code of this package.
        remote_code: whether a small file is added from which transformers imports this package.
        rpe: encoding in place of the checkpoint's, or None.
        positions_eval: position transform in evaluation in place of the checkpoint's, or None.
        rpe_module: Python file that registers further encodings, or None.
    """

    checkpoint: Path
    out: Path
    data: Path | None = None
    architecture: str = "fairseq_rpe"
    remote_code: bool = False
    rpe: str | None = None
    positions_eval: str | None = None
    rpe_module: Path | None = None


@dataclass(frozen=True)
class ExportSummary:
    """What was exported.

    Attributes:
        parameters: number of parameters, shared ones counted once.
        encoding: spec of the encoding.
        tokenizer: kind of the tokenizer, or None.
        no_tokenizer: reason why there is no tokenizer, or "".
        difference: largest difference of logits between the checkpoint's model and the exported one.
    """

    parameters: int
    encoding: str
    tokenizer: str | None
    no_tokenizer: str
    difference: float


@dataclass(frozen=True)
class _Source:
    """A checkpoint with the folder of its dictionary.

    Attributes:
        request: what is exported.
        checkpoint: the checkpoint.
        data: folder of the dictionary; None for a generated task.
        rpe: spec of the encoding.
        tokenizer: kind of the tokenizer that is exported, or None.
        no_tokenizer: reason why there is none, or "".
        token_ids: id in the exported model of each id of the dictionary, or None for the same ids.
    """

    request: ExportRequest
    checkpoint: RpeCheckpoint
    data: Path | None
    rpe: str
    tokenizer: str | None
    no_tokenizer: str
    token_ids: tuple[int, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether the model continues texts; otherwise it answers questions or solves a generated task."""
        return self.data is not None and not dataset.is_question_folder(self.data)

    @property
    def positions_train(self) -> str:
        """Position transform in training."""
        return str(self.checkpoint.model.get("positions_train") or "identity")

    @property
    def positions_eval(self) -> str:
        """Position transform in evaluation; empty for the default of that in training."""
        return self.request.positions_eval or str(self.checkpoint.model.get("positions_eval") or "")

    @property
    def max_length(self) -> int:
        """Largest number of tokens that have positions."""
        limits = position_limits(self.rpe, self.positions_eval or None, self.checkpoint.train_length() or 0)
        return min(limits.values(), default=UNLIMITED_POSITIONS)


def export(request: ExportRequest) -> ExportSummary:
    """Export a checkpoint; the folder is complete or not there at all.

    Args:
        request: what is exported.

    Returns:
        What was exported.

    Raises:
        UserError: the folder is in use; the checkpoint cannot be used, or has features of fairseq that the exported
            model lacks; the dictionary is not the one of the training; or the architecture cannot compute the same.
    """
    _check_out(request.out)
    if request.rpe_module is not None:
        load_module(request.rpe_module)
    source = _load_source(request)
    overrides = EvalOverrides(
        rpe=request.rpe and source.rpe,
        positions_eval=request.positions_eval,
        rpe_module=request.rpe_module,
        device="cpu",
    )
    model, _ = load_model(request.checkpoint, overrides, source.data)
    target = Path(os.path.realpath(request.out))
    with scratch_folder(target) as scratch:
        folder = scratch / "export"
        folder.mkdir()
        with _without_progress_bars():
            exported = (_write_own if request.architecture == MODEL_TYPE else _write_foreign)(source, model, folder)
        difference = _compare(model.decoder, exported, source)
        _generation_config(exported).save_pretrained(folder)
        _write_tokenizer(source, folder)
        card = ModelCard(
            source.checkpoint,
            source.rpe,
            source.positions_eval,
            source.data,
            source.tokenizer,
            source.no_tokenizer,
            request.remote_code,
            bool(exported.config.use_cache),
        )
        write_model_card(card, request.architecture, folder)
        _check_out(request.out)  # again: another process may have used the folder meanwhile
        if target.exists():
            target.rmdir()
        folder.rename(target)
    parameters = sum(p.numel() for p in exported.parameters())
    return ExportSummary(parameters, source.rpe, source.tokenizer, source.no_tokenizer, difference)


def _check_out(out: Path) -> None:
    """Refuse a folder that exists and is not empty, or that cannot be written."""
    corpus.check_not_data("DIR", out)
    check_output_folder(out, (), "DIR")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{shorten_path(out)} is not empty: give another folder, or remove it")


def _load_source(request: ExportRequest) -> _Source:
    """Read and check a checkpoint and its dictionary, without building the model."""
    checkpoint = checkpoints.load(request.checkpoint)
    checkpoint.require_rpe_model()
    check_model_size(checkpoint)
    for setting, flag in _FAIRSEQ_ONLY.items():
        if checkpoint.model.get(setting):
            raise UserError(
                f"{request.checkpoint} was trained with {flag}, which only fairseq computes: train without it to export"
            )
    rpe = checkpoint.encoding
    if request.rpe is not None:
        rpe = checkpoint.complete_spec(request.rpe)
    algorithm = checkpoint.task.get("algorithm")
    if algorithm:
        if request.data is not None:
            raise UserError("--data has no effect on a model of a generated task, which has no data: drop it")
        reason = f"the vocabulary of the generated task '{algorithms.build(str(algorithm)).spec}' is no text"
        return _Source(request, checkpoint, None, rpe, None, reason)
    # fairseq accepts several folders, separated by colons; all have the dictionary of the first
    data = request.data or Path(str(checkpoint.task.get("data") or "").split(os.pathsep)[0])
    if not (data / "dict.txt").is_file():
        missing = "has no dict.txt" if data.is_dir() else "does not exist"
        raise UserError(f"the data folder {shorten_path(data)} {missing}: name that of the training with --data")
    check_vocabulary(checkpoint, corpus.read_dictionary(data / "dict.txt"), data)
    kind, reason = _tokenizer_kind(data)
    if kind == "transformers" and request.architecture != MODEL_TYPE:
        return _Source(request, checkpoint, data, rpe, kind, "", load_model_vocabulary(data).token_ids)
    if kind == "transformers" and not can_reorder(data):
        kind, reason = None, "only a tokenizer of type BPE can have the order of the dictionary"
    if kind in NOT_EXPORTED:
        kind, reason = None, NOT_EXPORTED[kind]
    return _Source(request, checkpoint, data, rpe, kind, reason)


def _tokenizer_kind(data: Path) -> tuple[str | None, str]:
    """Return the kind of the tokenizer of a folder, or None and why there is none."""
    is_questions = dataset.is_question_folder(data)
    manifest = dataset.read_question_manifest(data) if is_questions else corpus.read_manifest(data)
    if not manifest:
        return None, "the data folder of the training was made by another program"
    return str(manifest.get("tokenizer", {}).get("kind", "bpe")), ""


def _settings(source: _Source) -> dict[str, Any]:
    """Return the settings of the exported model that its decoder does not have."""
    task = source.checkpoint.task
    return {
        "rpe": source.rpe,
        "rpe_share": str(source.checkpoint.model.get("rpe_share") or "auto"),
        "train_length": source.checkpoint.train_length(),
        "positions_train": source.positions_train,
        "positions_eval": source.positions_eval,
        "max_position_embeddings": source.max_length,
        # texts have </s> for each newline, so generation goes on after it; answers end with it
        "eos_token_id": None if source.is_text else EOS_ID,
        "blocks": task.get("blocks"),
        "separate_documents": task.get("separate_documents"),
    }


def build_pretrained(decoder: Any, settings: Mapping[str, Any]) -> FairseqRpeForCausalLM:
    """Build the transformers model of a decoder, with its weights.

    Args:
        decoder: decoder of a ``transformer_rpe_lm``, or :class:`fairseq_rpe.decoder.decoder.Decoder`.
        settings: attributes of :class:`FairseqRpeConfig` that the decoder does not have, such as ``rpe``.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: the decoder has tensors that the model lacks.
    """
    config = FairseqRpeConfig.from_decoder(
        decoder.config,
        **settings,
        positions_seed=decoder.position_transforms.seed,
        architectures=[FairseqRpeForCausalLM.__name__],
        dtype="float32",
        bos_token_id=EOS_ID,
    )
    weights = {f"decoder.{name}": value for name, value in decoder.state_dict().items() if name != "version"}
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in FairseqRpeForCausalLM(config).state_dict().items()}
    prefix = "decoder.encodings."
    config.encoding_shapes = {
        name.removeprefix(prefix): list(value.shape)
        for name, value in weights.items()
        if name.startswith(prefix) and name in shapes and shapes[name] != value.shape
    } or None
    model = FairseqRpeForCausalLM(config).eval()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = (str(error).split("\n\t")[1:2] or [str(error)])[0].strip()
        raise UserError(
            f"this model has weights that the exported one lacks ({first}): it cannot be exported"
        ) from None
    return model


def _write_own(source: _Source, model: Any, folder: Path) -> Any:
    """Write configuration and weights of the model type of this package, and return the model."""
    exported = build_pretrained(model.decoder, _settings(source))
    exported.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # safetensors lets the owner alone read them
        shutil.copymode(folder / "config.json", path)
    if source.request.remote_code:
        (folder / REMOTE_FILE).write_text(_REMOTE_CODE, encoding="utf-8")
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        module = REMOTE_FILE.removesuffix(".py")
        names = {
            "AutoConfig": FairseqRpeConfig,
            "AutoModel": FairseqRpeModel,
            "AutoModelForCausalLM": FairseqRpeForCausalLM,
        }
        config["auto_map"] = {auto: f"{module}.{cls.__name__}" for auto, cls in names.items()}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return exported


def _write_foreign(source: _Source, model: Any, folder: Path) -> Any:
    """Write configuration and weights of another architecture, and return its model as transformers loads it.

    Raises:
        UserError: the architecture does not compute the same.
    """
    request, decoder = source.request, model.decoder
    if transform := decoder.position_transforms.active(False):
        raise UserError(
            f"--as {request.architecture} has no position transforms, and this model has {type(transform).__name__} in "
            "evaluation: leave --as out, or give --positions-eval identity"
        )
    length = source.checkpoint.train_length() or 0
    values, tensors = export_as(
        request.architecture, decoder.config, source.rpe, length, decoder.state_dict(), source.token_ids
    )
    if source.token_ids is not None and source.data is not None:  # the end of a text of the model that was imported
        values["eos_token_id"] = read_json(source.data / CONFIG_FILE).get("eos_token_id", values["eos_token_id"])
    elif source.is_text:
        values["eos_token_id"] = None
    AutoConfig.for_model(**values).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, {"format": "pt"})
    shutil.copymode(folder / "config.json", path)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def _compare(decoder: Any, exported: Any, source: _Source) -> float:
    """Return the largest difference of logits on random tokens; raise UserError if it is not a rounding error."""
    length = min(_CHECKED_TOKENS, source.max_length)
    generator = torch.Generator().manual_seed(0)
    first, vocabulary = len(FAIRSEQ_SPECIALS), exported.config.vocab_size
    tokens = torch.randint(min(first, vocabulary - 1), vocabulary, (2, length), generator=generator)
    order = torch.arange(vocabulary) if source.token_ids is None else torch.tensor(source.token_ids)
    logits: Tensor = exported(order[tokens], use_cache=False).logits[..., order]
    expected: Tensor = decoder(tokens)[0].float()
    difference = float((expected - logits.float()).abs().max())
    if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"the exported model's logits differ by {difference:.3g} from the checkpoint's: please report it"
        )
    return difference


def _write_tokenizer(source: _Source, folder: Path) -> None:
    """Write the files of the tokenizer, if there is one."""
    if source.tokenizer is None or source.data is None:
        return
    if source.token_ids is None:
        export_tokenizer(source.tokenizer, source.data, folder)
    else:  # the tokenizer of the model that was imported
        shutil.copyfile(source.data / "tokenizer.json", folder / "tokenizer.json")
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _generation_config(model: Any) -> GenerationConfig:
    """Return settings of ``generate``, which never generates padding."""
    padding = model.config.pad_token_id
    return GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=padding,
        suppress_tokens=[padding],
        use_cache=bool(model.config.use_cache),
    )

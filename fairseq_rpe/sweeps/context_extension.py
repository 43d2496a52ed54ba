"""Context extension: trains a checkpoint further on longer texts and evaluates it before and after.

The new checkpoint keeps the original training length as its own (``--rpe-train-length``), so that ``factor=auto``, a
default ``original_length`` and interpolated positions refer to it, not to the longer texts.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe import positions
from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import ENCODING_PREFIX, check_vocabulary
from fairseq_rpe.checkpoints.model_sizes import find_size
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import format_layers
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.encodings.from_checkpoint import match_checkpoint_weights
from fairseq_rpe.encodings.model import build_for_model, sharing_modes
from fairseq_rpe.evaluation.loading import check_language_model, separates_documents, training_blocks
from fairseq_rpe.evaluation.perplexity import make_evaluator
from fairseq_rpe.evaluation.records import TextRequest, TextResult, resume_results
from fairseq_rpe.runs import checkpoints, from_checkpoint, launch, train, training_data
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.defaults import default_warmup, defaults_for
from fairseq_rpe.runs.model_check import check_backend
from fairseq_rpe.runs.run_folder import RunFolder, check_no_sweep
from fairseq_rpe.runs.settings import TrainingPlan, make_plan
from fairseq_rpe.runs.training_config import IDENTITY, TrainingConfig
from fairseq_rpe.utils.files import remove_if_refused, write_via_temporary

_TINY_DEFAULTS, _DEFAULTS = {"updates": 100, "warmup": 10}, {"updates": 1000, "warmup": 20}


@dataclass(frozen=True)
class Extension:
    """The further training of a checkpoint and its evaluation.

    Attributes:
        checkpoint: path of the original checkpoint.
        folder: folder of the extension.
        config: options of the further training.
        plan: what the configuration resolves to.
        original_length: training length of the checkpoint, in tokens.
        lengths: lengths of the evaluation, in tokens.
        split: split of the text that results are computed on.
        original_encoding: encoding of the checkpoint.
        has_new_parameters: whether the new encoding has parameters that the checkpoint lacks.
    """

    checkpoint: Path
    folder: RunFolder
    config: TrainingConfig
    plan: TrainingPlan
    original_length: int
    lengths: tuple[int, ...]
    split: str
    original_encoding: str
    has_new_parameters: bool


def resolve_extension(config: TrainingConfig, lengths: tuple[int, ...] | None, split: str) -> Extension:
    """Resolve the options of ``fairseq-rpe extend``; open settings are those of the checkpoint.

    Args:
        config: options with ``finetune_from``, ``data`` and ``tokens``; an empty ``rpe`` is the checkpoint's encoding.
        lengths: lengths of the evaluation, to which the original training length is added; None for its doubles up to
            the largest position of the training.
        split: split of the text that results are computed on.

    Returns:
        The extension.

    Raises:
        UserError: the checkpoint, the data, the encoding or the length cannot be used.
    """
    path, data, tokens = config.finetune_from, config.data, config.tokens
    assert path is not None and data is not None and tokens is not None
    checkpoint = checkpoints.load(path)
    check_language_model(checkpoint)
    folder = RunFolder(config.out)
    _check_folders(folder, path, data, split)
    check_vocabulary(checkpoint, corpus.read_dictionary(data / "dict.txt"), data)
    original = checkpoint.train_length()
    if not original:
        raise UserError(f"{path} does not record its training length: train it again")
    config = _with_defaults(config, checkpoint, tokens)
    max_position = _check_length(config, checkpoint, original, tokens)
    # 64 doublings pass any position
    doubles = {tokens, *(original << k for k in range(64) if original << k <= max_position)}
    eval_lengths = tuple(sorted({original, *(lengths or doubles)}))
    _check_blocks(config, data, tokens, split, max(eval_lengths))
    config, learned, new_parameters = _check_parameters(config, checkpoint, original, tokens)
    config = replace(config, out=folder.checkpoints.path, extra=(*config.extra, "--rpe-train-length", str(original)))
    plan = make_plan(config, data_digest := corpus.corpus_digest(data))
    check_backend(config)
    start = folder.path / "begin.pt"
    with remove_if_refused(start):
        if new_parameters:
            # the training starts from another file now, which changes its plan
            config = _write_start(start, config, checkpoint, learned, new_parameters)
            plan = make_plan(config, data_digest)
        if folder.checkpoints.finished_digest(plan) is None:
            train.check_training(config, plan)
    return Extension(
        checkpoint=path,
        folder=folder,
        config=config,
        plan=plan,
        original_length=original,
        lengths=eval_lengths,
        split=split,
        original_encoding=checkpoint.encoding,
        has_new_parameters=bool(new_parameters),
    )


def _check_folders(folder: RunFolder, checkpoint: Path, data: Path, split: str) -> None:
    """Check that the output folder is not in use and that the data folder holds a text."""
    corpus.check_output(folder.path)
    check_no_sweep("--out", folder.path)
    if checkpoint.resolve().is_relative_to(folder.path.resolve()):
        raise UserError(f"{checkpoint} lies in --out {folder.path}, where the new checkpoint goes: use another folder")
    corpus.check_folder(data, "train", "valid", split)
    if training_data.is_question_data(data):
        command = f"fairseq-rpe train {data} --init-from {checkpoint}"
        raise UserError(f"{data} holds questions, not a text to read: use {command}")


def _check_blocks(config: TrainingConfig, data: Path, tokens: int, split: str, longest: int) -> None:
    """Check that the text fills blocks of the training length, and of the longest one of the evaluation."""
    training_data.check_blocks(data, tokens, config.blocks, bool(config.separate_documents))
    corpus.check_block_length(data, split, longest)
    if config.blocks == "document" or config.separate_documents:
        corpus.check_documents(data, split)
    if config.blocks == "document":
        corpus.check_document_block(data, split, longest)


def run_extension(extension: Extension) -> dict[str, list[TextResult]]:
    """Evaluate the checkpoint, train it further and evaluate it again; finished steps are not repeated.

    Without new parameters, the new encoding and positions are also evaluated before the training.

    Args:
        extension: resolved further training and its evaluations.

    Returns:
        Results by a label of the model.

    Raises:
        UserError: the folder holds another run, or the training or an evaluation failed.
    """
    config, run = extension.config, extension.folder.checkpoints
    is_finished = run.finished_digest(extension.plan) is not None
    overrides = {"positions_eval": config.positions_eval} if config.positions_eval else {}
    name = config.rpe + (f", {config.positions_eval}" if overrides else "")
    if config.rpe != extension.original_encoding:
        overrides["rpe"] = config.rpe
    results = {f"{extension.original_encoding}, before": _results_before(extension, {})}
    if overrides and not extension.has_new_parameters:
        results[f"{name}, not trained"] = _results_before(extension, overrides)
    if is_finished:
        print(f"{run.path} already holds the finished run of {extension.plan.updates} updates")
    else:
        train.train(config, extension.plan, launch.current_node(config))
    transform = f", {config.positions_train}" if config.positions_train != IDENTITY else ""
    label = f"{name}, trained at {config.tokens} tokens{transform}"
    results[label] = list(_evaluate(extension, run.last, {}))
    return results


def _results_before(extension: Extension, overrides: Mapping[str, str]) -> list[TextResult]:
    """Return the results of the original checkpoint at the lengths that its positions allow."""
    results: list[TextResult] = []
    try:
        for result in _evaluate(extension, extension.checkpoint, overrides):
            results.append(result)
    except UserError as error:
        print(f"{extension.checkpoint} is not evaluated at every length: {error}", file=sys.stderr)
    return results


def _evaluate(extension: Extension, path: Path, overrides: Mapping[str, str]) -> Iterator[TextResult]:
    training, options = extension.config, dict[str, Any](overrides)
    assert training.data is not None
    request = TextRequest(
        checkpoint=path,
        data=training.data,
        lengths=extension.lengths,
        split=extension.split,
        device=training.device,
        rpe_module=training.rpe_module,
        log=extension.folder.eval_log,
        **options,
    )
    yield from resume_results(TextResult, extension.folder.results, request.keys(), lambda _: make_evaluator(request))


def _with_defaults(config: TrainingConfig, checkpoint: RpeCheckpoint, tokens: int) -> TrainingConfig:
    """Fill a configuration with the checkpoint's model, encoding and positions, and defaults for the schedule."""
    settings: dict[str, Any] = from_checkpoint.architecture_settings(checkpoint)
    if not (config.positions_train or config.positions_eval):
        settings |= {key: checkpoint.model.get(key) for key in ("positions_train", "positions_eval")}
    training_defaults = defaults_for(settings["arch"], algorithm=False)
    trained_length = _trained_length(checkpoint)
    schedule = _TINY_DEFAULTS if find_size(settings["arch"]) == find_size("tiny") else _DEFAULTS
    defaults = {
        **schedule,
        "warmup": default_warmup(schedule["warmup"], config.updates or schedule["updates"]),
        "lr": training_defaults.lr / 4,
        "batch_sentences": max(1, training_defaults.batch_sentences * trained_length // max(tokens, 1)),
    }
    settings |= {key: value for key, value in defaults.items() if getattr(config, key) is None}
    settings["positions_train"] = settings.get("positions_train") or config.positions_train or IDENTITY
    settings["blocks"] = blocks if (blocks := training_blocks(checkpoint)) != "stream" else None
    settings["separate_documents"] = separates_documents(checkpoint) or None
    rpe = checkpoint.complete_spec(config.rpe) if config.rpe else checkpoint.encoding
    return replace(config, **settings, rpe=rpe)


def _trained_length(checkpoint: RpeCheckpoint) -> int:
    """Return the tokens of the longest texts of all trainings; an extension does not change the training length."""
    tokens = checkpoint.task.get("tokens_per_sample")
    return max(tokens if isinstance(tokens, int) else 0, checkpoint.train_length() or 0)


def _check_length(config: TrainingConfig, checkpoint: RpeCheckpoint, original: int, tokens: int) -> int:
    """Return the number of positions that the further training covers.

    With another encoding, texts as long as those of the earlier training are enough: the model is calibrated anew, as
    when positions are dropped (DroPE, arXiv 2512.12167).

    Raises UserError: it is not larger than that of the earlier training, or smaller than ``tokens``.
    """
    transform = positions.build(config.positions_train or IDENTITY, original)
    trained, limit = _trained_length(checkpoint), transform.max_length
    if limit is not None and limit < tokens:
        raise UserError(
            f"--positions-train {config.positions_train} ends at {limit} positions: fewer than --tokens {tokens}"
        )
    count = tokens
    if transform.random:
        count = limit or tokens * (getattr(transform.config, "times", None) or 1)
    changes_encoding = config.rpe != checkpoint.encoding
    if tokens < trained or (count <= trained and not changes_encoding):
        raise UserError(
            f"--tokens {tokens} is not above the {trained} tokens that {checkpoint.path} was trained on: give more, or "
            "as many with another --rpe, or with --positions-train pose:target=N, which skips beyond them"
        )
    return count


def _check_parameters(
    config: TrainingConfig, checkpoint: RpeCheckpoint, original: int, tokens: int
) -> tuple[TrainingConfig, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the configuration with a valid ``rpe_share``, the learned parameters and those that the checkpoint lacks.

    The parameters have the names that they have in the new model. Learned ones stay in their layers.

    Raises UserError: the encoding of a layer lacks parameters of the checkpoint, or is a table of positions without
    trained rows.
    """
    path, option = checkpoint.path, f"--rpe {config.rpe}"
    heads, width, layers = (
        checkpoint.integer_setting(f"decoder_{key}") for key in ("attention_heads", "embed_dim", "layers")
    )
    if config.rpe_share not in (None, "auto", *sharing_modes(config.rpe)):
        config = replace(config, rpe_share="auto")
    assert config.data is not None
    symbols = corpus.read_dictionary(config.data / "dict.txt")
    torch.manual_seed(config.seed)
    sharing, head_width = config.rpe_share or "auto", checkpoint.head_width()
    built = build_for_model(config.rpe, heads, width, layers, original, symbols, sharing, head_width)
    matched = match_checkpoint_weights(checkpoint, built.index)
    new, trained = (
        {f"{ENCODING_PREFIX}{n}.{key}": value for n, layer in enumerate(states) for key, value in layer.items()}
        for states in ([instance.state_dict() for instance in built], matched)
    )
    for instance, values in enumerate(matched):
        for key, value in values.items():
            name = f"{ENCODING_PREFIX}{instance}.{key}"
            if name not in new or new[name].shape != value.shape:
                size = f" of {tuple(value.shape)}" if name in new else ""
                where = f" in layers {format_layers(built.layers(instance))}" if built.is_mixed else ""
                raise UserError(
                    f"{option} has no parameter {name}{size}{where}, which {path} has learned with "
                    f"'{checkpoint.encoding}': name that encoding, or train from the start"
                )
    untrained = {name: value for name, value in new.items() if name not in trained}
    encoding = built.layer(0)  # of all layers, if it acts at the input
    if encoding.embeds and encoding.position_type == "whole":
        if untrained:
            raise UserError(f"{option} is a table of positions that {path} has not learned: train from the start")
        # refuses more tokens than the table has rows
        encoding.embed(torch.zeros(1, tokens, width), Positions.arange(tokens))
    return config, trained, untrained


def _write_start(
    start: Path,
    config: TrainingConfig,
    checkpoint: RpeCheckpoint,
    learned: Mapping[str, Tensor],
    new_parameters: Mapping[str, Tensor],
) -> TrainingConfig:
    """Write a copy of the checkpoint with additional parameters; return the configuration that starts from it."""
    state, _ = checkpoint_file.read_file(checkpoint.path)
    others = {name: value for name, value in state["model"].items() if not name.startswith(ENCODING_PREFIX)}
    state["model"] = {**others, **learned, **new_parameters}
    model = state["cfg"]["model"] if state.get("cfg") else state["args"]
    settings = model if isinstance(model, dict) else vars(model)
    settings |= {"rpe": config.rpe, "rpe_share": config.rpe_share or "auto"}  # the settings of its new weights
    write_via_temporary(start, partial(_save, state))
    names = ", ".join(list(new_parameters)[:3]) + (", …" if len(new_parameters) > 3 else "")
    print(f"--rpe {config.rpe} has parameters that {checkpoint.path} lacks: {names}; they begin untrained, in {start}")
    return replace(config, finetune_from=start)


def _save(state: object, target: Path) -> None:
    """Save with the same bytes each time, so that a rerun finds its run; given a path, torch stores its name too."""
    with open(target, "wb") as file:
        torch.save(state, file)

"""A trained model made to read longer texts: further training with another encoding, measured before and after.

The new checkpoint keeps the length of the original training as its own (``--rpe-train-length``). So ``factor=auto``, an
``original_length`` that is not given, and interpolated positions compare with that and not with the longer texts.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe import encodings, positions
from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import check_vocabulary
from fairseq_rpe.checkpoints.model_sizes import size_of
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.evaluation.loading import blocks_of, check_plain, separates_documents
from fairseq_rpe.evaluation.perplexity import measuring
from fairseq_rpe.evaluation.records import TextRequest, TextResult, resumed
from fairseq_rpe.runs import checkpoints, from_checkpoint, launch, train, training_data
from fairseq_rpe.runs.checkpoints import Checkpoint
from fairseq_rpe.runs.defaults import default_warmup, defaults_for
from fairseq_rpe.runs.model_check import check_backend
from fairseq_rpe.runs.run_folder import RunFolder, check_no_sweep
from fairseq_rpe.runs.settings import IDENTITY, Plan, Request, plan
from fairseq_rpe.utils.files import removed_if_refused, replace_with

ENCODINGS = "decoder.encodings."
_TINY, _OTHER = {"updates": 100, "warmup": 10}, {"updates": 1000, "warmup": 20}  # where nothing is said


@dataclass(frozen=True)
class Extension:
    """A checkpoint's further training, in ``folder``, and the ``lengths`` in tokens to evaluate before and after it.

    ``original``: tokens of the checkpoint's own training. ``fresh``: whether the encoding has parameters that the
    checkpoint lacks.
    """

    checkpoint: Path
    folder: RunFolder
    request: Request
    plan: Plan
    original: int
    lengths: tuple[int, ...]
    subset: str
    before: str
    fresh: bool


def resolve(asked: Request, lengths: tuple[int, ...] | None, subset: str) -> Extension:
    """What is asked for, with all else as the checkpoint ``asked.finetune_from`` has it, in the folder ``save_dir``.

    An empty ``asked.rpe`` is the checkpoint's encoding. The original length is always among ``lengths``; without any,
    its doubles as far as the training reaches are too, and the training's. Raises UserError: the checkpoint, the data,
    the encoding or the length cannot be used.
    """
    path, data, tokens = asked.finetune_from, asked.data, asked.tokens
    assert path is not None and data is not None and tokens is not None
    checkpoint = checkpoints.load(path)
    check_plain(checkpoint)
    folder = RunFolder(asked.save_dir)
    corpus.check_output(folder.path)
    check_no_sweep("--out", folder.path)
    if path.resolve().is_relative_to(folder.path.resolve()):
        raise UserError(f"{path} lies in --out {folder.path}, where the new checkpoint goes: name another folder")
    corpus.check_folder(data, "train", "valid", subset)
    if training_data.asks(data):
        raise UserError(f"{data} holds questions, not a text to read: use fairseq-rpe train {data} --init-from {path}")
    check_vocabulary(checkpoint, corpus.read_dictionary(data / "dict.txt"), data)
    original = checkpoint.train_length()
    if not original:
        raise UserError(f"{path} does not say how long its training texts were: train it again")
    filled = _filled(asked, checkpoint, tokens)
    reach = _check_length(filled, checkpoint, original, tokens)
    doubled = {tokens, *(original << k for k in range(64) if original << k <= reach)}
    wanted = tuple(sorted({original, *(lengths or doubled)}))
    training_data.check_blocks(data, tokens, filled.blocks, bool(filled.separate_documents))
    corpus.check_block(data, subset, max(wanted))
    if filled.blocks == "document" or filled.separate_documents:
        corpus.check_documents(data, subset)
    if filled.blocks == "document":
        corpus.check_document_block(data, subset, max(wanted))
    filled, fresh = _with_parameters(filled, checkpoint, original, tokens)
    request = replace(
        filled, save_dir=folder.checkpoints.path, extra=(*filled.extra, "--rpe-train-length", str(original))
    )
    fixed = plan(request, data_digest := corpus.digest(data))
    check_backend(request)
    begin = folder.path / "begin.pt"
    with removed_if_refused(begin):
        if fresh:
            request = _begin_with(begin, request, checkpoint, fresh)
            fixed = plan(request, data_digest)
        if folder.checkpoints.finished(fixed) is None:
            train.check(request, fixed)
    of = (folder, request, fixed, original, wanted, subset, checkpoint.encoding)
    return Extension(path, *of, fresh=bool(fresh))


def carry_out(extension: Extension) -> dict[str, list[TextResult]]:
    """Evaluate the checkpoint, train it further, evaluate it again, as far as that is not done; the results by model.

    Between the two, if it can be: with the new encoding or positions, not trained further. Raises UserError: the folder
    holds another run, or the training or its evaluation failed.
    """
    request, run = extension.request, extension.folder.checkpoints
    finished = run.finished(extension.plan) is not None
    moved = {"positions": request.positions_eval} if request.positions_eval else {}
    stretched = {"rpe": request.rpe, **moved} if request.rpe != extension.before else moved
    found = {f"{extension.before}, before": _before(extension, {})}
    name = request.rpe + (f", {request.positions_eval}" if moved else "")
    if stretched and not extension.fresh:
        found[f"{name}, not trained"] = _before(extension, stretched)
    if finished:
        print(f"{run.path} already holds the finished run of {extension.plan.updates} updates")
    else:
        train.train(request, extension.plan, launch.here(request))
    trained = f"{request.tokens} tokens" + (
        f", {request.positions_train}" if request.positions_train != IDENTITY else ""
    )
    found[f"{name}, trained at {trained}"] = list(_measured(extension, run.last, {}))
    return found


def _before(extension: Extension, changed: Mapping[str, str]) -> list[TextResult]:
    """Results of the old checkpoint, as far as its positions reach."""
    found: list[TextResult] = []
    try:
        for one in _measured(extension, extension.checkpoint, changed):
            found.append(one)
    except UserError as error:
        print(f"{extension.checkpoint} is not evaluated at every length: {error}", file=sys.stderr)
    return found


def _measured(extension: Extension, path: Path, changed: Mapping[str, str]) -> Iterator[TextResult]:
    request, overrides = extension.request, dict[str, Any](changed)
    assert request.data is not None
    wanted = TextRequest(
        checkpoint=path,
        data=request.data,
        lengths=extension.lengths,
        subset=extension.subset,
        device=request.device,
        rpe_module=request.rpe_module,
        log=extension.folder.eval_log,
        **overrides,
    )
    yield from resumed(TextResult, extension.folder.results, wanted.keys(), lambda _: measuring(wanted))


def _filled(asked: Request, checkpoint: Checkpoint, tokens: int) -> Request:
    """The request with the checkpoint's architecture and, where nothing is said, its encoding, positions and ours."""
    own: dict[str, Any] = from_checkpoint.said(checkpoint)
    if not (asked.positions_train or asked.positions_eval):
        own |= {key: checkpoint.model.get(key) for key in ("positions_train", "positions_eval")}
    usual = defaults_for(own["arch"], algorithm=False)
    trained = _trained(checkpoint)
    default = _TINY if size_of(own["arch"]) == size_of("tiny") else _OTHER
    some = {
        **default,
        "warmup": default_warmup(default["warmup"], asked.updates or default["updates"]),
        "lr": usual.lr / 4,
        "batch_sentences": max(1, usual.batch_sentences * trained // max(tokens, 1)),
    }
    own |= {key: value for key, value in some.items() if getattr(asked, key) is None}
    own["positions_train"] = own.get("positions_train") or asked.positions_train or IDENTITY
    own["blocks"] = blocks if (blocks := blocks_of(checkpoint)) != "stream" else None
    own["separate_documents"] = separates_documents(checkpoint) or None
    return replace(asked, **own, rpe=checkpoint.complete(asked.rpe) if asked.rpe else checkpoint.encoding)


def _trained(checkpoint: Checkpoint) -> int:
    """Tokens of the longest texts that it was trained on: more than its own length, where it was extended before."""
    found = checkpoint.task.get("tokens_per_sample")
    return max(found if isinstance(found, int) else 0, checkpoint.train_length() or 0)


def _check_length(request: Request, checkpoint: Checkpoint, original: int, tokens: int) -> int:
    """How far the positions of the further training reach.

    Raises UserError: not beyond the training before, or not to the end of its own texts.
    """
    moved = positions.build(request.positions_train or IDENTITY, original)
    trained, end = _trained(checkpoint), moved.longest
    if end is not None and end < tokens:
        raise UserError(
            f"--positions-train {request.positions_train} ends at {end} positions: fewer than --tokens {tokens}"
        )
    far = end or tokens * (getattr(moved.config, "times", None) or 1)
    reach = far if moved.random else tokens
    if tokens < trained or reach <= trained:
        raise UserError(
            f"--tokens {tokens} is not above the {trained} tokens that {checkpoint.path} was trained on: give more, or "
            "as many with --positions-train pose:target=N, which skips beyond them"
        )
    return reach


def _with_parameters(
    request: Request, checkpoint: Checkpoint, original: int, tokens: int
) -> tuple[Request, Mapping[str, Tensor]]:
    """The request, and the parameters that its encoding has and the checkpoint has not, as they are before training.

    Raises UserError: the checkpoint's parameters are not the encoding's, or a table of positions would have to be
    learned anew.
    """
    first, named = checkpoint.path, f"--rpe {request.rpe}"
    heads, width, layers = (checkpoint.size(f"decoder_{key}") for key in ("attention_heads", "embed_dim", "layers"))
    if request.rpe_share not in (None, "auto", *encodings.build(request.rpe, heads, width, original).sharing_modes):
        request = replace(request, rpe_share="auto")
    assert request.data is not None
    symbols = corpus.read_dictionary(request.data / "dict.txt")
    torch.manual_seed(request.seed)
    made = build_for_model(request.rpe, heads, width, layers, original, symbols, request.rpe_share or "auto")
    own, there = (
        {f"{ENCODINGS}{n}.{key}": value for n, one in enumerate(several) for key, value in one.items()}
        for several in ([one.state_dict() for one in made], checkpoint.encodings)
    )
    for name, value in there.items():
        if name not in own or own[name].shape != value.shape:
            size = f" of {tuple(value.shape)}" if name in own else ""
            raise UserError(
                f"{named} has no parameter {name}{size}, which {first} has learned with '{checkpoint.encoding}': name "
                "that encoding, or train from the start"
            )
    fresh = {name: value for name, value in own.items() if name not in there}
    if made[0].embeds and made[0].position_type == "whole":
        if fresh:
            raise UserError(f"{named} is a table of positions that {first} has not learned: train from the start")
        made[0].embed(torch.zeros(1, tokens, width), Positions.arange(tokens))
    return request, fresh


def _begin_with(begin: Path, request: Request, checkpoint: Checkpoint, fresh: Mapping[str, Tensor]) -> Request:
    """Write a copy of the checkpoint that has the ``fresh`` parameters too, and begin the training with it."""
    first = checkpoint.path
    state, _ = checkpoint_file.read(first)
    state["model"] = {**state["model"], **fresh}
    settings = state["cfg"]["model"] if state.get("cfg") else state["args"]
    said = settings if isinstance(settings, dict) else vars(settings)
    said |= {"rpe": request.rpe, "rpe_share": request.rpe_share or "auto"}  # as its weights are now
    replace_with(begin, partial(_save, state))
    several = ", ".join(list(fresh)[:3]) + (", …" if len(fresh) > 3 else "")
    print(f"--rpe {request.rpe} has parameters that {first} lacks: {several}; they begin untrained, in {begin}")
    return replace(request, finetune_from=begin)


def _save(state: object, target: Path) -> None:
    """The same bytes each time, so that a rerun knows its own run: torch puts a file's name in it where it can."""
    with open(target, "wb") as file:
        torch.save(state, file)

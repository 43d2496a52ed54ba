"""Every repair of fairseq 0.12.3 that this plugin makes, each with its reason. Applied on import of the plugin only.

They are process-global patches of fairseq's own modules (and ``sys.excepthook`` for our one-line errors). ``apply``
may be called again: it does nothing the second time.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import pickle
import shutil
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .core import UserError
from .encodings import load_module
from .guards import guard_data, guard_eval_lm, guard_workers

_applied = False
_overrides: dict[str, str] = {}  # settings of the checkpoint that this command's flags replace


def apply() -> None:
    """Make all repairs once."""
    global _applied
    if _applied:
        return
    _applied = True
    one_line_errors()
    numpy_compat()
    namespace_checkpoints()
    broadcast_checkpoints()
    literal_eval_only()
    safe_checkpoints()
    whole_batches()
    same_batches_when_resumed()
    atomic_copies()
    full_disks()
    bf16_is_not_tpu()
    no_fully_sharded()
    flags_for_every_command()
    guard_workers()
    guard_data()
    guard_eval_lm()


def one_line_errors() -> None:
    """Users of fairseq-train would see a traceback of fairseq's internals for a mistyped flag: show the line alone.

    fairseq wraps some failures in an exception of its own, so the one being handled counts too.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        for candidate in (error, error.__context__):
            if isinstance(candidate, UserError):
                print(f"error: {candidate}", file=sys.stderr)
                return
        previous(kind, error, trace)

    sys.excepthook = hook


def numpy_compat() -> None:
    """``np.compat.long`` (sample-break-mode eos, fairseq-interactive, generation) left numpy with 2.0."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)


def namespace_checkpoints() -> None:
    """Models without a dataclass save an argparse.Namespace, a mere record, which torch's safe loading refuses."""
    torch.serialization.add_safe_globals([argparse.Namespace])


def broadcast_checkpoints() -> None:
    """Rank 0 sends the checkpoint that it has loaded to the others, whose ``torch.load`` refuses its configuration.

    So no run of several processes could be resumed. What comes from a process of the same run needs no suspicion.
    """
    from fairseq.distributed import utils

    def broadcast(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
        box = [obj]
        torch.distributed.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
        return box[0]

    utils._broadcast_object_slow = broadcast


def literal_eval_only() -> None:
    """fairseq calls eval() on strings of a checkpoint's configuration (character_filters, cutoffs, betas …).

    The name ``eval`` in every loaded fairseq module becomes an evaluator of plain literals, so no text can run code.
    """
    for name, module in list(sys.modules.items()):
        if module is not None and name.split(".")[0] in ("fairseq", "fairseq_cli"):
            vars(module)["eval"] = evaluate_literal
    main = sys.modules.get("__main__")
    if main is not None and (getattr(main, "__spec__", None) or types.SimpleNamespace(name="")).name.startswith(
        "fairseq_cli."
    ):
        vars(main)["eval"] = evaluate_literal


def evaluate_literal(text: Any, *_: Any) -> Any:
    """A Python literal; also ``[(512, 3)] * 20`` and arithmetic, as in fairseq's defaults. Never a call or a name.

    Raises:
        UserError: anything else.
    """
    if not isinstance(text, str):
        return text
    try:
        return _literal(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise UserError(f"refused to evaluate {shown!r}: only plain Python values are accepted here") from None


def _literal(node: ast.AST) -> Any:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return kind(_literal(item) for item in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(node.op, ast.Mult) and not all(isinstance(x, (int, float)) for x in (left, right)):
            items, count = (left, right) if isinstance(right, int) else (right, left)
            if not isinstance(items, (list, tuple)) or not isinstance(count, int) or len(items) * count > 10_000:
                raise ValueError("not a small repeated list")
        return {
            ast.Add: lambda: left + right,
            ast.Sub: lambda: left - right,
            ast.Mult: lambda: left * right,
            ast.Div: lambda: left / right,
        }[type(node.op)]()
    return ast.literal_eval(node)


def safe_checkpoints() -> None:
    """``load_checkpoint_to_cpu`` names no ``weights_only``: an environment variable can switch the protection off.

    Loading is always weights-only here, failures are one line, and a checkpoint never names a Python file to import.
    """
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint_to_cpu

    @functools.wraps(original)
    def load(path: str, arg_overrides: dict[str, Any] | None = None, load_on_all_ranks: bool = False) -> dict[str, Any]:
        check_checkpoint(path)
        try:
            state = original(path, arg_overrides, load_on_all_ranks)
        except KeyError as error:
            raise UserError(f"checkpoint {path} is not one of fairseq's: it lacks {error}") from None
        literal_eval_only()  # again: loading a task may have imported further fairseq modules
        model = (state.get("cfg") or {}).get("model") or {}
        settings = vars(model) if isinstance(model, argparse.Namespace) else model
        if settings.get("character_embeddings"):
            evaluate_literal(settings.get("character_filters", ""))
        if settings.get("rpe_module"):
            settings["rpe_module"] = None
        return state

    checkpoint_utils.load_checkpoint_to_cpu = load
    find_ensemble = checkpoint_utils.load_model_ensemble_and_task

    @functools.wraps(find_ensemble)
    def load_ensemble(
        filenames: list[str], arg_overrides: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not kwargs.get("suffix") and kwargs.get("num_shards", 1) == 1:
            for path in filenames:
                check_exists(path)
        models, cfg, task = find_ensemble(filenames, {**(arg_overrides or {}), **_overrides}, *args, **kwargs)
        for key, value in _overrides.items():
            if getattr(cfg.model, key, None) != value:
                raise UserError(f"{filenames[0]} has no setting '{key}' to replace: it is not a transformer_rpe_lm")
        return models, cfg, task

    checkpoint_utils.load_model_ensemble_and_task = load_ensemble


def check_exists(path: str | Path) -> None:
    """fairseq's own message for this comes with a traceback."""
    if not os.path.isfile(path):
        raise UserError(f"checkpoint {path}: no such file")


def check_checkpoint(path: str | Path) -> None:
    """Refuse, in one line, a checkpoint that is missing, truncated, or would run code when it is loaded."""
    check_exists(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "Weights only load failed" not in str(error):
            raise UserError(f"checkpoint {path} is damaged: copy or train it again") from None
        what = str(error).partition("Unsupported ")[2] or str(error).partition("GLOBAL ")[2] or "foreign objects"
        raise UserError(
            f"checkpoint {path} is refused: it holds more than weights and settings ({_first_words(what)})"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        first = str(error).split("\n")[0]
        raise UserError(
            f"checkpoint {path} is damaged ({type(error).__name__}: {first}): copy or train it again"
        ) from None
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"checkpoint {path} is not one of fairseq's: it holds no model")


def _first_words(text: str) -> str:
    return text.split(" was ")[0].split("\n")[0]


def whole_batches() -> None:
    """With a required batch size multiple (8 by default) ``batch_by_size`` drops the last few blocks, without a word.

    41 blocks in batches of 4 become 40: training never sees them and the validation perplexity is not that of the set.
    """
    from fairseq.data import data_utils

    original = data_utils.batch_by_size

    @functools.wraps(original)
    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
        batches = list(original(indices, *args, **kwargs))
        kept = sum(len(batch) for batch in batches)
        size = max((len(batch) for batch in batches), default=1)
        rest = np.asarray(indices, dtype=np.int64)[kept:]
        return batches + [rest[start : start + size] for start in range(0, len(rest), size)]

    data_utils.batch_by_size = batch_by_size


def same_batches_when_resumed() -> None:
    """A run keeps the batches that it made in epoch 1. One resumed in a later epoch made others, of another seed.

    So it met some blocks of that epoch twice and others never, and its end was not that of an uninterrupted run.
    """
    from fairseq.tasks.fairseq_task import FairseqTask

    original = FairseqTask.get_batch_iterator

    @functools.wraps(original)
    def get_batch_iterator(self: Any, dataset: Any, *args: Any, epoch: int = 1, **kwargs: Any) -> Any:
        kept = not any(kwargs.get(flag) for flag in ("disable_iterator_cache", "update_epoch_batch_itr"))
        kept = kept and not getattr(self.cfg, "rebuild_batches", False) and not self.has_sharded_data("train")
        if not kept or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
            return original(self, dataset, *args, epoch=epoch, **kwargs)
        iterator = original(self, dataset, *args, epoch=1, **kwargs)
        iterator.epoch = max(epoch, 1)
        dataset.set_epoch(epoch)
        return iterator

    FairseqTask.get_batch_iterator = get_batch_iterator


def atomic_copies() -> None:
    """``checkpoint_last.pt`` is copied in place: killed meanwhile, half a file is left and nothing to resume from."""
    from fairseq.file_io import PathManager

    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if os.path.exists(dst_path) and not overwrite:
            return False
        temporary = f"{dst_path}.copying"
        try:
            shutil.copyfile(src_path, temporary)
            os.replace(temporary, dst_path)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            raise not_written(dst_path, error) from None
        return True

    PathManager.copy = staticmethod(copy)


def full_disks() -> None:
    """Saving on a full disk is tried three times into the same stream, logs three tracebacks and leaves half a file."""
    from fairseq import checkpoint_utils

    original = checkpoint_utils.torch_persistent_save

    @functools.wraps(original)
    def save(obj: Any, filename: str, async_write: bool = False) -> None:
        try:
            original(obj, filename, async_write)
        except (OSError, RuntimeError) as error:
            Path(f"{filename}.tmp").unlink(missing_ok=True)
            raise not_written(filename, error) from None

    checkpoint_utils._torch_persistent_save = lambda obj, file: torch.save(obj, file)
    checkpoint_utils.torch_persistent_save = save


def not_written(path: str, error: Exception) -> UserError:
    """What to say of a checkpoint that the disk did not take."""
    first = str(error).split("\n")[0]
    return UserError(f"checkpoint {path} could not be written ({first}): make room and start the same command again")


def no_fully_sharded() -> None:
    """fairseq's FSDP is fairscale's, whose last release is of 2022: it fails without a GPU (in its own code, with torch
    2.13), and on GPUs it was never tried with these models, whose parameters are read outside the forward pass.
    """
    from fairseq import options

    original = options.parse_args_and_arch

    @functools.wraps(original)
    def parse(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        namespace = result[0] if isinstance(result, tuple) else result
        if getattr(namespace, "ddp_backend", None) == "fully_sharded":
            raise UserError(
                "--ddp-backend fully_sharded is refused: fairseq's FSDP is fairscale's, which fails on processors and "
                "was never tried with these models; drop it and, for memory, lower --batch-size and raise --update-freq"
            )
        return result

    options.parse_args_and_arch = parse


def bf16_is_not_tpu() -> None:
    """``--bf16`` sets ``tpu`` for everybody, which then fails on the missing XLA device."""
    from fairseq import options

    original = options.parse_args_and_arch

    @functools.wraps(original)
    def parse(parser: Any, input_args: list[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        result = original(parser, input_args, *args, **kwargs)
        namespace = result[0] if isinstance(result, tuple) else result
        if getattr(namespace, "bf16", False) and "--tpu" not in (sys.argv if input_args is None else input_args):
            namespace.tpu = False
        return result

    options.parse_args_and_arch = parse


class _LoadModule(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        load_module(value)
        setattr(namespace, self.dest, value)


class _Override(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        _overrides[self.const] = value
        setattr(namespace, self.dest, value)


def forget_overrides() -> None:
    """A command that was run inside another program leaves its replacements to no later one."""
    _overrides.clear()


def flags_for_every_command() -> None:
    """Model flags exist only in training; these four have to work where a checkpoint is used as well.

    fairseq makes each command's parser right after importing the plugin, with this one function.
    """
    from fairseq import options
    from fairseq.dataclass.configs import CommonConfig

    original: Callable[..., Any] = options.gen_parser_from_dataclass
    flags = (
        ("--rpe-module", "FILE", _LoadModule, None, "Python file that registers encodings of your own"),
        ("--rpe-eval", "SPEC", _Override, "rpe", "evaluate with this encoding in place of the checkpoint's"),
        ("--positions-eval", "SPEC", _Override, "positions_eval", "position transform in evaluation"),
        ("--compute-dtype", "NAME", _Override, "compute_dtype", "matrix products in fp32 or bf16"),
    )

    @functools.wraps(original)
    def generate(parser: Any, dataclass_instance: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dataclass_instance, CommonConfig):
            forget_overrides()
            for flag, metavar, action, const, text in flags:
                parser.add_argument(flag, metavar=metavar, action=action, const=const, default=None, help=text)
        return original(parser, dataclass_instance, *args, **kwargs)

    options.gen_parser_from_dataclass = generate

"""Validated contents of a checkpoint: plain settings and the weights that match them."""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.checkpoints.checkpoint_file import damaged_error, read_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern
from fairseq_rpe.core.tensors import FLOAT_DTYPES
from fairseq_rpe.utils.files import vocabulary_digest

_INTEGER_DTYPES = (torch.int32, torch.int64, torch.uint8, torch.bool)  # of buffers
# Limits of nested settings; those of fairseq are 400 values of depth 3.
_MAX_VALUES, _MAX_DEPTH = 100_000, 20
_MAX_TIED = 4  # tensors that may share memory; tied input and output embeddings are two
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
ENCODING_PREFIX = "decoder.encodings."  # of the names of an encoding's weights
_MAX_LENGTH = 2**31 - 1
# setting that determines the size of a model or the length of a text -> smallest and largest value
_RANGES = {
    "decoder_layers": (1, 100_000),
    "decoder_embed_dim": (1, 2**20),
    "decoder_ffn_embed_dim": (1, 2**24),
    "decoder_input_dim": (1, 2**20),
    "decoder_output_dim": (1, 2**20),
    "decoder_attention_heads": (1, 4096),
    "kv_heads": (1, 4096),
    "head_dim": (1, 2**16),
    "ffn_multiple": (1, 2**24),
    "rpe_train_length": (0, _MAX_LENGTH),
    "tokens_per_sample": (0, _MAX_LENGTH),
    "max_target_positions": (0, _MAX_LENGTH),
    "output_dictionary_size": (-1, _MAX_LENGTH),
    "rpe_log_encodings_every": (0, _MAX_LENGTH),
}
# setting -> name of the tensors ({}: each layer) that have it as a dimension, and the axis
_SHAPES = {
    "decoder_embed_dim": ("decoder.layers.{}.self_attn.q_proj.weight", 1),
    "decoder_ffn_embed_dim": ("decoder.layers.{}.fc1.weight", 0),
    "decoder_input_dim": ("decoder.embed_tokens.weight", 1),
    "decoder_output_dim": ("decoder.output_projection.weight", 1),
}
_MAX_SINUSOIDS = 2**28  # elements of the table that a fairseq model computes for max_target_positions
_MAX_TEXT, _MAX_NAME = 60, 100  # characters of a value, and of the name of a weight, in a message


@dataclass(frozen=True)
class Checkpoint:
    """A fairseq checkpoint with memory-mapped tensors.

    Attributes:
        path: The file.
        model: Settings of the model.
        task: Settings of the task; in old checkpoints, ``model`` and ``task`` are the same settings.
        weights: Weights of the model by name.
        optimizer_history: An entry per optimizer; None in old checkpoints, which have no history.
        encoding_weights: Weights of each encoding by name: one encoding per model, or one per layer. In a pattern of
            layers, those of each instance; the entry of an encoding without parameters is empty, or missing at the end.
        tokens_trained: Number of tokens that the updates were computed from, or None if it is not recorded.
        is_best: Whether no earlier checkpoint of the training was better in validation.
    """

    path: Path
    model: Mapping[str, object]
    task: Mapping[str, object]
    weights: Mapping[str, Tensor]
    optimizer_history: tuple[Mapping[str, object], ...] | None
    encoding_weights: tuple[Mapping[str, Tensor], ...]
    tokens_trained: int | None = None
    is_best: bool = False

    @property
    def num_updates(self) -> int | None:
        """Number of updates already trained, or None if the checkpoint does not record it."""
        updates = self.optimizer_history[-1].get("num_updates") if self.optimizer_history else None
        return updates if isinstance(updates, int) else None

    def train_length(self) -> int | None:
        """Return the training length in tokens, or None if the checkpoint does not record it."""
        length = self.model.get("rpe_train_length") or self.task.get("tokens_per_sample")
        return length if isinstance(length, int) else None

    def head_width(self) -> int | None:
        """Return the width of an attention head, or None if it is the model width divided by the heads."""
        width = self.model.get("head_dim")
        return width if isinstance(width, int) else None

    def integer_setting(self, key: str) -> int:
        """Return an integer setting of the model.

        Raises:
            UserError: The setting is missing.
        """
        if not isinstance(value := self.model.get(key), int):
            raise UserError(f"checkpoint {self.path} is refused: its settings lack {key}; train again")
        return value


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and validate all of it; no code in it is executed.

    Args:
        path: The checkpoint.

    Returns:
        The checkpoint.

    Raises:
        UserError: It is missing, damaged, not of fairseq, or has contents that no training produces.
    """
    state, part_sizes = read_file(path)
    model, task = _read_settings(path, state)
    for key in ("extra_state", "task_state", "last_optimizer_state"):
        _table(path, key, state.get(key))
    weights = _check_weights(path, state.get("model", {}))
    _check_storages(path, state, part_sizes)
    history = _check_history(path, state.get("optimizer_history") or [])
    _check_layers(path, model, weights)
    optimizer_history = history if "optimizer_history" in state else None
    encoding_weights = _encoding_weights(path, model, weights)
    tokens = _tokens_trained(state.get("extra_state"), history)
    is_best = _is_best(state.get("extra_state"))
    return Checkpoint(path, model, task, weights, optimizer_history, encoding_weights, tokens, is_best)


def _is_best(extra_state: object) -> bool:
    """Return whether the result in validation is the best one so far, as fairseq records both."""
    if not isinstance(extra_state, dict) or extra_state.get("best") is None:
        return False
    return bool(extra_state.get("val_loss") == extra_state["best"])


def _tokens_trained(extra_state: object, history: Sequence[Mapping[str, object]]) -> int | None:
    """Return the tokens of all updates of a training, from fairseq's meter of the tokens of an update ("wpb").

    The meter has the sum over all updates, without padding and over all processes. Return None if it has not counted
    each update, as in a model that was not trained by fairseq-train.
    """
    metrics = extra_state.get("metrics") if isinstance(extra_state, dict) else None
    meters = metrics.get("default") if isinstance(metrics, dict) else None
    for meter in meters if isinstance(meters, (list, tuple)) else ():
        if isinstance(meter, (list, tuple)) and len(meter) == 4 and meter[1] == "wpb" and isinstance(meter[3], dict):
            total, count = (_plain_number(meter[3].get(key)) for key in ("sum", "count"))
            updates = history[-1].get("num_updates") if history else None
            return int(total) if total > 0 and count == updates else None
    return None


def _plain_number(value: object) -> float:
    """Return a finite number, also from a tensor with one element; 0 for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.layout == torch.strided:
        value = value.item()
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    return float(value) if abs(value) < 2**63 else 0.0


def check_model_size(checkpoint: Checkpoint) -> None:
    """Refuse settings of a far larger model than the weights belong to, before the model is built.

    Args:
        checkpoint: The checkpoint.

    Raises:
        UserError: The settings contradict the weights, so building the model would exhaust time or memory in vain.
    """
    model, num_weights = checkpoint.model, sum(tensor.numel() for tensor in checkpoint.weights.values())
    layers = _number(model.get("decoder_layers"))
    width, inner = _number(model.get("decoder_embed_dim")), _number(model.get("decoder_ffn_embed_dim"))
    heads_width = _number(model.get("decoder_attention_heads")) * (checkpoint.head_width() or 0) or width
    # a lower bound: a decoder with these settings has at least 2·width·(heads_width + inner) weights per layer
    if layers * width * (heads_width + inner) > num_weights:
        raise UserError(
            f"checkpoint {checkpoint.path} is refused: its settings say {layers} layers of width {width} and {inner}, "
            f"its weights are {num_weights} numbers"
        )
    for key, value in model.items():
        if key.endswith("layers") and _number(value) > len(checkpoint.weights):
            raise _contradiction(checkpoint.path, key, value, f"{len(checkpoint.weights)} tensors")
    positions = _number(model.get("max_target_positions")) or _number(model.get("tokens_per_sample"))
    if "rpe" not in model and positions * width > _MAX_SINUSOIDS:
        raise _contradiction(
            checkpoint.path, "max_target_positions", positions, f"a width of {width}, which is too much"
        )


def check_vocabulary(checkpoint: Checkpoint, symbols: Sequence[str], data: Path | str) -> None:
    """Check that a model was trained with the symbols of a dictionary.

    Args:
        checkpoint: The checkpoint.
        symbols: The symbols in the order of their ids.
        data: Folder of their dict.txt, for the message.

    Raises:
        UserError: The model was trained with other symbols.
    """
    digest, table = checkpoint.model.get("rpe_vocabulary"), checkpoint.weights.get("decoder.embed_tokens.weight")
    differs = digest != vocabulary_digest(symbols) if digest else table is not None and len(table) != len(symbols)
    if differs:
        raise UserError(
            f"{checkpoint.path} was trained with another vocabulary than {data}/dict.txt: prepare the text again with "
            "--vocab-from and the folder that it was trained on"
        )


def _number(value: object) -> int:
    """Return an integer setting, or 0 if it is missing or no integer."""
    return value if isinstance(value, int) else 0


def _shorten(text: str, max_length: int = _MAX_TEXT) -> str:
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _unexpected(path: Path, name: str, expected: str, value: object) -> UserError:
    """Return the error for a value of another type or range than ``expected``."""
    text = _shorten(repr(value)) if isinstance(value, (str, float, bool, int)) else f"a {type(value).__name__}"
    return UserError(f"checkpoint {path} is refused: its {name} is {text}, not {expected}; train again")


def _contradiction(path: Path, key: str, value: object, actual: str) -> UserError:
    """Return the error for a setting that the weights, which are ``actual``, contradict."""
    return UserError(f"checkpoint {path} is refused: its settings say {key}={value}, its weights {actual}; train again")


def _read_settings(path: Path, state: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the validated settings of the model and of the task."""
    settings: dict[str, Any] = {}
    if isinstance(state, dict):
        settings = {key: state[key] for key in ("cfg", "args") if state.get(key) is not None}
    if not settings:
        missing = "settings" if isinstance(state, dict) and "model" in state else "model"
        raise UserError(f"{path} is not a fairseq checkpoint: it holds no {missing}; train again or name another file")
    for where, value in settings.items():
        _check_plain(path, where, value)
    model, task = _tables(path, settings)
    for where, table in (("model", model), ("task", task)):
        _check_numbers(path, where, table)
    return model, task


def _check_history(path: Path, history: object) -> tuple[Mapping[str, object], ...]:
    """Return the optimizer history, checked to be a list of tables whose numbers of updates are such numbers."""
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise _unexpected(path, "optimizer_history", "a list of tables", history)
    for entry in history:
        if not isinstance(updates := entry.get("num_updates", 0), int) or not 0 <= updates < 2**63:
            raise _unexpected(path, "num_updates", "a number of updates", updates)
    return tuple(history)


def _check_plain(path: Path, where: str, value: object) -> None:
    """Check that settings are plain values; OmegaConf would resolve ``${…}`` from the environment."""
    for count, (name, item, depth) in enumerate(_nested_values(where, value)):
        if count > _MAX_VALUES or depth > _MAX_DEPTH:
            raise UserError(f"checkpoint {path} is refused: more settings, or deeper ones, than any training has")
        if isinstance(item, str) and "${" in item:
            raise UserError(
                f"checkpoint {path} is refused: its {name} is {_shorten(item)!r}, to be filled in from outside of it; "
                "settings of a checkpoint are plain values"
            )
        if isinstance(item, int) and abs(item) >= 2**63:
            raise UserError(f"checkpoint {path} is refused: its {name} is a number of more than 63 bits")
        if not isinstance(item, (str, int, float, bool, dict, list, tuple, Namespace, type(None))):
            raise _unexpected(path, name, "a plain value", item)


def _nested_values(name: str, value: object) -> Iterator[tuple[str, object, int]]:
    """Walk through nested settings.

    It is a generator, because a few bytes can describe endless nesting, and the caller stops early.

    Args:
        name: Name of the settings.
        value: The settings.

    Yields:
        The name of an item for messages, the item, and its depth; names of settings are items, too.
    """
    todo = [(name, value, 0)]
    while todo:
        name, value, depth = todo.pop()
        yield name, value, depth
        if depth > _MAX_DEPTH:
            continue
        table = vars(value) if isinstance(value, Namespace) else value
        if isinstance(table, dict):
            for key, item in table.items():
                yield name, key, depth
                item_name = f"{name}.{key}" if isinstance(key, str) and len(key) < _MAX_TEXT else name
                todo.append((item_name, item, depth + 1))
        elif isinstance(table, (list, tuple)):
            todo += [(name, item, depth + 1) for item in table]


def _table(path: Path, name: str, value: object) -> dict[str, Any]:
    """Return a table of the checkpoint as a dict with text as keys; empty if ``value`` is None."""
    value = vars(value) if isinstance(value, Namespace) else {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _unexpected(path, name, "a table", value)
    return value


def _tables(path: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the model and of the task.

    In an old checkpoint the parsed arguments ``args`` are both, and take precedence over ``cfg``.
    """
    cfg = _table(path, "cfg", settings.get("cfg"))
    model, task = (_table(path, f"cfg.{name}", cfg.get(name)) for name in ("model", "task"))
    if "args" not in settings:
        return model, task
    if not isinstance(settings["args"], Namespace):
        raise _unexpected(path, "args", "a table", settings["args"])
    return vars(settings["args"]), vars(settings["args"])


def _check_numbers(path: Path, where: str, table: Mapping[str, object]) -> None:
    """Check the settings in ``_RANGES``."""
    # in other models the same name may mean something else
    is_transformer = "decoder_ffn_embed_dim" in table or "rpe" in table
    for key, (minimum, maximum) in _RANGES.items():
        value = table.get(key)
        if value is None or (key.startswith("decoder_") and not is_transformer):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise _unexpected(path, f"{where}.{key}", f"a whole number from {minimum} to {maximum}", value)


def _check_weights(path: Path, weights: object) -> Mapping[str, Tensor]:
    """Return ``weights``, checked to be tensors by name that together are no larger than the file."""
    if not isinstance(weights, dict) or not all(isinstance(key, str) for key in weights):
        raise _unexpected(path, "model", "a table of weights by name", weights)
    size = 0
    for name, weight in weights.items():
        _check_weight(path, _shorten(name, _MAX_NAME), weight)
        size += weight.numel() * weight.element_size()
    if size > _MAX_TIED * path.stat().st_size:
        raise UserError(f"checkpoint {path} is refused: its weights are larger than the file")
    return weights


def _check_weight(path: Path, name: str, weight: object) -> None:
    """Check that a weight is a dense tensor of an expected dtype and no larger than its storage."""
    if not isinstance(weight, Tensor):
        raise _unexpected(path, f"weight {name}", "a tensor", weight)
    dtypes = FLOAT_DTYPES if name.endswith((".weight", ".bias")) else (*FLOAT_DTYPES, *_INTEGER_DTYPES)
    if weight.layout != torch.strided or weight.device.type != "cpu" or weight.dtype not in dtypes:
        kind = str(weight.dtype if weight.layout == torch.strided else weight.layout).removeprefix("torch.")
        raise UserError(f"checkpoint {path} is refused: its weight {name} is of {kind}, not of floating-point numbers")
    if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size():
        raise UserError(f"checkpoint {path} is refused: its weight {name} is larger than what the file holds of it")


def _check_storages(path: Path, state: object, part_sizes: Counter[int]) -> None:
    """Check that each tensor has its own part of the file: a memory-mapped tensor could extend into the next one.

    Args:
        path: The checkpoint.
        state: Its contents.
        part_sizes: Number of tensor parts of the file by size in bytes; empty for a file that is no zip file.

    Raises:
        UserError: The storages have other sizes than the parts.
    """
    todo, seen = [state], set[int]()
    stored = dict[int, int]()  # address of each storage -> its size; tied tensors share a storage
    while todo:
        item = todo.pop()
        if isinstance(item, Tensor) and item.layout == torch.strided and item.device.type == "cpu":
            stored[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            todo += item.values() if isinstance(item, dict) else item
    sizes = Counter(filter(None, stored.values()))  # empty tensors have no part
    if part_sizes and sizes - part_sizes:  # Counter subtraction keeps the sizes of which there are more
        raise damaged_error(path, "weights of other sizes than its parts have")


def _check_layers(path: Path, model: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """Check that settings and weights agree on the number of layers and the widths."""
    if "decoder_ffn_embed_dim" not in model:
        return
    layers_with_weights = {int(match[1]) for name in weights if len(name) < 200 and (match := _LAYER.match(name))}
    layers = model.get("decoder_layers")
    if layers_with_weights and layers is not None and layers_with_weights != set(range(_number(layers))):
        actual = f"{len(layers_with_weights)} layers, the last of number {max(layers_with_weights)}"
        raise _contradiction(path, "decoder_layers", layers, actual)
    for key, (name_pattern, axis) in _SHAPES.items():
        width = model.get(key)
        if width is None:
            continue
        is_per_layer = "{}" in name_pattern
        for name in map(name_pattern.format, sorted(layers_with_weights) if is_per_layer else (0,)):
            weight = weights.get(name)
            if weight is not None and (weight.dim() != 2 or weight.shape[axis] != width):
                raise _contradiction(path, key, width, f"{name} of {tuple(weight.shape)}")


def _encoding_weights(
    path: Path, model: Mapping[str, object], weights: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], ...]:
    """Return the weights of each encoding by name: one encoding per model or one per layer, or those of a pattern."""
    encodings: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        if key.startswith(ENCODING_PREFIX):
            index, _, name = key.removeprefix(ENCODING_PREFIX).partition(".")
            encodings.setdefault(index, {})[name] = value
    layers = _number(model.get("decoder_layers"))
    # in a pattern of layers, encodings without parameters have no weights
    has_gaps = is_pattern(str(model.get("rpe", "")))
    indices = set(map(str, range(layers if has_gaps else len(encodings))))
    for index in encodings:
        if index not in indices:
            count = len(encodings)
            raise UserError(f"checkpoint {path} is refused: its encodings are {count}, one of them {index[:40]!r}")
    if layers and len(encodings) > 1 and len(encodings) != layers and not has_gaps:
        raise _contradiction(path, "decoder_layers", layers, f"{len(encodings)} encodings")
    count = max(map(int, encodings), default=-1) + 1
    return tuple(encodings.get(str(index), {}) for index in range(count))


def dtype_mismatch(model: Mapping[str, Tensor], weights: Mapping[str, object]) -> str | None:
    """Compare the dtypes of weights to be loaded with those of the model.

    Args:
        model: State dict of the model.
        weights: Weights to be loaded.

    Returns:
        A message if a floating-point tensor would be loaded into an integer one or vice versa; None otherwise.
    """
    for name, weight in weights.items():
        target = model.get(name)
        if not isinstance(weight, Tensor) or not isinstance(target, Tensor):
            continue
        if weight.is_floating_point() != target.is_floating_point():
            dtype, target_dtype = (str(tensor.dtype).removeprefix("torch.") for tensor in (weight, target))
            return f"{name} is of {dtype}, the model's of {target_dtype}"
    return None

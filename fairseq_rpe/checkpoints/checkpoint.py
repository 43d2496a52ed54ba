"""What a checkpoint holds: plain settings and weights that fit them, looked through before anything is built of it."""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.checkpoints.checkpoint_file import damaged, read
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.tensors import FLOATS
from fairseq_rpe.utils.files import vocabulary_digest

_COUNTS = (torch.int32, torch.int64, torch.uint8, torch.bool)  # of buffers; a model says where it has any
_MOST_VALUES, _MOST_NESTED = 100_000, 20  # of settings: fairseq's are 400 values, three deep
_TIED = 4  # tensors of one checkpoint may share memory: twice where input and output embedding do
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_ENCODING = "decoder.encodings."
_LONGEST = 2**31 - 1
_RANGES = {  # of settings that a model's size or a text's length hangs on
    "decoder_layers": (1, 100_000),
    "decoder_embed_dim": (1, 2**20),
    "decoder_ffn_embed_dim": (1, 2**24),
    "decoder_input_dim": (1, 2**20),
    "decoder_output_dim": (1, 2**20),
    "decoder_attention_heads": (1, 4096),
    "rpe_train_length": (0, _LONGEST),
    "tokens_per_sample": (0, _LONGEST),
    "max_target_positions": (0, _LONGEST),
    "output_dictionary_size": (-1, _LONGEST),
    "rpe_inspect_every": (0, _LONGEST),
}
# setting: the tensor that has it as a dimension, and which
_SHAPES = {
    "decoder_embed_dim": ("decoder.layers.{}.self_attn.q_proj.weight", 0),
    "decoder_ffn_embed_dim": ("decoder.layers.{}.fc1.weight", 0),
    "decoder_input_dim": ("decoder.embed_tokens.weight", 1),
    "decoder_output_dim": ("decoder.output_projection.weight", 1),
}
_MOST_SINUSOIDS = 2**28  # numbers in the table that a stock model makes of max_target_positions


@dataclass(frozen=True)
class State:
    """A checkpoint of fairseq's, its tensors left on disk.

    ``model`` and ``task``: the settings that fairseq keeps of each, or of both in an old one. ``history``: an entry for
    each optimizer; ``None``: of an older version that kept none. ``encodings``: the weights of each encoding by name.
    """

    path: Path
    model: Mapping[str, object]
    task: Mapping[str, object]
    weights: Mapping[str, Tensor]
    history: tuple[Mapping[str, object], ...] | None
    encodings: tuple[Mapping[str, Tensor], ...]

    @property
    def updates(self) -> int | None:
        """Behind it, if it says so."""
        found = self.history[-1].get("num_updates") if self.history else None
        return found if isinstance(found, int) else None

    def train_length(self) -> int | None:
        """In tokens, if it says so."""
        found = self.model.get("rpe_train_length") or self.task.get("tokens_per_sample")
        return found if isinstance(found, int) else None

    def size(self, key: str) -> int:
        """A number of the model's settings. Raises UserError: there is none."""
        if not isinstance(found := self.model.get(key), int):
            raise UserError(f"checkpoint {self.path} is refused: its settings lack {key}; train again")
        return found


def load(path: Path) -> State:
    """Read a checkpoint and look through all of it; nothing in it is run, resolved or built.

    Raises UserError: it is missing, damaged, not fairseq's, or holds what no training leaves behind.
    """
    state, sizes = read(path)
    settings = {k: state[k] for k in ("cfg", "args") if state.get(k) is not None} if isinstance(state, dict) else {}
    if not settings:
        lacks = "settings" if isinstance(state, dict) and "model" in state else "model"
        raise UserError(f"{path} is not a fairseq checkpoint: it holds no {lacks}; train again or name another file")
    for where, value in settings.items():
        _check_plain(path, where, value)
    model, task = _tables(path, settings)
    for where, table in (("model", model), ("task", task)):
        _check_numbers(path, where, table)
    for key in ("extra_state", "task_state", "last_optimizer_state"):
        _table(path, key, state.get(key))
    weights = _weights(path, state.get("model", {}))
    _check_stored(path, state, sizes)
    history = state.get("optimizer_history") or []
    if not isinstance(history, list) or not all(isinstance(one, dict) for one in history):
        raise _odd(path, "optimizer_history", "a list of tables", history)
    for one in history:
        if not isinstance(updates := one.get("num_updates", 0), int) or not 0 <= updates < 2**63:
            raise _odd(path, "num_updates", "a number of updates", updates)
    _check_layers(path, model, weights)
    kept = tuple(history) if "optimizer_history" in state else None
    return State(path, model, task, weights, kept, _encodings(path, model, weights))


def check_size(state: State) -> None:
    """Refuse settings of a far larger model than the weights are of; for those who are about to build it.

    Raises UserError: so the machine would be busy, or full, for nothing.
    """
    model, total = state.model, sum(t.numel() for t in state.weights.values())
    layers, width, inner = (_number(model.get(f"decoder_{k}")) for k in ("layers", "embed_dim", "ffn_embed_dim"))
    if layers * width * (width + inner) > total:
        raise UserError(
            f"checkpoint {state.path} is refused: its settings say {layers} layers of width {width} and {inner}, its "
            f"weights are {total} numbers"
        )
    for key, value in model.items():
        if key.endswith("layers") and _number(value) > len(state.weights):
            raise _contradiction(state.path, key, value, f"{len(state.weights)} tensors")
    positions = _number(model.get("max_target_positions")) or _number(model.get("tokens_per_sample"))
    if "rpe" not in model and positions * width > _MOST_SINUSOIDS:
        raise _contradiction(state.path, "max_target_positions", positions, f"a width of {width}, which is too much")


def check_vocabulary(state: State, symbols: Sequence[str], data: Path | str) -> None:
    """Raises UserError: the model was trained with other symbols than these, which are of dict.txt in ``data``."""
    known, table = state.model.get("rpe_vocabulary"), state.weights.get("decoder.embed_tokens.weight")
    other = known != vocabulary_digest(symbols) if known else table is not None and len(table) != len(symbols)
    if other:
        raise UserError(
            f"{state.path} was trained with another vocabulary than {data}/dict.txt: prepare the text again with "
            "--vocab-from and the folder that it was trained on"
        )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _odd(path: Path, name: str, wanted: str, found: object) -> UserError:
    shown = repr(found) if isinstance(found, (str, float, bool, int)) else f"a {type(found).__name__}"
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return UserError(f"checkpoint {path} is refused: its {name} is {shown}, not {wanted}; train again")


def _contradiction(path: Path, key: str, value: object, found: str) -> UserError:
    return UserError(f"checkpoint {path} is refused: its settings say {key}={value}, its weights {found}; train again")


def _check_plain(path: Path, where: str, value: object) -> None:
    """Settings are numbers, text and tables of them; OmegaConf would fill in ``${…}`` from the environment."""
    for count, (name, one, depth) in enumerate(_values(where, value, 0)):
        if count > _MOST_VALUES or depth > _MOST_NESTED:
            raise UserError(f"checkpoint {path} is refused: more settings, or deeper ones, than any training has")
        if isinstance(one, str) and "${" in one:
            shown = one if len(one) <= 60 else one[:57] + "..."
            raise UserError(
                f"checkpoint {path} is refused: its {name} is {shown!r}, to be filled in from outside of it; settings "
                "of a checkpoint are plain values"
            )
        if isinstance(one, int) and abs(one) >= 2**63:
            raise UserError(f"checkpoint {path} is refused: its {name} is a number of more than 63 bits")
        if not isinstance(one, (str, int, float, bool, dict, list, tuple, Namespace, type(None))):
            raise _odd(path, name, "a plain value", one)


def _values(name: str, value: object, depth: int) -> Iterator[tuple[str, object, int]]:
    """Everything in nested settings, names included; lazily, as a few bytes can name endlessly much."""
    todo = [(name, value, depth)]
    while todo:
        name, value, depth = todo.pop()
        yield name, value, depth
        if depth > _MOST_NESTED:
            continue
        table = vars(value) if isinstance(value, Namespace) else value
        if isinstance(table, dict):
            for key, one in table.items():
                yield name, key, depth
                todo.append((f"{name}.{key}" if isinstance(key, str) and len(key) < 60 else name, one, depth + 1))
        elif isinstance(table, (list, tuple)):
            todo += [(name, one, depth + 1) for one in table]


def _table(path: Path, name: str, value: object) -> dict[str, Any]:
    value = vars(value) if isinstance(value, Namespace) else {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _odd(path, name, "a table", value)
    return value


def _tables(path: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the model and of the task; parsed arguments of an old checkpoint are both, and go first."""
    cfg = _table(path, "cfg", settings.get("cfg"))
    model, task = (_table(path, f"cfg.{part}", cfg.get(part)) for part in ("model", "task"))
    if "args" not in settings:
        return model, task
    if not isinstance(settings["args"], Namespace):
        raise _odd(path, "args", "a table", settings["args"])
    return vars(settings["args"]), vars(settings["args"])


def _check_numbers(path: Path, where: str, table: Mapping[str, object]) -> None:
    transformer = "decoder_ffn_embed_dim" in table or "rpe" in table  # elsewhere a name may mean something else
    for key, (least, most) in _RANGES.items():
        value = table.get(key)
        if value is None or (key.startswith("decoder_") and not transformer):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _odd(path, f"{where}.{key}", f"a whole number from {least} to {most}", value)


def _weights(path: Path, found: object) -> Mapping[str, Tensor]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise _odd(path, "model", "a table of weights by name", found)
    size = 0
    for name, one in found.items():
        name = name if len(name) <= 100 else name[:97] + "..."
        if not isinstance(one, Tensor):
            raise _odd(path, f"weight {name}", "a tensor", one)
        kinds = FLOATS if name.endswith((".weight", ".bias")) else (*FLOATS, *_COUNTS)
        if one.layout != torch.strided or one.device.type != "cpu" or one.dtype not in kinds:
            kind = str(one.dtype if one.layout == torch.strided else one.layout).removeprefix("torch.")
            raise UserError(
                f"checkpoint {path} is refused: its weight {name} is of {kind}, not of floating-point numbers"
            )
        if one.untyped_storage().nbytes() < one.numel() * one.element_size():
            raise UserError(f"checkpoint {path} is refused: its weight {name} is larger than what the file holds of it")
        size += one.numel() * one.element_size()
    if size > _TIED * path.stat().st_size:
        raise UserError(f"checkpoint {path} is refused: its weights are larger than the file")
    return found


def _check_stored(path: Path, state: object, sizes: Counter[int]) -> None:
    """A tensor left on disk could reach into the next one: each has a part of the file for itself."""
    todo, seen, stored = [state], set[int](), dict[int, int]()
    while todo:
        one = todo.pop()
        if isinstance(one, Tensor) and one.layout == torch.strided and one.device.type == "cpu":
            stored[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            todo += one.values() if isinstance(one, dict) else one
    if sizes and Counter(filter(None, stored.values())) - sizes:
        raise damaged(path, "weights of other sizes than its parts have")


def _check_layers(path: Path, model: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
    """The numbers of layers and widths that settings and weights both tell are the same."""
    if "decoder_ffn_embed_dim" not in model:
        return
    there = {int(match[1]) for name in weights if len(name) < 200 and (match := _LAYER.match(name))}
    layers = model.get("decoder_layers")
    if there and layers is not None and there != set(range(_number(layers))):
        raise _contradiction(path, "decoder_layers", layers, f"{len(there)} layers, the last of number {max(there)}")
    for key, (name, axis) in _SHAPES.items():
        for layer in sorted(there) if "{}" in name else (0,):
            one, said = weights.get(name.format(layer)), model.get(key)
            if one is not None and said is not None and (one.dim() != 2 or one.shape[axis] != said):
                raise _contradiction(path, key, said, f"{name.format(layer)} of {tuple(one.shape)}")


def _encodings(
    path: Path, model: Mapping[str, object], weights: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], ...]:
    """Weights of each encoding: one for the model, or one per layer."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        if key.startswith(_ENCODING):
            index, _, name = key.removeprefix(_ENCODING).partition(".")
            found.setdefault(index, {})[name] = value
    known = set(map(str, range(len(found))))
    for index in found:
        if index not in known:
            raise UserError(f"checkpoint {path} is refused: its encodings are {len(found)}, one of them {index[:40]!r}")
    layers = _number(model.get("decoder_layers"))
    if layers and len(found) > 1 and len(found) != layers:
        raise _contradiction(path, "decoder_layers", layers, f"{len(found)} encodings")
    return tuple(found[str(index)] for index in range(len(found)))


def same_kind(own: Mapping[str, Tensor], given: Mapping[str, object]) -> str | None:
    """What is wrong with weights that are to be loaded, if their kind of number is not the model's."""
    for name, one in given.items():
        mine = own.get(name)
        if isinstance(one, Tensor) and isinstance(mine, Tensor) and one.is_floating_point() != mine.is_floating_point():
            words = [str(t.dtype).removeprefix("torch.") for t in (one, mine)]
            return f"{name} is of {words[0]}, the model's of {words[1]}"
    return None

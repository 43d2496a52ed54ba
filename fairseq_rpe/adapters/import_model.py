"""Makes a checkpoint of this package from a transformers model on disk."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rpe.adapters.config_pattern import (  # first, because it checks that transformers is installed
    OWN_PATTERN,
    read_layers,
    resolve_pattern,
    training_length,
)

# isort: split

import shutil

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from fairseq_rpe.adapters.model_blocks import IMPORTED_TYPES, weight_map
from fairseq_rpe.adapters.weight_maps import Shape, WeightMap
from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.core.tensors import FLOAT_DTYPES
from fairseq_rpe.data.atomic_folder import scratch_folder
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS, MADE_BY, MANIFEST, describe_files, write_dictionary
from fairseq_rpe.data.prepare_options import MODEL_TOKENIZER
from fairseq_rpe.data.transformers_tokenizer import (
    CONFIG_FILE,
    ModelVocabulary,
    find_model_files,
    load_model_vocabulary,
)
from fairseq_rpe.models.new_checkpoint import NewModel, checkpoint_contents
from fairseq_rpe.utils.files import read_input
from fairseq_rpe.utils.json_files import parse_json_object, read_json, write_json
from fairseq_rpe.utils.output_checks import check_output_folder

VOCABULARY = "vocabulary"  # folder of dictionary and tokenizer in the run folder
CHECKPOINT = "checkpoint_last.pt"
_RECORD = "import.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "write the model again with save_pretrained"
# buffers that old versions of transformers saved and compute now
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq|.*\.attention\.(bias|masked_bias)")
_OUTPUTS = ("lm_head.weight", "embed_out.weight")


def import_model(folder: Path, out: Path, rpe: str | None = None, say: Callable[[str], None] = print) -> Path:
    """Convert a transformers model on disk into a checkpoint of ``transformer_rpe_lm`` that computes the same function.

    The checkpoint has the encoding, or the pattern of layers, of the model's config. Weights keep their dtype, except
    those that are no copies (Gemma's norms), which are in float32. One tensor at a time is read in addition to the
    converted ones.

    Args:
        folder: folder with config.json, tokenizer.json and safetensors.
        out: run folder to create; it must not exist or be empty.
        rpe: encoding in place of that of the config, as of ``use_encoding``; None: the config's.
        say: prints a line about the model.

    Returns:
        The checkpoint.

    Raises:
        UserError: the folder has no such model, the decoder has no blocks that compute the same, or ``out`` is in use.
    """
    _check_free(out)
    files = find_model_files(folder)
    config = _read_config(folder)
    vocabulary = load_model_vocabulary(folder)
    layers = read_layers(config, config.num_hidden_layers)
    pattern, length = resolve_pattern(rpe or OWN_PATTERN, layers), training_length(config, layers)
    weights = weight_map(config, vocabulary.token_ids)
    with ExitStack() as stack:
        tensors = _Tensors.open(folder, weights, stack)
        weights.check(tensors.shapes, folder)
        tensors.check_dtypes()
        for line in _describe(config.model_type, weights, pattern, length, vocabulary):
            say(line)
        target = Path(os.path.realpath(out))
        with scratch_folder(target) as scratch:
            built = scratch / "made"
            (built / VOCABULARY).mkdir(parents=True)
            _write_vocabulary(built / VOCABULARY, files, vocabulary)
            symbols = [*FAIRSEQ_SPECIALS, *vocabulary.symbols]
            model = NewModel(weights.config, pattern, length, target / VOCABULARY, symbols)
            state = checkpoint_contents(model, dict(weights.to_ours(tensors.read)))
            torch.save(state, built / CHECKPOINT)
            record = {"made_by": "fairseq-rpe import", "model": str(folder), "model_type": config.model_type}
            write_json(built / _RECORD, {**record, "rpe": pattern, "train_length": length})
            _check_free(out)  # again: files may have been put there meanwhile
            if target.exists():
                target.rmdir()
            built.rename(target)
    say(f"wrote {out / CHECKPOINT}")
    return out / CHECKPOINT


def read_source(out: Path) -> str | None:
    """Return the folder of the model of which :func:`import_model` made the checkpoint in ``out``, or None."""
    path = out / _RECORD
    return str(read_json(path).get("model")) if path.is_file() else None


def _check_free(out: Path) -> None:
    """Refuse an output folder that is in use or cannot be written."""
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: name another folder, or remove it")
    check_output_folder(out)
    if os.pathsep in str(out):
        raise UserError(f"--out {out} has a '{os.pathsep}', where fairseq splits paths: rename it")


def _read_config(folder: Path) -> Any:
    """Return transformers' config of a model of a known type."""
    path = folder / CONFIG_FILE
    content = parse_json_object(read_input(path), path, _REMEDY)
    kind = content.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{path} has no model_type, so it is no config of transformers: name another folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # any error of transformers' readers
        if kind not in IMPORTED_TYPES:
            types = ", ".join(sorted(IMPORTED_TYPES))
            raise UserError(f"a model of type '{kind}' cannot be imported; known types: {types}") from None
        why = shorten_path(" ".join(str(error).split()), 200)
        raise UserError(f"{path} cannot be read ({why}): {_REMEDY}") from None
    if kind not in IMPORTED_TYPES:
        weight_map(config)  # raises the reason
    return config


@dataclass
class _Tensors:
    """The tensors of the safetensors files of a model, read one by one.

    Attributes:
        files: open file of each tensor, by its name in the weight map.
        names: name of each tensor in its file.
        where: folder of the files.
    """

    where: Path
    files: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, weights: WeightMap, stack: ExitStack) -> "_Tensors":
        """Open the files; buffers and the copy of a tied output are left out."""
        tensors = cls(folder)
        expected = weights.their_shapes()
        for path in _find_weights(folder):
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is no safetensors file, or damaged ({error}): copy it again") from None
            for name in names:
                key = name
                if name in _OUTPUTS and name not in expected:  # another name of the output, or a copy of the embedding
                    key = next((other for other in _OUTPUTS if other in expected), "")
                if not key or _BUFFERS.fullmatch(name):
                    continue
                if key in tensors.files:
                    raise UserError(f"{folder} has the tensor {name} twice: {_REMEDY}")
                tensors.files[key], tensors.names[key] = file, name
        return tensors

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes by name."""
        return {key: tuple(file.get_slice(self.names[key]).get_shape()) for key, file in self.files.items()}

    def check_dtypes(self) -> None:
        """Refuse quantised weights."""
        dtypes = {"F64", "F32", "F16", "BF16"}
        for key, file in self.files.items():
            dtype = file.get_slice(self.names[key]).get_dtype()
            if dtype not in dtypes:
                raise UserError(
                    f"{self.where}: {key} is of {dtype}, and weights are of {', '.join(sorted(dtypes))}: save the "
                    "model without quantisation"
                )

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        tensor: Tensor = self.files[name].get_tensor(self.names[name])
        assert tensor.dtype in FLOAT_DTYPES
        return tensor


def _find_weights(folder: Path) -> Iterator[Path]:
    """Yield the safetensors files of a model."""
    if (folder / _WEIGHTS).is_file():
        yield folder / _WEIGHTS
        return
    index = folder / _INDEX
    if not index.is_file():
        raise UserError(f"{folder} has no {_WEIGHTS} and no {_INDEX}: {_REMEDY}, which writes safetensors")
    names = parse_json_object(read_input(index), index, _REMEDY).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} has no weight_map from tensors to files: {_REMEDY}")
    for name in sorted(set(names.values())):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise UserError(f"{index} names the file {json.dumps(name)}, which {folder} does not have: copy all files")
        yield path


def _write_vocabulary(folder: Path, files: dict[str, Path], vocabulary: ModelVocabulary) -> None:
    """Write a folder that ``prepare --vocab-from`` accepts."""
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
    write_dictionary(folder / "dict.txt", vocabulary.symbols)
    manifest = {
        "made_by": MADE_BY,
        "tokenizer": {"kind": MODEL_TOKENIZER, "types": len(vocabulary.token_ids)},
        "files": describe_files(folder, ("dict.txt", *files)),
    }
    write_json(folder / MANIFEST, manifest)


def _describe(kind: str, weights: WeightMap, pattern: str, length: int, vocabulary: ModelVocabulary) -> Iterator[str]:
    """Yield lines about a model that is imported."""
    config = weights.config
    numbers = sum(torch.Size(shape).numel() for shape in weights.own_shapes.values())
    kv_heads = f" ({config.num_kv_heads} for keys and values)" if config.kv_heads else ""
    yield (
        f"{kind}: {numbers:,} parameters, {config.layers} layers of width {config.width}, {config.heads} heads"
        f"{kv_heads} of width {config.head_dim}, feed-forward width {config.ffn_width}"
    )
    yield f"encoding: {pattern}; training length {length} tokens"
    tokenizer = vocabulary.tokenizer
    shown = " ".join(
        f"{symbol}={token_id}:{tokenizer.id_to_token(token_id)}"
        for symbol, token_id in zip(FAIRSEQ_SPECIALS, vocabulary.token_ids, strict=False)
    )
    yield f"tokenizer: {len(vocabulary.token_ids)} tokens; special symbols {shown}"

"""All encodings by name, e.g. ``build("type1:variant=paper", heads=8, width=512).bias_profile(n)``."""

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path

from fairseq_rpe.core.arguments import check_count, check_text, check_texts, describe_value
from fairseq_rpe.core.contract import call_user_method, is_shipped
from fairseq_rpe.core.errors import UserError, explain_memory_errors
from fairseq_rpe.core.registry import Registry
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings import (  # noqa: F401  (registers)
    abacus,
    absolute,
    alibi,
    attention_sinks,
    bipe,
    clex,
    complex_embedding,
    content_rotation,
    cope,
    coupled,
    dape,
    deberta,
    fire,
    floater,
    fope,
    forgetting_transformer,
    grape_additive,
    huang,
    kerple,
    longrope,
    music_transformer,
    path_attention,
    pope,
    rope,
    rope_extrapolation,
    sandwich,
    selective,
    series_bias,
    shaw,
    stick_breaking,
    t5,
    tisa,
    transformer_xl,
    tupe,
    wall,
    window,
    xpos,
)
from fairseq_rpe.encodings.base import Absolute, DistanceBias, Encoding, PairwiseBias, Rotary, register, registry
from fairseq_rpe.encodings.contract import check_contract
from fairseq_rpe.encodings.kerple import positive
from fairseq_rpe.utils.files import sha256_of_files

__all__ = [
    "Absolute",
    "DistanceBias",
    "Encoding",
    "PairwiseBias",
    "Rotary",
    "build",
    "describe",
    "load_module",
    "names",
    "normalise",
    "option",
    "positive",
    "register",
]
_loaded: dict[str, str] = {}  # absolute path of each file that was run -> digest of its contents

names, describe, normalise = registry.names, registry.describe, registry.normalise


def build(
    spec: str,
    heads: int,
    width: int,
    length: int | None = None,
    symbols: Sequence[str] | None = None,
    head_width: int | None = None,
) -> Encoding:
    """Build an encoding.

    A user's own encoding is checked before it is returned, once for each combination of options and sizes; see
    ``contract``.

    Args:
        spec: ``name`` or ``name:key=value,key=value``.
        heads: number of attention heads H, a divisor of ``width``.
        width: model width C.
        length: training length in tokens, or None if unknown.
        symbols: symbols of the dictionary by id, for encodings that read tokens; without them such an encoding is
            built empty, to be filled by ``load_state_dict``.
        head_width: width D of an attention head, or None for C/H.

    Returns:
        The encoding, with parameters initialised.

    Raises:
        UserError: the name or an option is unknown, a value is out of range, ``heads`` does not divide ``width``, an
            argument has a wrong type, or attention cannot use a user's own encoding.
    """
    check_text("an encoding's spec", spec, "alibi")
    check_count("heads", heads)
    check_count("width", width)
    check_count("length", length, optional=True)
    check_texts("symbols", symbols)
    heads, width, length = int(heads), int(width), None if length is None else int(length)  # numpy or torch scalars
    cls, _, config = registry.resolve(spec)
    if head_width is not None and head_width * heads != width:
        width = _width_for_heads(cls, spec, heads, width, head_width)
    if width % heads:
        raise UserError(f"{heads} heads do not divide a model width of {width}: choose another number of heads")
    if is_shipped(cls):
        with explain_memory_errors(f"'{spec}' of width {width}" + (f" and length {length}" if length else "")):
            return cls(config, heads, width, length, symbols)
    encoding: Encoding = call_user_method(cls, "setup", cls, config, heads, width, length, symbols)
    check_contract(encoding, len(symbols or ()))
    return encoding


def _width_for_heads(cls: type[Encoding], spec: str, heads: int, width: int, head_width: int) -> int:
    """Return the width to build an encoding with, for heads whose width is not that of the model divided by H.

    An encoding has one width. One that reads or changes a layer's input needs the model width C; others only need the
    width of a head, so H·D serves them.
    """
    reads_input = cls.embed is not Encoding.embed or cls.token_features is not Encoding.token_features
    multiplies = cls.score_product is not Encoding.score_product
    if reads_input and (multiplies or cls.rotate is not Encoding.rotate):
        acts = "reads the input and multiplies heads" if multiplies else "acts at the input and rotates heads"
        raise UserError(
            f"'{spec}' {acts}, so a head must have {width // heads} elements, the model width divided by the heads, "
            f"not {head_width}: leave --head-dim out"
        )
    return width if reads_input else heads * head_width


def load_module(path: str | Path) -> None:
    """Run a Python file that registers encodings or position transforms; a file that was already run is skipped.

    Args:
        path: a Python file that calls ``fairseq_rpe.encodings.register`` or ``fairseq_rpe.positions.register``.

    Raises:
        UserError: the file is missing, fails, changed after it was run, or registers nothing.
    """
    if not isinstance(path, str | Path):
        raise UserError(f"--rpe-module needs a string or Path, not {describe_value(path)}")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"--rpe-module {path}: no such file, name a Python file")
    digest = sha256_of_files(file)
    if str(file) in _loaded:
        if _loaded[str(file)] != digest:
            raise UserError(f"--rpe-module {path}: the file changed after it was loaded; start a new process")
        return
    module_name = f"rpe_module_{file.stem}_{digest[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"--rpe-module {path}: not a Python file (its name must end in .py)")
    registry.names()  # loads the entry points first
    before = Registry.num_foreign
    _execute_module(path, file, spec, spec.loader)
    if Registry.num_foreign == before:
        raise UserError(
            f"--rpe-module {path}: registers no encoding and no position transform; decorate its class with "
            "@register('name')"
        )
    _loaded[str(file)] = digest


def _execute_module(path: str | Path, file: Path, spec: ModuleSpec, loader: Loader) -> None:
    """Run a user's Python file as a module; report an error in it with its line.

    Args:
        path: the file as the user names it, for messages.
        file: its absolute path.
        spec: specification of the module, with a name of its own, so that it replaces no other module.
        loader: loader of ``spec``.

    Raises:
        UserError: the file raises an exception or ends Python.
    """
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up there
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        line = _line_in(error, str(file))
        what = f"it ends Python ({error})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        raise UserError(f"--rpe-module {path}{line}: {what}; fix that file".replace("\n", " ")) from error


def _line_in(error: BaseException, file: str) -> str:
    """Return ``, line N`` for the last line of ``file`` in the traceback of an error, or "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f", line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f", line {frames[-1].lineno}" if frames else ""

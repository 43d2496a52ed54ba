"""Reads the scaling of a model's rotation from its config (``rope_parameters`` of transformers 5)."""

from collections.abc import Callable, Mapping
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import format_value, parse

Options = dict[str, float | int | bool | str]


def scaling_options(parameters: Mapping[str, Any], max_positions: int) -> dict[str, str] | None:
    """Return the options of ``rope`` with which it has the frequencies and the attention factor of a config.

    ``base``, ``rotary_fraction`` and ``interleaved`` are not among them: they belong to every rotation.

    Args:
        parameters: ``rope_parameters`` of the config, or those of one type of layer.
        max_positions: ``max_position_embeddings`` of the config, in tokens.

    Returns:
        Values by option as a spec has them; empty for a rotation without scaling; None for a ``rope_type`` that is not
        ``linear``, ``llama3``, ``proportional`` or ``yarn``.

    Raises:
        UserError: a parameter that the type needs is missing or no number.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind not in _READERS:
        return None
    try:
        options = _READERS[kind](parameters, max_positions)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"rope_parameters of this model's config ({kind}) cannot be read ({type(error).__name__}: {error}): name "
            "the scaling in the spec, such as rope:scaling=none"
        ) from error
    return {key: format_value(value) for key, value in options.items()}


def complete_scaling(spec: str, parameters: Mapping[str, Any], max_positions: int) -> str:
    """Add the scaling of a config to a spec of ``rope`` that names none; options that the spec states stay.

    Args:
        spec: spec of any encoding.
        parameters: as in :func:`scaling_options`.
        max_positions: as in :func:`scaling_options`.

    Returns:
        The spec; unchanged if it is not of ``rope``, names a scaling, or the config has none that can be read.

    Raises:
        UserError: the spec is malformed, or the scaling would be added and cannot be read.
    """
    name, stated = parse(spec)
    options = scaling_options(parameters, max_positions) if name == "rope" and "scaling" not in stated else None
    if not options:
        return spec
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in {**options, **stated}.items())


def _read_linear(parameters: Mapping[str, Any], max_positions: int) -> Options:
    return {"scaling": "linear", "factor": float(parameters["factor"])}


def _read_proportional(parameters: Mapping[str, Any], max_positions: int) -> Options:
    """Return the options of p-RoPE; ``partial_rotary_factor`` is the fraction of the pairs that rotate."""
    factor = float(parameters.get("factor") or 1)
    scaled: Options = {"factor": factor} if factor != 1 else {}
    return {"scaling": "proportional", **scaled, "keep": float(parameters.get("partial_rotary_factor") or 1)}


def _read_llama3(parameters: Mapping[str, Any], max_positions: int) -> Options:
    return {
        "scaling": "llama3",
        "factor": float(parameters["factor"]),
        "original_length": _original_length(parameters, max_positions),
        "beta_fast": float(parameters["high_freq_factor"]),
        "beta_slow": float(parameters["low_freq_factor"]),
    }


def _read_yarn(parameters: Mapping[str, Any], max_positions: int) -> Options:
    """Return YaRN's options; a parameter that is None or 0 is missing, and so is ``mscale`` or its divisor alone."""
    original_length = _original_length(parameters, max_positions)
    factor = parameters.get("factor")
    options: Options = {
        "scaling": "yarn",
        "factor": float(max_positions / original_length if factor is None else factor),
        "original_length": original_length,
    }
    options |= {key: float(parameters[key]) for key in ("beta_fast", "beta_slow") if parameters.get(key)}
    if not parameters.get("truncate", True):
        options["truncate"] = False
    if parameters.get("attention_factor") is not None:
        options["temperature"] = float(parameters["attention_factor"])
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        options |= {key: float(parameters[key]) for key in ("mscale", "mscale_all_dim")}
    return options


def _original_length(parameters: Mapping[str, Any], max_positions: int) -> int:
    return int(parameters.get("original_max_position_embeddings") or max_positions)


_READERS: dict[str, Callable[[Mapping[str, Any], int], Options]] = {
    "linear": _read_linear,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
    "yarn": _read_yarn,
}

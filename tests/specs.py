"""Specs of all encodings, and smaller sets of them that cover every combination of capabilities.

``tests/encodings`` runs every spec; other tests run representatives. An encoding that is registered without a spec of
its own here is tested with its defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build, names
from fairseq_rpe.encodings.base import Encoding
from fairseq_rpe.encodings.interface import EncodingInterface

# one spec for each branch of each registered encoding
SPECS = {
    "nope": ["nope"],
    "sinusoidal": ["sinusoidal", "sinusoidal:style=vaswani"],
    "learned": ["learned"],
    "alibi": ["alibi"],
    "type1": ["type1", "type1:variant=paper"],
    "type2": ["type2", "type2:variant=paper"],
    "inv_n": ["inv_n", "inv_n:variant=paper"],
    "inv_nlnn": ["inv_nlnn", "inv_nlnn:variant=paper"],
    "window": ["window:window=5"],
    "kerple_log": ["kerple_log"],
    "kerple_power": ["kerple_power", "kerple_power:p=0.5,a=0.1"],
    "sandwich": ["sandwich", "sandwich:variant=evo,dim=32"],
    "t5_bias": ["t5_bias:init_std=1", "t5_bias:variant=clipped,buckets=9,init_std=1"],
    "rope": [
        "rope",
        "rope:rotary_fraction=0.5,interleaved=true",
        "rope:scaling=linear,factor=4",
        "rope:scaling=ntk,factor=4",
        "rope:scaling=dynamic_ntk,original_length=64",
        "rope:scaling=ntk_by_parts,factor=4,original_length=64,ramp=paper",
        "rope:scaling=yarn,factor=auto,original_length=64,resonance=true",
        "rope:scaling=truncated,factor=2,original_length=64",
        "rope:scaling=truncated,truncate_high=0.2,truncate_low=0.01,truncate_value=0.05",
        "rope:scaling=llama3,factor=4,original_length=64",
        "rope:scaling=proportional,keep=0.5",
        "rope:scaling=yarn,factor=4,original_length=64,truncate=false,mscale=1,mscale_all_dim=0.5,keep=auto",
        "rope:frequencies=learned",
    ],
    "longrope": [
        "longrope",
        "longrope:factors=ntk,factor=4,original_length=64",
        "longrope:factors=yarn,factor=4,original_length=64,start_tokens=5,short=scaled,rotary_fraction=0.5",
    ],
    "clex": ["clex:original_length=64"],
    "fope": ["fope:original_length=64", "fope:original_length=64,padding=code"],
    "pope": ["pope:init=uniform"],
    "xpos": ["xpos", "xpos:scale_base=16", "xpos:decay=0.98,rotary_fraction=0.5,interleaved=false"],
    "tisa": ["tisa"],
    "tupe": ["tupe", "tupe:relative=true"],
    "floater": ["floater:steps=1"],
    "complex": ["complex:frequencies=dimension"],
    "bipe": [],  # needs token ids, which most tests do not have: see test_bipe and test_token_readers
    "abacus": [],  # need token ids and digits in the dictionary: see test_abacus
    "coupled": [],
    "self_extend": ["self_extend:group=4,window=8"],
    "rerope": ["rerope:window=5,logn=true,original_length=8,rotary_fraction=0.5"],
    "leaky_rerope": ["leaky_rerope:window=5,k=4,interleaved=true"],
    "lm_infinite": ["lm_infinite:sinks=2,window=7,max_distance=5"],
    "streaming_llm": ["streaming_llm:sinks=3,recent=6"],
    "dual_chunk": ["dual_chunk:chunk=6,max_position=9"],
    "string": ["string:shift=6,window=2", "string:shift=5,window=3,temperature=code,rotary_fraction=0.5"],
    "fire": [
        "fire",
        "fire:exact=true",
        "fire:hidden_layers=0,log=false,threshold=none",
        "fire:hidden_layers=1,threshold=fixed,init_L=9,activation=gelu,output_activation=relu",
    ],
}
ALL_SPECS = [spec for specs in SPECS.values() for spec in specs]
# the same for encodings with a content bias
CONTENT = {
    "huang": ["huang:max_distance=5", "huang:method=1,max_distance=6", "huang:method=3,max_distance=7"],
    "shaw": ["shaw:max_distance=5", "shaw:max_distance=7,values=true"],
    "music": ["music:max_distance=9", "music:out_of_range=clip"],
    "transformer_xl": ["transformer_xl", "transformer_xl:max_distance=6"],
    "deberta": ["deberta", "deberta:max_distance=12,buckets=6", "deberta:max_distance=9,p2c=paper"],
    "cope": ["cope:max_positions=5", "cope:scale_on=content"],
    "dape": [
        "dape",
        "dape:base=fire",
        "dape:base=rope",
        "dape:base=rope,rope_base=500,rotary_fraction=0.5,interleaved=true",
        "dape:kernel=3",
    ],
    "forgetting": ["forgetting", "forgetting:gate=bias"],
    "pairwise_forgetting": ["pairwise_forgetting"],
    "grape_a": ["grape_a", "grape_a:gate=query", "grape_a:gate=both,unit_vectors=false"],
    "path": ["path", "path:gate=forget,rank=0,conv=0"],
    "wall": ["wall", "wall:gate=forget"],
    "selective_rope": ["selective_rope", "selective_rope:rank=0,conv=1,offset=true,gate=true"],
    "grape_m": ["grape_m:per_head=true"],
    "stick_breaking": ["stick_breaking", "stick_breaking:attend_self=true,remainder=value"],
    "selective": ["selective", "selective:base=kerple_log"],
}
SPECS |= CONTENT
CONTENT_SPECS = [spec for specs in CONTENT.values() for spec in specs]
# encodings that evaluate a rope model beyond its training length
REGION_ROPES = ("self_extend", "rerope", "leaky_rerope", "lm_infinite", "streaming_llm", "dual_chunk", "string")


def _overrides(name: str) -> Callable[[Encoding], bool]:
    return lambda encoding: getattr(type(encoding), name) is not getattr(EncodingInterface, name)


def _content_bias_type(encoding: Encoding) -> str:
    """Return the class of the content bias, because each class is computed differently; empty without one."""
    if not encoding.has_content_bias:
        return ""
    x, heads = torch.zeros(1, 3, 32), torch.zeros(1, 4, 3, 8)
    return type(encoding.content_bias(heads, heads, Positions.arange(3), encoding.token_features(x))).__name__


def _position_bias_type(encoding: Encoding) -> str:
    """Return the class of the position bias, and whether it hides keys; empty without one."""
    pos = Positions.arange(40)
    bias = None if encoding.needs_token_ids or encoding.position_type == "none" else encoding.position_bias(pos)
    if bias is None:
        return ""
    hides = torch.isneginf(bias.materialize(pos).tril()).any()
    return type(bias).__name__ + (" that hides keys" if hides else "")


# the capabilities of an encoding, by which the code that uses it takes different paths
CAPABILITIES: dict[str, Callable[[Encoding], object]] = {
    "adds_bias": lambda encoding: encoding.adds_bias,
    "position_bias": lambda encoding: _position_bias_type(encoding),
    "rotates": lambda encoding: encoding.rotates,
    "rotated_width_factor": lambda encoding: encoding.rotated_width_factor,
    "changes_values": lambda encoding: encoding.changes_values,
    "embeds": lambda encoding: encoding.embeds,
    "needs_token_ids": lambda encoding: encoding.needs_token_ids,
    "content_bias": lambda encoding: _content_bias_type(encoding),
    "transform_scores": _overrides("transform_scores"),
    "has_key_state": lambda encoding: encoding.has_key_state,
    "has_vector_product": lambda encoding: encoding.has_vector_product,
    "has_score_product": lambda encoding: encoding.has_score_product,
    "returns_log_weights": lambda encoding: encoding.returns_log_weights,
    "relative_values": lambda encoding: encoding.relative_values(Positions.arange(2)) is not None,
    "token_features": _overrides("token_features"),
    "prepare_positions": _overrides("prepare_positions"),
    "rotation_regions": lambda encoding: encoding.rotation_regions(Positions.arange(80)) is not None,
    "is_distance_bias": lambda encoding: encoding.is_distance_bias,
    "length_dependent": lambda encoding: encoding.length_dependent,
    "fixed_rotation": lambda encoding: encoding.fixed_rotation,
    "max_queries_per_call": lambda encoding: encoding.max_queries_per_call is not None,
    "position_type": lambda encoding: encoding.position_type,
    "learns": lambda encoding: any(True for _ in encoding.parameters()),
}


@functools.cache
def capabilities(spec: str) -> dict[str, object]:
    """Return the value of each of ``CAPABILITIES`` for an encoding of 4 heads."""
    encoding = build(spec, 4, 32, 64)
    return {name: value_of(encoding) for name, value_of in CAPABILITIES.items()}


def every_spec() -> list[str]:
    """Return at least one spec of each registered encoding."""
    return [spec for name in [*SPECS, *sorted(set(names()) - set(SPECS))] for spec in SPECS.get(name, ()) or (name,)]


@functools.cache
def representatives(*capability_names: str, tokens: bool = False) -> tuple[str, ...]:
    """Return the first spec of each combination of capabilities.

    Args:
        capability_names: the capabilities that matter; all if none is named.
        tokens: whether to include encodings that need token ids.
    """
    chosen: dict[tuple[object, ...], str] = {}
    for spec in every_spec():
        values = capabilities(spec)
        if tokens or not values["needs_token_ids"]:
            chosen.setdefault(tuple(values[name] for name in capability_names or CAPABILITIES), spec)
    return tuple(chosen.values())

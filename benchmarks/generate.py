"""Greedy generation of one model by this package and by ``generate`` of transformers, in turns.

    python benchmarks/generate.py                     # minutes on two cores
    python benchmarks/generate.py --batches 1 --prompt 512 --tokens 256 --csv generate.csv
    python benchmarks/generate.py --profile 1         # functions of a decoding step by their own time, not timed

The model is transformers' Llama with random weights, which are copied to this package's decoder with the block llama.
Both generate the same --tokens tokens after the same prompts, which the program checks. A turn is one whole call,
prefill included; the turns alternate, and the table has the medians, with the least and the most. Both use the same
threads of this process. Nothing is written without --csv.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import re
import statistics
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor

VOCABULARY, PAD = 4096, 1
NAMES = [
    (r"^model\.embed_tokens", "embed_tokens"),
    (r"^model\.norm", "layer_norm"),
    (r"^lm_head", "output_projection"),
    (r"^model\.", ""),
    (r"self_attn\.o_proj", "self_attn.out_proj"),
    (r"input_layernorm", "self_attn_layer_norm"),
    (r"post_attention_layernorm", "final_layer_norm"),
    (r"mlp\.gate_proj", "fc_gate"),
    (r"mlp\.up_proj", "fc1"),
    (r"mlp\.down_proj", "fc2"),
]


def build_models(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return this package's model and transformers' model with equal weights."""
    from fairseq_rpe.adapters import _require_transformers  # noqa: F401

    # isort: split
    import transformers
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY
    from fairseq.tasks.language_modeling import LanguageModelingTask

    import fairseq_rpe.models  # noqa: F401  (registers)
    from fairseq_rpe.adapters.config_pattern import pattern_from_config
    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        intermediate_size=args.ffn,
        max_position_embeddings=args.prompt + args.tokens,
        pad_token_id=PAD,
        eos_token_id=None,
        bos_token_id=None,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    dictionary = Dictionary()
    for i in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    settings = Namespace(
        block="llama",
        rpe=pattern_from_config(config),
        kv_heads=args.kv_heads,
        decoder_layers=args.layers,
        decoder_embed_dim=args.width,
        decoder_attention_heads=args.heads,
        tokens_per_sample=args.prompt + args.tokens,
        dropout=0.0,
    )
    ARCH_CONFIG_REGISTRY["transformer_rpe_lm_tiny"](settings)
    settings.decoder_ffn_embed_dim = args.ffn
    task = LanguageModelingTask(Namespace(add_bos_token=False), dictionary)
    ours = TransformerRPELanguageModel.build_model(settings, task).eval()
    weights = {}
    for key, value in theirs.state_dict().items():
        name = key
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        weights[name] = value
    result = ours.decoder.load_state_dict(weights, strict=False)
    missing = [name for name in result.missing_keys if name != "version"]
    assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)
    return ours, theirs


def generate_ours(model: Any, prompts: Tensor, tokens: int) -> Tensor:
    """Return the (B, tokens) new tokens of this package's greedy generation, as ``fairseq-rpe generate`` calls it."""
    from fairseq_rpe.decoder.sampling import SampledRow, SamplingConfig, sample_rows

    config, generator = SamplingConfig(temperature=0.0), torch.Generator()
    rows = [SampledRow(prompt, tokens, config, generator) for prompt in prompts.tolist()]
    texts: list[list[int]] = [[] for _ in rows]

    def add(row: int, token: int, _: float | None) -> bool:
        texts[row].append(token)
        return False

    sample_rows(model, rows, add)
    return torch.tensor(texts)


def generate_theirs(model: Any, prompts: Tensor, tokens: int) -> Tensor:
    """Return the (B, tokens) new tokens of transformers' greedy generation."""
    mask = torch.ones_like(prompts)
    out: Tensor = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=PAD)
    return out[:, prompts.shape[1] :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="rows (%(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens of each row (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="%(default)s")
    parser.add_argument("--width", type=int, default=512, help="%(default)s")
    parser.add_argument("--heads", type=int, default=8, help="%(default)s")
    parser.add_argument("--kv-heads", type=int, default=8, help="%(default)s")
    parser.add_argument("--ffn", type=int, default=1408, help="width of the gated feed-forward layers (%(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="timed turns of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="%(default)s")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="profile this package with so many rows, and end")
    parser.add_argument("--csv", type=Path, help="CSV file of the measurements")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ours, theirs = build_models(args)
    head = f"{machine.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
    head += f"{args.threads} threads, Llama of {args.layers} layers of {args.width}, {args.heads} heads, float32"
    print(head, flush=True)
    if args.profile:
        prompts = torch.randint(4, VOCABULARY, (args.profile, args.prompt))
        generate_ours(ours, prompts, args.tokens)
        with cProfile.Profile() as profile:
            generate_ours(ours, prompts, args.tokens)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    rows = []
    for batch in args.batches:
        prompts = torch.randint(4, VOCABULARY, (batch, args.prompt))
        calls = {
            "fairseq-rpe": partial(generate_ours, ours, prompts, args.tokens),
            "transformers": partial(generate_theirs, theirs, prompts, args.tokens),
        }
        texts = [call() for call in calls.values()]
        assert torch.equal(*texts), "the two models generate different tokens"
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():
            median = statistics.median(values)
            row = {"batch": batch, "prompt": args.prompt, "tokens": args.tokens, "what": name}
            statistic = {"ms_per_step": median, "least": min(values), "most": max(values)}
            row |= {key: f"{1000 * value / args.tokens:.3f}" for key, value in statistic.items()}
            rows.append({**row, "tokens_per_s": f"{batch * args.tokens / median:.1f}"})
            print(rows[-1], flush=True)
    if args.csv:
        machine.write_csv(args.csv, head, rows)
        print(f"wrote {args.csv}")


if __name__ == "__main__":
    main()

"""Decoding with a KV cache: seconds per attention step by encoding, and tokens per second of whole models.

    python benchmarks/decode.py                      # both parts; minutes on two cores
    python benchmarks/decode.py --only attention --rpe alibi rope
    python benchmarks/decode.py --only generate --prompt 300 --tokens 100 --layers 2
    git worktree add ../before TAG
    PYTHONPATH=../before python benchmarks/decode.py --only generate --csv before.csv    # another checkout's package

- attention: one token more in each of --layers layers of 8 heads of 64 that have --keys keys and values cached.
  ``none`` is torch's attention without a bias, with the same cache; each encoding takes turns with it, and the ratio is
  that of the medians. What layers share (positions, the plan, a bias) is made once for all of them, as in a model.
- generate: greedy decoding of --tokens tokens after a prompt of --prompt, which is not timed, by models of one size and
  random weights: transformer_rpe_lm with each encoding of --models, stock fairseq's transformer_lm (sinusoidal), and
  GPT-NeoX (rope) and BLOOM (ALiBi) of the package transformers, where that is installed, called without its generate().
  They take turns of --turn tokens, and the median turn counts.

Nothing is written without --csv.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

HEADS, WIDTH, VOCABULARY = 8, 64, 4096
SPECS = ["nope", "rope", "alibi", "type1", "kerple_log", "sandwich", "t5_bias", "fire", "xpos"]
MODELS = ["nope", "rope", "alibi", "type1", "kerple_log", "fire"]
OTHERS = {"fairseq": "fairseq, sinusoidal", "gpt_neox": "transformers, GPT-NeoX", "bloom": "transformers, BLOOM"}
Step = Callable[[], object]


def time_interleaved(ways: dict[str, Step], repeats: int) -> dict[str, float]:
    """Return median seconds of each step, timed in rotation after two warm-up rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 2):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn > 1:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class Stack:
    """Attention of several layers with m cached tokens; every call decodes one more token."""

    def __init__(self, keys: int, layers: int) -> None:
        self.caches = [torch.randn(2, 1, HEADS, keys, WIDTH).unbind(0) for _ in range(layers)]
        self.rooms: list[tuple[Any, Any]] = [(None, None)] * layers
        self.qkv = torch.randn(layers, 3, 1, HEADS, 1, WIDTH)

    def grow(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from fairseq_rpe.attention.kv_cache import append_tokens

        old, rooms = self.caches[layer], self.rooms[layer]
        found = [append_tokens(room, x, new) for room, x, new in zip(rooms, old, (k, v), strict=True)]
        self.caches[layer] = k, v = found[0][0], found[1][0]
        self.rooms[layer] = found[0][1], found[1][1]
        return k, v

    def plain(self) -> None:
        for layer, (q, k, v) in enumerate(self.qkv):
            F.scaled_dot_product_attention(q, *self.grow(layer, k, v))

    def encoded(self, spec: str) -> Step:
        """Build the attention plans as the decoder does, with one encoding per layer if that is the default."""
        from fairseq_rpe.attention import choose_backend
        from fairseq_rpe.attention.forward import build_plan, positions_from_padding, rotate_keys, run_attention
        from fairseq_rpe.encodings import build

        made = [build(spec, HEADS, HEADS * WIDTH, 512).eval() for _ in self.caches]
        made = made if made[0].sharing_modes[0] == "layer" else made[:1] * len(made)
        backend, tables, fixed = choose_backend("auto"), {}, made[0].rotates and made[0].fixed_rotation

        def step() -> None:
            tokens = self.caches[0][0].shape[2] + 1
            positions, padding = positions_from_padding(
                torch.zeros(1, tokens, dtype=torch.bool), 1, made[0].length_dependent
            )
            plans: dict[int, Any] = {}
            for layer, (encoding, (q, k, v)) in enumerate(zip(made, self.qkv, strict=True)):
                if id(encoding) not in plans:
                    plans[id(encoding)] = build_plan(
                        encoding, positions, padding, backend, keys_rotated=fixed, bias_cache=tables
                    )
                plan = plans[id(encoding)]
                run_attention(q, *self.grow(layer, rotate_keys(k, plan) if fixed else k, v), plan)

        return step


def attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for keys in args.keys:
        for spec in tqdm(args.rpe, desc=f"{keys} keys"):
            ways = {"none": Stack(keys, args.layers).plain, spec: Stack(keys, args.layers).encoded(spec)}
            took = time_interleaved(ways, args.repeats)
            row = {"part": "attention", "tokens": keys, "what": spec, "ms": f"{1000 * took[spec]:.3f}"}
            rows.append({**row, "of_none": f"{took[spec] / took['none']:.2f}", "tokens_per_s": ""})
            tqdm.write(str(rows[-1]))
    return rows


class Fairseq:
    """A language model of fairseq or of this project that generates tokens."""

    def __init__(self, spec: str | None, args: argparse.Namespace) -> None:
        from fairseq.data import Dictionary
        from fairseq.models import ARCH_CONFIG_REGISTRY
        from fairseq.models.transformer_lm import TransformerLanguageModel
        from fairseq.tasks.language_modeling import LanguageModelingTask

        import fairseq_rpe.models  # noqa: F401  (registers)
        from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

        dictionary = Dictionary()
        for i in range(VOCABULARY - len(dictionary)):
            dictionary.add_symbol(f"w{i}")
        longest = args.prompt + args.tokens + 8
        given = {"decoder_layers": args.layers, "decoder_embed_dim": HEADS * WIDTH, "decoder_attention_heads": HEADS}
        given |= {"decoder_ffn_embed_dim": 4 * HEADS * WIDTH, "tokens_per_sample": longest, "dropout": 0.0}
        given |= {"max_target_positions": longest, "decoder_normalize_before": True}
        given |= {"share_decoder_input_output_embed": True}
        chosen = Namespace(**given, rpe=spec or "sinusoidal")
        ARCH_CONFIG_REGISTRY["transformer_rpe_lm_tiny"](chosen)
        task = LanguageModelingTask(Namespace(add_bos_token=False), dictionary)
        kind = TransformerLanguageModel if spec is None else TransformerRPELanguageModel
        self.decoder = kind.build_model(chosen, task).eval().decoder
        self.state: dict[str, Any] = {}
        self.rows = torch.randint(4, VOCABULARY, (1, args.prompt))
        if spec is None:
            self._fill()
        else:
            self.decoder(self.rows[:, :-1], incremental_state=self.state, features_only=True)

    def _fill(self) -> None:
        """Fill the cache from a pass without one, because fairseq reads one token per call with a cache."""

        def keep(module: Any, args: Any, given: dict[str, Any]) -> None:
            x = given["query"]
            k, v = (
                project(x).unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3)
                for project in (module.k_proj, module.v_proj)
            )
            module._set_input_buffer(self.state, {"prev_key": k, "prev_value": v, "prev_key_padding_mask": None})

        hooks = [x.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for x in self.decoder.layers]
        self.decoder(self.rows[:, :-1], features_only=True)
        for hook in hooks:
            hook.remove()

    def step(self) -> None:
        features = self.decoder(self.rows, incremental_state=self.state, features_only=True)[0]
        best = self.decoder.output_layer(features[:, -1]).argmax(-1, keepdim=True)
        self.rows = torch.cat([self.rows, best], dim=1)


class Transformers:
    """GPT-NeoX or BLOOM of transformers that generates tokens."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from fairseq_rpe.adapters import _require_transformers  # noqa: F401

        # isort: split
        import transformers as hf

        width, longest = HEADS * WIDTH, args.prompt + args.tokens + 8
        if name == "gpt_neox":
            config = hf.GPTNeoXConfig(
                vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=args.layers, num_attention_heads=HEADS,
                intermediate_size=4 * width, max_position_embeddings=longest, rotary_pct=1.0,
                use_parallel_residual=False, tie_word_embeddings=True,
            )  # fmt: skip
            self.model = hf.GPTNeoXForCausalLM(config).eval()
        else:
            config = hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=width, n_layer=args.layers, n_head=HEADS)
            self.model = hf.BloomForCausalLM(config).eval()
        self.cache = hf.DynamicCache(config=config)
        prompt = torch.randint(4, VOCABULARY, (1, args.prompt))
        self.model(prompt[:, :-1], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.next = prompt[:, -1:]

    def step(self) -> None:
        logits = self.model(self.next, past_key_values=self.cache, use_cache=True).logits
        self.next = logits[:, -1].argmax(-1, keepdim=True)


def generate(args: argparse.Namespace) -> list[dict[str, Any]]:
    sides: dict[str, Any] = {f"here, {spec}": Fairseq(spec, args) for spec in args.models}
    for name, label in OTHERS.items():
        if name not in args.others:
            continue
        if name != "fairseq" and not importlib.util.find_spec("transformers"):
            print(f"left out, {label}: the package transformers is not installed", flush=True)
            continue
        sides[label] = Fairseq(None, args) if name == "fairseq" else Transformers(name, args)
    times: dict[str, list[float]] = {name: [] for name in sides}
    turns = max(1, args.tokens // args.turn)
    for _ in tqdm(range(turns), desc="generate"):
        for name, side in sides.items():
            start = time.perf_counter()
            for _ in range(args.turn):
                side.step()
            times[name].append((time.perf_counter() - start) / args.turn)
    rows = []
    for name, values in times.items():
        took = statistics.median(values)
        row = {"part": "generate", "tokens": f"{args.prompt}+{turns * args.turn}", "what": name}
        rows.append({**row, "ms": f"{1000 * took:.3f}", "of_none": "", "tokens_per_s": f"{1 / took:.1f}"})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("attention", "generate"), default=["attention", "generate"])
    parser.add_argument("--keys", type=int, nargs="+", default=[512, 4096], help="cached tokens (%(default)s)")
    parser.add_argument("--rpe", nargs="+", default=SPECS, help="encodings of the part attention (%(default)s)")
    parser.add_argument("--models", nargs="+", default=MODELS, help="encodings of the part generate (%(default)s)")
    parser.add_argument(
        "--others", nargs="*", choices=tuple(OTHERS), default=list(OTHERS), help="other models to compare with"
    )
    parser.add_argument("--prompt", type=int, default=3072, help="prompt tokens before the timed ones (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="generated tokens (%(default)s)")
    parser.add_argument("--turn", type=int, default=32, help="tokens that a model generates per turn (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="%(default)s")
    parser.add_argument("--repeats", type=int, default=31, help="timed steps of attention (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="%(default)s")
    parser.add_argument("--csv", type=Path, help="CSV file of the measurements")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    head = f"{machine.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
    head += f"{args.threads} threads, {args.layers} layers of {HEADS} heads of {WIDTH}, float32, medians"
    print(head, flush=True)
    with torch.no_grad():
        rows = [row for part in args.only for row in {"attention": attention, "generate": generate}[part](args)]
    if args.csv:
        machine.write_csv(args.csv, head, rows)
        print(f"wrote {args.csv}")


if __name__ == "__main__":
    main()

"""Decoding with a KV cache: seconds per attention step by encoding, and tokens per second of whole models.

    python benchmarks/decode.py                      # both parts; minutes on two cores
    python benchmarks/decode.py --only attention --rpe alibi rope
    python benchmarks/decode.py --only generate --prompt 300 --tokens 100 --layers 2
    git worktree add ../before TAG
    PYTHONPATH=../before python benchmarks/decode.py --only generate --csv before.csv    # another checkout's package

- attention times one more token in each of --layers layers of 8 heads of 64 with --keys cached keys and values.
  ``none`` is torch's attention without a bias, with the same cache. Each encoding is timed in rotation with ``none``,
  and the ratio is that of the medians. Positions, plans and biases that layers share are computed once for all of them,
  as in a model.
- generate times greedy decoding of --tokens tokens after a prompt of --prompt tokens, which is not timed. The models
  have one size and random weights: transformer_rpe_lm with each encoding of --models, stock fairseq's transformer_lm
  (sinusoidal), and GPT-NeoX (rope) and BLOOM (ALiBi) of the package transformers, if it is installed, called without
  its generate(). Models are timed in rotation, --turn tokens at a time, and the median is reported.

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
WARM_UP_ROUNDS = 2
Step = Callable[[], object]


def time_interleaved(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Return median seconds of each step, timed in rotation after two warm-up rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + WARM_UP_ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number >= WARM_UP_ROUNDS:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class CachedAttention:
    """Attention of several layers with m cached tokens; every step decodes one more token.

    Args:
        keys: number of cached tokens before the first step.
        layers: number of layers.
    """

    def __init__(self, keys: int, layers: int) -> None:
        # keys and values of each layer, (1, H, m, D) each, and the buffers that they are views of
        self.caches = [torch.randn(2, 1, HEADS, keys, WIDTH).unbind(0) for _ in range(layers)]
        self.buffers: list[tuple[Any, Any]] = [(None, None)] * layers
        self.qkv = torch.randn(layers, 3, 1, HEADS, 1, WIDTH)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a token's key and value to the cache of a layer, and return all of its keys and values."""
        from fairseq_rpe.attention.kv_cache import append_tokens

        (old_k, old_v), (k_buffer, v_buffer) = self.caches[layer], self.buffers[layer]
        k, k_buffer = append_tokens(k_buffer, old_k, k)
        v, v_buffer = append_tokens(v_buffer, old_v, v)
        self.caches[layer], self.buffers[layer] = (k, v), (k_buffer, v_buffer)
        return k, v

    def plain_step(self) -> None:
        """Decode a token without an encoding."""
        for layer, (q, k, v) in enumerate(self.qkv):
            F.scaled_dot_product_attention(q, *self.append(layer, k, v))

    def make_step(self, spec: str) -> Step:
        """Return a step that builds plans as the decoder does, with one encoding per layer if that is the default."""
        from fairseq_rpe.attention import choose_backend
        from fairseq_rpe.attention.forward import build_plan, positions_from_padding, rotate_keys, run_attention
        from fairseq_rpe.encodings import build

        encodings = [build(spec, HEADS, HEADS * WIDTH, 512).eval() for _ in self.caches]
        first = encodings[0]
        if first.sharing_modes[0] != "layer":
            encodings = [first] * len(encodings)
        backend, bias_cache = choose_backend("auto"), {}
        caches_rotated = first.rotates and first.fixed_rotation

        def step() -> None:
            tokens = self.caches[0][0].shape[2] + 1
            no_padding = torch.zeros(1, tokens, dtype=torch.bool)
            positions, padding = positions_from_padding(no_padding, 1, first.length_dependent)
            plans: dict[int, Any] = {}  # by id of the encoding, as layers that share it share its plan
            for layer, (encoding, (q, k, v)) in enumerate(zip(encodings, self.qkv, strict=True)):
                if id(encoding) not in plans:
                    plans[id(encoding)] = build_plan(
                        encoding, positions, padding, backend, keys_rotated=caches_rotated, bias_cache=bias_cache
                    )
                plan = plans[id(encoding)]
                k = rotate_keys(k, plan) if caches_rotated else k
                run_attention(q, *self.append(layer, k, v), plan)

        return step


def time_attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time an attention step with each encoding, and return the rows."""
    rows = []
    for keys in args.keys:
        for spec in tqdm(args.rpe, desc=f"{keys} keys"):
            plain, encoded = CachedAttention(keys, args.layers), CachedAttention(keys, args.layers)
            seconds = time_interleaved({"none": plain.plain_step, spec: encoded.make_step(spec)}, args.repeats)
            row = {"part": "attention", "tokens": keys, "what": spec, "ms": f"{1000 * seconds[spec]:.3f}"}
            rows.append({**row, "of_none": f"{seconds[spec] / seconds['none']:.2f}", "tokens_per_s": ""})
            tqdm.write(str(rows[-1]))
    return rows


class Fairseq:
    """A language model of fairseq or of this project that generates tokens.

    Args:
        spec: encoding of this project's model; None for fairseq's own model.
        args: sizes of the model and of the prompt.
    """

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
        model_args = Namespace(
            decoder_layers=args.layers,
            decoder_embed_dim=HEADS * WIDTH,
            decoder_attention_heads=HEADS,
            decoder_ffn_embed_dim=4 * HEADS * WIDTH,
            tokens_per_sample=longest,
            dropout=0.0,
            max_target_positions=longest,
            decoder_normalize_before=True,
            share_decoder_input_output_embed=True,
            rpe=spec or "sinusoidal",
        )
        ARCH_CONFIG_REGISTRY["transformer_rpe_lm_tiny"](model_args)
        task = LanguageModelingTask(Namespace(add_bos_token=False), dictionary)
        model_class = TransformerLanguageModel if spec is None else TransformerRPELanguageModel
        self.decoder = model_class.build_model(model_args, task).eval().decoder
        self.state: dict[str, Any] = {}
        self.rows = torch.randint(4, VOCABULARY, (1, args.prompt))
        if spec is None:
            self._fill_cache()
        else:
            self.decoder(self.rows[:, :-1], incremental_state=self.state, features_only=True)

    def _fill_cache(self) -> None:
        """Fill the cache from a pass without one, because fairseq reads one token per call with a cache."""

        def store_keys_and_values(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            x = kwargs["query"]  # (n, 1, C)
            k, v = (
                project(x).unflatten(2, (HEADS, WIDTH)).permute(1, 2, 0, 3)  # (1, H, n, D)
                for project in (module.k_proj, module.v_proj)
            )
            module._set_input_buffer(self.state, {"prev_key": k, "prev_value": v, "prev_key_padding_mask": None})

        attentions = [layer.self_attn for layer in self.decoder.layers]
        hooks = [x.register_forward_pre_hook(store_keys_and_values, with_kwargs=True) for x in attentions]
        self.decoder(self.rows[:, :-1], features_only=True)
        for hook in hooks:
            hook.remove()

    def step(self) -> None:
        """Generate one token."""
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
        """Generate one token."""
        logits = self.model(self.next, past_key_values=self.cache, use_cache=True).logits
        self.next = logits[:, -1].argmax(-1, keepdim=True)


def time_generation(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the generation of tokens by each model, and return the rows."""
    models: dict[str, Any] = {f"here, {spec}": Fairseq(spec, args) for spec in args.models}
    for name, label in OTHERS.items():
        if name not in args.others:
            continue
        if name != "fairseq" and not importlib.util.find_spec("transformers"):
            print(f"left out, {label}: the package transformers is not installed", flush=True)
            continue
        models[label] = Fairseq(None, args) if name == "fairseq" else Transformers(name, args)
    times: dict[str, list[float]] = {name: [] for name in models}
    rounds = max(1, args.tokens // args.turn)
    for _ in tqdm(range(rounds), desc="generate"):
        for name, model in models.items():
            start = time.perf_counter()
            for _ in range(args.turn):
                model.step()
            times[name].append((time.perf_counter() - start) / args.turn)
    rows = []
    for name, values in times.items():
        seconds = statistics.median(values)  # of a token
        row = {"part": "generate", "tokens": f"{args.prompt}+{rounds * args.turn}", "what": name}
        rows.append({**row, "ms": f"{1000 * seconds:.3f}", "of_none": "", "tokens_per_s": f"{1 / seconds:.1f}"})
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
    parser.add_argument("--turn", type=int, default=32, help="tokens that a model generates per round (%(default)s)")
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
        rows = [
            row for part in args.only for row in {"attention": time_attention, "generate": time_generation}[part](args)
        ]
    if args.csv:
        machine.write_csv(args.csv, head, rows)
        print(f"wrote {args.csv}")


if __name__ == "__main__":
    main()

"""Training steps and decoding of the blocks of this project, compared with Llama of the package transformers.

    python benchmarks/blocks.py                            # both parts; minutes on two cores
    python benchmarks/blocks.py --part train --width 768 --layers 12 --heads 12 --tokens 512
    python benchmarks/blocks.py --part decode --device cuda

Four models of one size with rope take turns in one process, with the same threads and the same tokens: the blocks
``classic`` and ``llama`` of this project, the latter also with --kv-heads key/value heads, and LlamaForCausalLM of
transformers with its default attention. The feed-forward layers of classic are 4 times as wide as the model, and those
of the others 8/3 times, so that the parameters are about as many. Llama of transformers has the weights of ``llama``
here, and the script stops if their first losses differ.

- train times a forward and a backward pass, the update of AdamW and the loss, which all models compute from all logits
  with torch's cross_entropy. ``fairseq-rpe train`` computes the same loss with less memory.
- decode times greedy decoding with a KV cache, one token per pass, after a prompt of --prompt tokens, which is not
  timed.

A line shows the median of a step or of a token, and its ratio to transformers. Nothing is written without --csv.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_rpe.adapters import _require_transformers  # noqa: F401

# isort: split
import machine
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from fairseq_rpe.adapters.model_blocks import weight_map
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.config import BLOCK_PRESETS, DecoderConfig, gated_ffn_width
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms

PAD, BASELINE = 1, "transformers, Llama"
WARM_UP_ROUNDS = 2
LOSS_TOLERANCE = 1e-4  # of the first losses in nats per token
Call = Callable[[], object]


def build_decoder(preset: str, kv_heads: int, args: argparse.Namespace) -> Decoder:
    """Return a decoder with the blocks of a preset and random weights."""
    ffn_width = gated_ffn_width(args.width) if preset == "llama" else 4 * args.width
    config = DecoderConfig(
        vocabulary=args.vocabulary,
        padding_idx=PAD,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        kv_heads=kv_heads,
        ffn_width=ffn_width,
        **BLOCK_PRESETS[preset],
    )
    encodings = build_for_model("rope", args.heads, args.width, args.layers, args.tokens)
    return Decoder(config, encodings, PositionTransforms("identity", "", args.tokens, 1, 0))


def build_llama(decoder: Decoder, args: argparse.Namespace) -> nn.Module:
    """Return Llama of transformers with the weights of a decoder."""
    config = transformers.LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=decoder.config.ffn_width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.prompt + args.decoded + args.tokens,
        rms_norm_eps=decoder.config.norm_eps,
        pad_token_id=PAD,
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weight_map(config).to_theirs(dict(decoder.named_parameters())))
    return model


def build_models(args: argparse.Namespace) -> dict[str, nn.Module]:
    """Return the models by name."""
    torch.manual_seed(0)
    llama = build_decoder("llama", args.heads, args)
    models = {
        "classic": build_decoder("classic", args.heads, args),
        "llama": llama,
        f"llama, {args.kv_heads} key/value heads": build_decoder("llama", args.kv_heads, args),
        BASELINE: build_llama(llama, args),
    }
    return {name: model.to(args.device) for name, model in models.items()}


def compute_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (B, n, V) of all tokens (B, n)."""
    logits: Tensor = model(tokens) if isinstance(model, Decoder) else model(tokens, use_cache=False).logits
    return logits


def make_training_step(model: nn.Module, args: argparse.Namespace) -> Callable[[], float]:
    """Return a function that runs one training step and returns its loss in nats per token."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        rows = torch.randint(4, args.vocabulary, (args.batch, args.tokens + 1), generator=generator).to(args.device)
        loss = F.cross_entropy(compute_logits(model, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class Generator:
    """Greedy decoding of one row with a model's own KV cache.

    Args:
        model: decoder, or a model of transformers.
        args: number of prompt tokens.
    """

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model.eval()
        prompt = torch.randint(4, args.vocabulary, (1, args.prompt), generator=torch.Generator().manual_seed(1))
        self.rows = prompt.to(args.device)
        if isinstance(model, Decoder):
            self.cache: Any = DecoderCache()
            model.features(self.rows[:, :-1], self.cache)
        else:
            self.cache = transformers.DynamicCache(config=model.config)
            model(self.rows[:, :-1], past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def step(self) -> None:
        """Generate one token."""
        if isinstance(self.model, Decoder):
            logits = self.model(self.rows, self.cache)
        else:
            logits = self.model(self.rows[:, -1:], past_key_values=self.cache, use_cache=True).logits
        self.rows = torch.cat([self.rows, logits[:, -1].argmax(-1, keepdim=True)], dim=1)


def time_interleaved(calls: dict[str, Call], rounds: int, device: str) -> dict[str, float]:
    """Return median seconds of each call; the calls take turns, after two rounds that are not timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in tqdm(range(rounds + WARM_UP_ROUNDS)):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= WARM_UP_ROUNDS:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def check_losses(models: dict[str, nn.Module], args: argparse.Namespace) -> None:
    """Stop the script if ``llama`` and Llama of transformers compute different losses."""
    rows = torch.randint(4, args.vocabulary, (1, args.tokens), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        losses = [
            F.cross_entropy(compute_logits(models[name].eval(), rows.to(args.device))[0, :-1].cpu(), rows[0, 1:])
            for name in ("llama", BASELINE)
        ]
    if abs(losses[0] - losses[1]) > LOSS_TOLERANCE:
        raise SystemExit(f"the losses of llama and of {BASELINE} differ: {losses[0]:.6f} and {losses[1]:.6f}")


def time_training(models: dict[str, nn.Module], args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a training step of each model."""
    steps = {name: make_training_step(model, args) for name, model in models.items()}
    return time_interleaved(steps, args.repeats, args.device)


def time_decoding(models: dict[str, nn.Module], args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a generated token of each model."""
    with torch.no_grad():
        generators = {name: Generator(model, args) for name, model in models.items()}

        def make_turn(generator: Generator) -> Call:
            return lambda: [generator.step() for _ in range(args.turn)]

        turns = {name: make_turn(generator) for name, generator in generators.items()}
        rounds = max(1, args.decoded // args.turn - WARM_UP_ROUNDS)
        seconds = time_interleaved(turns, rounds, args.device)
    return {name: value / args.turn for name, value in seconds.items()}


PARTS = {"train": time_training, "decode": time_decoding}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--layers", type=int, default=6, help="%(default)s")
    parser.add_argument("--width", type=int, default=512, help="model width C (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="%(default)s")
    parser.add_argument("--kv-heads", type=int, default=2, help="of the third model (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row in training (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows of a training step (%(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="timed training steps (%(default)s)")
    parser.add_argument("--prompt", type=int, default=1024, help="prompt tokens before the timed ones (%(default)s)")
    parser.add_argument("--decoded", type=int, default=512, help="generated tokens (%(default)s)")
    parser.add_argument("--turn", type=int, default=16, help="tokens that a model generates per round (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="%(default)s")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--csv", type=Path, help="CSV file of the measurements")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    processor = torch.cuda.get_device_name() if args.device == "cuda" else machine.processor()
    head = f"{processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
    head += f"transformers {transformers.__version__}, {args.threads} threads, {args.layers} layers of {args.heads} "
    head += f"heads, width {args.width}, vocabulary {args.vocabulary}, float32, medians"
    print(head, flush=True)
    models = build_models(args)
    check_losses(models, args)
    sizes = {"train": f"{args.batch} x {args.tokens}", "decode": f"{args.prompt} + {args.decoded}"}
    rows = []
    for part in args.part:
        seconds = PARTS[part](models, args)
        for name, value in seconds.items():
            parameters = sum(parameter.numel() for parameter in models[name].parameters())
            row = {"part": part, "tokens": sizes[part], "model": name, "parameters": parameters}
            rows.append({**row, "ms": f"{1000 * value:.3f}", "of_transformers": f"{value / seconds[BASELINE]:.3f}"})
            print(rows[-1], flush=True)
    if args.csv:
        machine.write_csv(args.csv, head, rows)
        print(f"wrote {args.csv}")


if __name__ == "__main__":
    main()

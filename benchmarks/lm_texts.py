"""How many texts of mlx-lm's models differ with and without drafts at temperature 0.

    python benchmarks/lm_texts.py            # pip install mlx-lm; some minutes on two cores
    python benchmarks/lm_texts.py --memory   # of reading a prompt of 10,000 tokens
    python benchmarks/lm_texts.py --rows     # of a pass that have the bits of a pass over one

As divergence.py for T5s: random weights, and a head whose rows come in pairs that differ by about
the rounding error, so that near ties abound. Prompts have 2 to 400 tokens, texts 20; every prompt
draws its own draft length from 1 to 24. "as loaded" is what lm.load makes of a model on this
machine's device, "mlx.nn" the README's adapter over plain layers. 4-bit: all matrices but the head.
"""

from start import command

# isort: split
import argparse
import sys
import time

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from divergence import MAX_TOKENS, VOCAB, head_line, measure, report
from mlx.utils import tree_map

import cpu

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
}
KINDS = "llama", "qwen3", "gemma3_text"


def make_model(kind, bits=None):
    """A random model with nearly tied logits."""
    from mlx_lm.models import gemma3_text, llama, qwen3

    module = {"llama": llama, "qwen3": qwen3, "gemma3_text": gemma3_text}[kind]
    model = module.Model(module.ModelArgs.from_dict({"model_type": kind, **SIZES}))
    mx.random.seed(0)

    def random(old):
        return mx.random.normal(old.shape) * old.shape[-1] ** -0.5 if old.ndim > 1 else old

    model.update(tree_map(random, model.parameters()))
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens
    rows = head.weight[: VOCAB // 2]
    twins = rows * (1 + 2e-7 * mx.random.normal(rows.shape))
    head.weight = mx.stack([rows, twins], axis=1).reshape(VOCAB, -1)
    if bits:
        chosen = [m for m in model.modules() if type(m) is nn.Linear and m is not head]
        nn.quantize(model, 32, bits, class_predicate=lambda _, m: any(m is one for one in chosen))
    mx.eval(model.parameters())
    return model


def adapt(model, layers):
    import lm

    if layers == "as loaded":
        cpu.prepare(model, lambda _, module: "weight" in module)
        return lm.Rereader(model)
    cpu.load_blas()
    return lm.Adapter(model)


def measure_memory():
    """Prints the peak of MLX's memory while a Llama reads a prompt in pieces of several sizes."""
    import lm

    prompt = mx.random.randint(3, VOCAB, (10_000,), key=mx.random.key(0))
    print("| tokens at a time | peak, MB |\n|---|---|")
    for piece in lm.PIECE, 2048, prompt.size:
        target, lm.PIECE = adapt(make_model("llama"), "as loaded"), piece
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        target.start(prompt)
        print(f"| {piece:,} | {(mx.get_peak_memory() - before) / 1e6:,.0f} |", flush=True)


def measure_rows():
    """Prints how many rows of a wide pass have the bits that they have alone."""
    print("| size of a head | tokens before | in a pass over 8 | over 25 |\n|---|---|---|---|")
    for size in 32, 128:
        SIZES["head_dim"] = size
        target = adapt(make_model("qwen3"), "as loaded")
        for before in 100, 200, 300, 500, 700, 900, 1500:
            tokens = mx.random.randint(3, VOCAB, (before + 25,), key=mx.random.key(before))
            cells = []
            for width in 8, 25:
                cache, _ = target.start(tokens[: before + 1])
                whole = target.decode(tokens[before : before + width], cache)
                cache, _ = target.start(tokens[: before + 1])
                rows = [target.decode(tokens[before + i, None], cache)[0] for i in range(width)]
                same = sum(mx.array_equal(a, b).item() for a, b in zip(rows, whole, strict=True))
                cells.append(f"{same} of {width}")
            print(f"| {size} | {before:,} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Texts that differ with and without drafts.")
    parser.add_argument("--prompts", type=command.between(1), default=100, help="How many (100).")
    parser.add_argument("--memory", action="store_true", help="Of reading a long prompt.")
    parser.add_argument("--rows", action="store_true", help="Rows that keep their bits.")
    options = command.parse(parser)
    if options.rows:
        measure_rows()
        return
    if options.memory:
        measure_memory()
        return
    count = options.prompts
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, rng.integers(2, 401)).tolist() for _ in range(count)]
    head_line()
    for kind in KINDS:
        for precision, bits in ("float32", None), ("4-bit", 4):
            for layers in "mlx.nn", "as loaded":
                began, target = time.time(), adapt(make_model(kind, bits), layers)
                target.vocab_size = VOCAB
                found = measure(target, None, prompts, None, MAX_TOKENS)
                report(f"{kind}, {precision}, {layers}", found, count, time.time() - began)


if __name__ == "__main__":
    sys.exit(command.run("lm_texts.py", main))

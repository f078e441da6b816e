"""How many texts of mlx-lm models differ with and without drafts at temperature 0, by precision.

    python benchmarks/lm.py   # pip install mlx-lm; some minutes on two cores

As divergence.py for T5s: random weights, and a head whose rows come in pairs that differ by about
the rounding error, so that near ties abound. Prompts have 2 to 400 tokens, texts 20; every prompt
draws its own draft length from 1 to 24. "as loaded" is what lm.load makes of a checkpoint on this
machine's device; "mlx.nn" has the plain layers. 4-bit: all matrices but the head.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from divergence import MAX_TOKENS, VOCAB, head_line, measure, report  # noqa: E402
from mlx.utils import tree_map  # noqa: E402
from mlx_lm.models import gemma3_text, llama, qwen3  # noqa: E402

import cpu  # noqa: E402
import lm  # noqa: E402

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
KINDS = {"llama": llama, "qwen3": qwen3, "gemma3_text": gemma3_text}


def make_model(kind, bits):
    """A random model with nearly tied logits."""
    module = KINDS[kind]
    model = module.Model(module.ModelArgs.from_dict({"model_type": kind, **SIZES}))
    mx.random.seed(0)
    model.update(
        tree_map(
            lambda p: mx.random.normal(p.shape) * p.shape[-1] ** -0.5 if p.ndim > 1 else p,
            model.parameters(),
        )
    )
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens
    rows = head.weight[: VOCAB // 2]
    twins = rows * (1 + 2e-7 * mx.random.normal(rows.shape))
    head.weight = mx.stack([rows, twins], axis=1).reshape(VOCAB, -1)
    if bits:
        nn.quantize(
            model, 32, bits, class_predicate=lambda _, m: type(m) is nn.Linear and m is not head
        )
    mx.eval(model.parameters())
    return model


def main():
    parser = argparse.ArgumentParser(description="Texts that differ with and without drafts.")
    parser.add_argument("--prompts", type=int, default=500, help="How many (500).")
    n = parser.parse_args().prompts
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, rng.integers(2, 401)).tolist() for _ in range(n)]
    head_line()
    for kind in KINDS:
        for precision, bits in ("float32", 0), ("4-bit", 4):
            for layers in "mlx.nn", "as loaded":
                began, model = time.time(), make_model(kind, bits)
                if layers == "as loaded":
                    cpu.prepare(model, lambda _, module: "weight" in module)
                else:
                    cpu.load_blas()
                target = (lm.Rereader if layers == "as loaded" else lm.Adapter)(model)
                target.vocab_size = VOCAB
                found = measure(target, None, prompts, None, MAX_TOKENS)
                report(f"{kind}, {precision}, {layers}", found, n, time.time() - began)


if __name__ == "__main__":
    main()

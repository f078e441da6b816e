"""The demo model at the size of a real T5: the same function, and so the same text, more work.

No T5 has to be downloaded to measure one. Every width is padded with zeros: d_model, the heads
and their keys, d_ff. What zeros alone would change is put right:

- RMSNorm divides by the root of a mean that now runs over more features, all new ones zero. Its
  epsilon is multiplied by d_old / d_new and its weight by sqrt(d_old / d_new). The decoder's final
  norm keeps its weight where the output is scaled by d_model ** -0.5: the two factors cancel.
- New rows of the vocabulary are copies of the pad token's row, whose logit never wins (and of equal
  logits the lower id does). Zeros would win wherever all logits are negative.
- New layers come last, because the first holds the relative position bias. They are copies of the
  last one whose output projections are zero, so that they do their work and add nothing.

    python benchmarks/widen.py --size t5-base --out /tmp/t5-base
"""

from start import ROOT, command

# isort: split
import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

DEMO = ROOT / "demo" / "t5-demo"
NAMES = ("d_model", "num_heads", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "vocab_size")
SIZES = {
    "t5-small": (512, 8, 64, 2048, 6, 6, 32128),
    "t5-base": (768, 12, 64, 3072, 12, 12, 32128),
    "t5-large": (1024, 16, 64, 4096, 24, 24, 32128),
    "flan-t5-base": (768, 12, 64, 2048, 12, 12, 32128),
}
SIZES = {size: dict(zip(NAMES, numbers, strict=True)) for size, numbers in SIZES.items()}


def write(source: Path, out: Path, size: str):
    """Writes a Hugging Face checkpoint of that size, float32, with source's tokenizer, to out.

    flan-t5-base has random weights: its gated feed-forward cannot be made from the demo's.
    Raises ValueError for an unknown size, or one that is smaller than the source.
    """
    if size not in SIZES:
        raise ValueError(f"size is {size!r}: it must be one of {', '.join(SIZES)}")
    config = json.loads((source / "config.json").read_text())
    needed = *NAMES, "layer_norm_epsilon", "pad_token_id", "is_gated_act", "tie_word_embeddings"
    if missing := [name for name in needed if name not in config]:
        raise ValueError(f"{source}: config.json lacks {', '.join(missing)}")
    new = {**config, **SIZES[size], "_name_or_path": size}
    if size == "flan-t5-base":
        new |= {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
        new |= {"tie_word_embeddings": False, "scale_decoder_outputs": False}
        tensors = random_weights(new)
    else:
        smaller = [name for name in NAMES if new[name] < config[name]]
        if smaller:
            raise ValueError(f"{size} is smaller than {source} in {', '.join(smaller)}")
        if config["is_gated_act"] or not config["tie_word_embeddings"]:
            raise ValueError(f"{source} must be a T5 v1.0: not gated, its head tied")
        tensors = widen(load_file(source / "model.safetensors"), config, new)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(new, indent=2))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / file).exists():
            shutil.copy(source / file, out)


def widen(tensors, old, new):
    """Tensors of a config -> those of a wider one; new's layer_norm_epsilon is set."""
    shrink = old["d_model"] / new["d_model"]
    new["layer_norm_epsilon"] = old["layer_norm_epsilon"] * shrink
    last = {"encoder": old["num_layers"] - 1, "decoder": old["num_decoder_layers"] - 1}
    depth = {"encoder": new["num_layers"], "decoder": new["num_decoder_layers"]}
    result = {}
    for name, tensor in tensors.items():
        tensor = pad(name, tensor.astype(np.float32), old, new)
        cancels = name == "decoder.final_layer_norm.weight" and old.get(
            "scale_decoder_outputs", True
        )
        if "layer_norm" in name and not cancels:
            tensor = tensor * np.float32(shrink**0.5)
        result[name] = tensor
        stack, _, rest = name.partition(".block.")
        if rest and int(rest.split(".")[0]) == last[stack] and "relative" not in name:
            adds = re.search(r"\.(o|wo)\.weight$", name)
            for layer in range(last[stack] + 1, depth[stack]):
                copy = name.replace(f".block.{last[stack]}.", f".block.{layer}.")
                result[copy] = np.zeros_like(tensor) if adds else tensor.copy()
    return result


def pad(name, tensor, old, new):
    """One tensor with zeros (the vocabulary: with the pad token's row) up to its new shape."""
    kind = name.split(".")[-2]
    if kind in ("shared", "embed_tokens"):
        rows = np.tile(tensor[old["pad_token_id"]], (new["vocab_size"] - len(tensor), 1))
        return zeros_beyond(np.concatenate([tensor, rows]), new["vocab_size"], new["d_model"])
    if kind == "relative_attention_bias":
        return zeros_beyond(tensor, len(tensor), new["num_heads"])
    if kind in ("q", "k", "v", "o"):
        tensor = tensor.T if kind == "o" else tensor  # (heads * d_kv, d_model)
        tensor = tensor.reshape(old["num_heads"], old["d_kv"], -1)
        tensor = zeros_beyond(tensor, new["num_heads"], new["d_kv"], new["d_model"])
        tensor = tensor.reshape(-1, new["d_model"])
        return np.ascontiguousarray(tensor.T) if kind == "o" else tensor
    if kind in ("wi", "wo"):
        shape = new["d_ff"], new["d_model"]
        return zeros_beyond(tensor, *(shape if kind == "wi" else shape[::-1]))
    return zeros_beyond(tensor, new["d_model"])  # a norm


def zeros_beyond(tensor, *shape):
    result = np.zeros(shape, tensor.dtype)
    result[tuple(slice(n) for n in tensor.shape)] = tensor
    return result


def random_weights(config):
    """A T5 v1.1 with T5's initial scales, seed 0."""
    random = np.random.default_rng(0)
    d, ff, inner = config["d_model"], config["d_ff"], config["num_heads"] * config["d_kv"]
    vocab = config["vocab_size"]

    def matrix(rows, columns, scale):
        return random.standard_normal((rows, columns), np.float32) * np.float32(scale)

    tensors = {
        "shared.weight": matrix(vocab, d, 1.0),
        "lm_head.weight": matrix(vocab, d, d**-0.5),
    }
    for stack, depth in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
        attentions = ["SelfAttention"] + ["EncDecAttention"] * (stack == "decoder")
        for i in range(config[depth]):
            block = f"{stack}.block.{i}.layer"
            for layer, attention in enumerate(attentions):
                name = f"{block}.{layer}.{attention}"
                tensors[f"{name}.q.weight"] = matrix(inner, d, (d * config["d_kv"]) ** -0.5)
                tensors[f"{name}.k.weight"] = matrix(inner, d, d**-0.5)
                tensors[f"{name}.v.weight"] = matrix(inner, d, d**-0.5)
                tensors[f"{name}.o.weight"] = matrix(d, inner, inner**-0.5)
            name = f"{block}.{len(attentions)}.DenseReluDense"
            tensors[f"{name}.wi_0.weight"] = matrix(ff, d, d**-0.5)
            tensors[f"{name}.wi_1.weight"] = matrix(ff, d, d**-0.5)
            tensors[f"{name}.wo.weight"] = matrix(d, ff, ff**-0.5)
            for layer in range(len(attentions) + 1):
                tensors[f"{block}.{layer}.layer_norm.weight"] = np.ones(d, np.float32)
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[bias] = matrix(
            config["relative_attention_num_buckets"], config["num_heads"], d**-0.5
        )
        tensors[f"{stack}.final_layer_norm.weight"] = np.ones(d, np.float32)
    return tensors


def main():
    parser = argparse.ArgumentParser(description="Write the demo model at the size of a real T5.")
    parser.add_argument("--size", choices=SIZES, required=True, help="the T5 to be as large as")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--model", type=Path, default=DEMO, help="a T5 v1.0 (default: the demo)")
    arguments = command.parse(parser)
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists already")
    write(arguments.model, arguments.out, arguments.size)


if __name__ == "__main__":
    sys.exit(command.run("widen.py", main))

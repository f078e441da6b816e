"""How many texts differ between plain and speculative decoding at temperature 0, by precision.

    python benchmarks/divergence.py                       # ten to fifteen minutes on two cores
    python benchmarks/divergence.py --peer PYTHON         # and transformers, where PYTHON has torch
    python benchmarks/divergence.py --model demo/t5-demo  # on a checkpoint, with demo/edits.jsonl

A pass over several tokens may round differently from a pass over one, and where two logits nearly
tie, another token wins. The models here are made so that near ties abound: random weights, and a
head whose rows come in pairs that differ by about the rounding error. Every prompt draws its own
draft length from 1 to 24. The draft model knows the plain text and gets every fifth token wrong.
"any width" is this example with the plain layers of mlx.nn and passes as wide as the drafts happen
to be, as other engines have them, over a fifth of the prompts; the other rows are as it is shipped
(see cpu.prepare and T5.check_rows).
"""

from start import ROOT, command

# isort: split

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import scratch

VOCAB, MAX_TOKENS, LONGEST_DRAFT, HABIT = 512, 20, 24, 0.5
# Inner sizes: a BLAS picks its method by them. Half precision does not go through it on a CPU.
SIZES = {
    "512": dict(d_model=512, d_kv=64, num_heads=8, d_ff=512, num_layers=1, num_decoder_layers=1),
    "128": dict(d_model=128, d_kv=32, num_heads=4, d_ff=256, num_layers=1, num_decoder_layers=1),
}


def write_checkpoint(folder, size, seed):
    """A random T5 v1.1 with nearly tied logits."""
    from safetensors.numpy import save_file

    size, rng = SIZES[size], np.random.default_rng(seed)
    d, inner, ff = size["d_model"], size["d_kv"] * size["num_heads"], size["d_ff"]

    def random(rows, columns, scale):
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    tensors = {"shared.weight": random(VOCAB, d, 1.0)}
    head = random(VOCAB // 2, d, 0.05 * d**-0.5)
    habit = rng.integers(0, 16, VOCAB)  # what follows a token, as a rule: texts come to repeat
    np.add.at(head, habit, tensors["shared.weight"] * np.float32(HABIT / d))
    twin = head * (1 + 2e-7 * rng.standard_normal(head.shape))
    tensors["lm_head.weight"] = np.stack([head, twin], 1).reshape(VOCAB, d).astype(np.float32)
    for stack, depth in (("encoder", size["num_layers"]), ("decoder", size["num_decoder_layers"])):
        tensors[f"{stack}.final_layer_norm.weight"] = np.ones(d, np.float32)
        for i in range(depth):
            names = ["SelfAttention", "EncDecAttention"][: 1 + (stack == "decoder")]
            for j, name in enumerate(names):
                key = f"{stack}.block.{i}.layer.{j}."
                tensors[key + "layer_norm.weight"] = np.ones(d, np.float32)
                for part, scale in (("q", (d * size["d_kv"]) ** -0.5), ("k", d**-0.5)):
                    tensors[f"{key}{name}.{part}.weight"] = random(inner, d, scale)
                tensors[f"{key}{name}.v.weight"] = random(inner, d, d**-0.5)
                tensors[f"{key}{name}.o.weight"] = random(d, inner, inner**-0.5)
                if i == j == 0:
                    bias = f"{key}{name}.relative_attention_bias.weight"
                    tensors[bias] = random(32, size["num_heads"], 0.5)
            key = f"{stack}.block.{i}.layer.{len(names)}."
            tensors[key + "layer_norm.weight"] = np.ones(d, np.float32)
            for part in ("wi_0", "wi_1"):
                tensors[f"{key}DenseReluDense.{part}.weight"] = random(ff, d, d**-0.5)
            tensors[f"{key}DenseReluDense.wo.weight"] = random(d, ff, ff**-0.5)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = size | dict(
        model_type="t5",
        architectures=["T5ForConditionalGeneration"],
        vocab_size=VOCAB,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        relative_attention_num_buckets=32,
    )
    (folder / "config.json").write_text(json.dumps(config))
    for file in (ROOT / "tests/golden/t5-v1.1").glob("*"):
        if "token" in file.name or file.name.endswith(".model"):
            shutil.copy(file, folder)  # a checkpoint needs some tokenizer; nothing is tokenized


def make_prompts(n):
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, rng.integers(2, 24)).tolist() for _ in range(n)]


def draft_lengths(n):
    return np.random.default_rng(1).integers(1, LONGEST_DRAFT + 1, n).tolist()


class Foreteller:
    """A draft model that knows the text and gets every fifth token wrong: free, and often right."""

    def __init__(self, text, vocab, seed):
        import mlx.core as mx

        rng = np.random.default_rng(seed)
        wrong = rng.integers(0, vocab, len(text) + 1)
        text = np.where(rng.random(len(text) + 1) < 0.2, wrong, [*text, 1])
        self.logits, self.text = mx.eye(vocab), mx.array(text)
        self.start = lambda prompt: (Place(), mx.array([0], mx.uint32))

    def decode(self, tokens, cache):
        cache.offset += tokens.size
        return self.logits[self.text[cache.offset - tokens.size : cache.offset]]


class Place:
    offset = 0

    def trim(self, n):
        self.offset -= n


def measure(model, draft_model, prompts, eos, max_tokens):
    """{decoder: (texts that differ from plain decoding's, accepted, drafted)}"""
    import mlx.core as mx

    from decoder import Decoder, SpeculativeDecoder
    from prompt_lookup import PromptLookupDecoder

    plain = []
    for prompt in prompts:
        stream = Decoder(model, eos).stream(mx.array(prompt, mx.uint32), max_tokens)
        plain.append([t.id for t in stream])
    found = {}
    for name in ("prompt lookup", "draft model"):
        differ = accepted = drafted = 0
        lengths = draft_lengths(len(prompts))
        for i, (prompt, k, text) in enumerate(zip(prompts, lengths, plain, strict=True)):
            options = dict(eos_id=eos, num_draft=k, fixed_draft=True)
            decoder = PromptLookupDecoder(model, **options)
            if name == "draft model":
                drafts = draft_model or Foreteller(text, model.vocab_size, seed=i)
                decoder = SpeculativeDecoder(model, drafts, **options)
            stream = decoder.stream(mx.array(prompt, mx.uint32), max_tokens)
            differ += [t.id for t in stream] != text
            accepted, drafted = accepted + stream.stats.accepted, drafted + stream.stats.drafted
        found[name] = differ, accepted, drafted
    return found


def report(name, found, n, seconds):
    for drafter, (differ, accepted, drafted) in found.items():
        rate = f"{accepted / drafted:.0%}" if drafted else "-"
        row = [name, drafter, f"{differ} of {n}", f"{differ / n:.1%}", rate, f"{seconds:.0f} s"]
        print("| " + " | ".join(row) + " |", flush=True)


def head_line():
    print("| precision, inner size | drafts from | texts that differ | | accepted | time |")
    print("|---|---|---|---|---|---|", flush=True)


def ours(folder, draft_folder, prompts, precisions, size, eos, max_tokens):
    from unittest.mock import patch

    import cpu
    from convert import convert
    from model import WIDEST, load

    draft_model = load(draft_folder)[0] if draft_folder else None
    for precision in precisions:
        began = time.time()
        path = folder
        if precision in ("bfloat16", "float16", "8-bit", "4-bit"):
            path = folder.parent / f"{folder.name}-{precision}"
            if "bit" in precision:
                convert(folder, path, quantize=True, bits=int(precision[0]))
            else:
                convert(folder, path, dtype=precision)
        some = prompts
        if "any width" in precision:
            some = prompts[: len(prompts) // 5 or 1]
            cpu.load_blas()
            with patch("cpu.prepare"):
                model, _ = load(path)
            model.fewest, model.most = 1, WIDEST
        else:
            model, _ = load(path)
        found = measure(model, draft_model, some, eos, max_tokens)
        report(f"{precision}, {size}", found, len(some), time.time() - began)


def transformers_process(folder, dtype, prompts):
    """Runs where torch is: transformers' own plain and prompt-lookup generation."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    torch.set_grad_enabled(False)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    head = model.get_output_embeddings().weight
    assert (head[::2] - head[1::2]).abs().max() < 0.01, "this is not the checkpoint's head"
    differ = 0
    model.generation_config.eos_token_id = None
    options = dict(max_new_tokens=MAX_TOKENS, do_sample=False)
    for prompt, k in zip(prompts, draft_lengths(len(prompts)), strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        plain = model.generate(ids, attention_mask=mask, **options)
        drafted = model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=k, **options)
        differ += plain.tolist() != drafted.tolist()
    print(json.dumps(differ))


def peer(python, folder, dtype, prompts, size):
    began = time.time()
    arguments = [python, __file__, "--engine", str(folder), dtype, str(len(prompts))]
    env = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(arguments, capture_output=True, text=True, env=env)
    if result.returncode:
        print(f"transformers, {dtype}: {result.stderr.strip()[-2000:]}", file=sys.stderr)
        return
    differ = json.loads(result.stdout.splitlines()[-1])
    found = {"prompt lookup": (differ, 0, 0)}
    report(f"transformers {dtype}, {size}", found, len(prompts), time.time() - began)


def main():
    parser = argparse.ArgumentParser(description="Texts that differ with and without drafts.")
    parser.add_argument(
        "--prompts", type=command.between(1), default=2000, help="How many (default 2000)."
    )
    parser.add_argument("--peer", metavar="PYTHON", help="An interpreter that can import torch.")
    parser.add_argument("--model", type=Path, help="A checkpoint instead of random weights.")
    parser.add_argument("--draft-model", type=Path, default=ROOT / "demo/t5-demo-draft")
    parser.add_argument("--only", default="", help="Precisions that contain this, for instance 8.")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    options = command.parse(parser)
    if options.engine:
        folder, dtype, n = options.engine
        transformers_process(folder, dtype, make_prompts(int(n)))
        return
    full = ["float32, any width", "float32"]
    low = ["bfloat16", "float16", "8-bit", "4-bit"]
    with scratch() as temp:
        if options.model:
            lines = (ROOT / "demo/edits.jsonl").read_text().splitlines()[: options.prompts]
            from model import load

            tokenizer = load(options.model)[1]
            prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
            shutil.copytree(options.model, temp / "target")
            precisions = [p for p in full + low if options.only in p]
            head_line()
            ours(temp / "target", options.draft_model, prompts, precisions, "demo", 1, 100)
            return
        head_line()
        prompts = make_prompts(options.prompts)
        for size, precisions in (("512", full), ("128", full + low)):
            target = temp / size
            write_checkpoint(target, size, seed=0)
            precisions = [p for p in precisions if options.only in p]
            ours(target, None, prompts, precisions, size, None, MAX_TOKENS)
            for dtype in ("float32", "bfloat16", "float16") if options.peer else ():
                if options.only in dtype and (size == "128" or dtype == "float32"):
                    peer(options.peer, target, dtype, prompts, size)


if __name__ == "__main__":
    sys.exit(command.run("divergence.py", main))

"""Is the automatic draft length as good as the best fixed one, and does drafting never lose?

    python benchmarks/draft_length.py --size t5-base

Edits: prompt lookup on the demo model's own task, with fixed drafts of 2, 4, 8, 16 and 24 tokens
and with the automatic length; a decoder is new for each round of prompts and learns as it goes.
Nothing to gain: a target whose choices no drafter can foresee (the work of the real model, but
random tokens), with prompt lookup and with a draft model that is always wrong; and a draft model
that is always right but as slow as the target: the target itself. Speeds are relative to plain
decoding of the same prompts in the same round; rounds are interleaved, the median counts.
"""

from start import ROOT, command

# isort: split
import argparse
import json
import random
import sys

import mlx.core as mx
from common import SIZES, checkpoint, median, note

from decoder import Decoder, SpeculativeDecoder
from model import load
from prompt_lookup import PromptLookupDecoder

FIXED = (2, 4, 8, 16, 24)


class Random:
    """A model that works like another one, but whose choices depend on the position and a seed."""

    is_encoder_decoder = True

    def __init__(self, model, seed):
        self.model, self.seed, self.vocab_size = model, seed, model.vocab_size
        self.alpha = model.alpha

    def start(self, prompt):
        return self.model.start(prompt)

    def decode(self, tokens, cache):
        position = cache.offset
        logits = self.model.decode(tokens, cache)
        rows = range(position, position + tokens.size)
        chosen = [random.Random(self.seed * 10**6 + i).randrange(2, 4000) for i in rows]
        there = mx.arange(self.vocab_size)[None] == mx.array(chosen)[:, None]
        return logits * 0 + there


def seconds(decoder, prompts, max_tokens):
    """Of decoding, without the first pass, which encodes."""
    total, ids = 0.0, []
    for prompt in prompts:
        stream = decoder.stream(prompt, max_tokens)
        ids.append(next(stream).id)
        first = stream.stats.seconds
        ids += [token.id for token in stream]
        total += stream.stats.seconds - first
    return total, ids


def compare(makers, prompts, max_tokens, rounds):
    """{name: speed relative to "plain"}; every decoder must write the same tokens."""
    times = {name: [] for name in makers}
    for _ in range(rounds):
        texts = []
        for name, make in makers.items():
            took, ids = seconds(make(), prompts, max_tokens)
            times[name].append(took)
            texts.append(ids)
        if any(text != texts[0] for text in texts):
            raise RuntimeError("the texts differ")
    pairs = {name: zip(times["plain"], t, strict=True) for name, t in times.items()}
    return {name: median(plain / own for plain, own in p) for name, p in pairs.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--rounds", type=command.between(1), default=3)
    parser.add_argument("--json", action="store_true")
    args = command.parse(parser)
    with checkpoint(args.size) as folder:
        model, tokenizer = load(str(folder))
        draft, _ = load(str(ROOT / "demo" / "t5-demo-draft"))
    edits = [json.loads(line) for line in open(ROOT / "demo" / "edits.jsonl")]
    edits = [e["prompt"] for e in edits if e["up_to"] == 60][:6]
    prompts = [mx.array(tokenizer(p).input_ids, mx.uint32) for p in edits]
    makers = {"plain": lambda: Decoder(model)}
    for k in FIXED:
        makers[f"fixed {k}"] = lambda k=k: PromptLookupDecoder(model, num_draft=k, fixed_draft=True)
    makers["automatic"] = lambda: PromptLookupDecoder(model)
    note("edits")
    result = {"size": args.size, "edits": compare(makers, prompts, 200, args.rounds)}
    words = [random.Random(i).choices(range(10, 4000), k=60) for i in range(2)]
    prompts = [mx.array(w, mx.uint32) for w in words]
    target, wrong = Random(model, 1), Random(draft, 2)
    makers = {
        "plain": lambda: Decoder(target, None),
        "prompt lookup": lambda: PromptLookupDecoder(target, None),
        "draft model always wrong": lambda: SpeculativeDecoder(target, wrong, None),
        "draft model as slow as the target": lambda: SpeculativeDecoder(target, target, None),
    }
    note("nothing to gain")
    result["nothing to gain"] = compare(makers, prompts, 200, args.rounds)
    if args.json:
        print(json.dumps(result))
        return
    for part in "edits", "nothing to gain":
        for name, speed in result[part].items():
            print(f"{part}: {name:34} {speed:5.2f} x plain decoding")
    best = max(result["edits"][f"fixed {k}"] for k in FIXED)
    print(f"automatic / best fixed: {result['edits']['automatic'] / best:.3f}")


if __name__ == "__main__":
    sys.exit(command.run("draft_length.py", main))

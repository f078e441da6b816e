"""Shared noise against classic speculative sampling: how often is a draft token accepted?

    python benchmarks/acceptance.py [--temp 1]

At every position of the demo model's own edits, p is the target's distribution and q the draft
model's. Classic speculative sampling (Leviathan et al. 2023) accepts a token drawn from q with
probability min(1, p/q), that is in sum(min(p, q)) of the cases, the best that any method can do.
With shared Gumbel noise a draft token is accepted where both models' argmax(log p + g) agree; that
is measured with the decoders' own sampler.
"""

from start import ROOT, command

# isort: split
import argparse
import json
import sys

import mlx.core as mx

from decoder import Decoder, Sampler
from model import load


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--temp", type=command.between(1e-6, 1e6, float), nargs="+", default=[0.5, 1.0, 1.5]
    )
    parser.add_argument("--prompts", type=command.between(1, 400), default=60)
    args = command.parse(parser)
    model, tokenizer = load(str(ROOT / "demo" / "t5-demo"))
    draft, _ = load(str(ROOT / "demo" / "t5-demo-draft"))
    lines = open(ROOT / "demo" / "edits.jsonl").read().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    prompts = [mx.array(p, mx.uint32) for p in prompts[:: len(prompts) // args.prompts]]
    for temp in args.temp:
        classic, shared, count = 0.0, 0, 0
        for seed, prompt in enumerate(prompts):
            sampler = Sampler(temp, seed=seed)
            ids = [t.id for t in Decoder(model, temp=temp, seed=seed).stream(prompt, 100)]
            scores = []
            for m in (model, draft):  # teacher-forced over the target's own text
                cache, start = m.start(prompt)
                tokens = mx.concatenate([start, mx.array(ids[:-1], mx.uint32)])
                scores.append(sampler.scores(m.decode(tokens, cache)))
            p, q = (mx.softmax(s, axis=-1, precise=True) for s in scores)
            choices = [sampler.choose(s, 0)[0] for s in scores]
            classic += mx.sum(mx.minimum(p, q)).item()
            shared += mx.sum(choices[0] == choices[1]).item()
            count += len(ids)
        print(f"temp {temp}: classic {classic / count:.1%}, shared noise {shared / count:.1%}")


if __name__ == "__main__":
    sys.exit(command.run("acceptance.py", main))

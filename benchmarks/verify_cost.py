"""What it costs to verify k draft tokens: the time of a pass over k + 1 tokens, k = 0 … 24.

    python benchmarks/verify_cost.py --size t5-base

A pass is fitted as 1 + alpha * k single-token passes. At alpha = 1 nothing is gained by drafting,
near 0 (where reading the weights is what takes time) drafting is free. Also measured: what it costs
that a single token travels with dummy rows, so that its bits do not depend on drafts. Widths take
turns in every run; a pass ends when the host has the choice of every position, as in decoding.
"""

import argparse
import json
import random
import sys

from common import ROOT, SIZES, checkpoint, median, note, timed

PROMPT_TOKENS, WRITTEN_TOKENS, WIDTHS = 150, 64, range(1, 26)
ALONE = 0  # in place of a width: one token without dummy rows


def measure(folder, runs):
    """Median seconds of a pass over 1 … 25 tokens, and over 1 without any dummy row."""
    sys.path.insert(0, str(ROOT))
    import mlx.core as mx

    from model import load

    model, _ = load(str(folder))
    ids = random.Random(0).choices(range(2, 4000), k=PROMPT_TOKENS)
    cache, start = model.start(mx.array(ids, mx.uint32))
    mx.eval(model.decode(mx.concatenate([start, mx.array(ids[:WRITTEN_TOKENS], mx.uint32)]), cache))

    def run(width):
        if width == ALONE:
            model.widths, width = (1, widths[1]), 1
        logits = model.decode(mx.array(ids[:width], mx.uint32), cache)
        model.widths = widths
        return mx.argmax(logits, axis=-1).tolist()

    widths = model.widths
    seconds = {width: [] for width in [*WIDTHS, ALONE]}
    for turn in range(runs + 1):  # the first one warms
        for width in random.Random(turn).sample(list(seconds), len(seconds)):
            took, _ = timed(run, width)
            cache.trim(max(width, 1))
            if turn:
                seconds[width].append(took)
    medians = [median(times) for times in seconds.values()]
    return medians[:-1], medians[-1]


def fit(seconds):
    """alpha of seconds[k] = (1 + alpha * k) * seconds[0], least squares."""
    excess = [s / seconds[0] - 1 for s in seconds]
    return sum(k * e for k, e in enumerate(excess)) / sum(k * k for k in range(len(seconds)))


def main():
    parser = argparse.ArgumentParser(description="Time passes over 1 to 25 tokens.")
    parser.add_argument("--size", choices=SIZES, default="demo", help="default: demo")
    parser.add_argument("--runs", type=int, default=15, help="default: 15")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}: at least 1")
    with checkpoint(arguments.size) as folder:
        seconds, alone = measure(folder, arguments.runs)
    result = {"size": arguments.size, "seconds": seconds, "alpha": fit(seconds)}
    if arguments.json:
        print(json.dumps(result))
        return
    for k, s in enumerate(seconds):
        print(f"{k + 1:3} tokens {s * 1e3:8.2f} ms  {s / seconds[0]:5.2f}")
    print(f"alpha = {result['alpha']:.3f}")
    note("fitted: one pass over k + 1 tokens costs 1 + alpha * k single-token passes")
    print(f"exact texts cost a single token {seconds[0] / alone - 1:+.1%} (its dummy rows)")


if __name__ == "__main__":
    main()

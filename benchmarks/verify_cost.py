"""What it costs to verify k draft tokens: the time of a pass over k + 1 tokens, k = 0 … 24.

    python benchmarks/verify_cost.py --size t5-base

A pass is fitted as 1 + alpha * k single-token passes. At alpha = 1 nothing is gained by drafting,
near 0 (where reading the weights is what takes time) drafting is free. Widths take turns in every
run; a pass ends when the host has the choice of every position, as in decoding. Also printed: how
long the prompt took to encode, and the weights that a pass reads beside the memory's bandwidth in
the same run, as two threads of NumPy read it.
"""

from start import command

# isort: split
import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from common import SIZES, checkpoint, median, note, timed

PROMPT_TOKENS, WRITTEN_TOKENS, WIDTHS = 400, 64, range(1, 26)


def measure(folder, runs):
    """Medians: seconds of a pass over 1 … 25 tokens and of encoding, bytes read, bytes/second."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    from model import load

    model, _ = load(str(folder))
    ids = random.Random(0).choices(range(2, 4000), k=PROMPT_TOKENS)
    cache, start = model.start(mx.array(ids, mx.uint32))
    mx.eval(model.decode(mx.concatenate([start, mx.array(ids[:WRITTEN_TOKENS], mx.uint32)]), cache))

    def run(width):
        logits = model.decode(mx.array(ids[:width], mx.uint32), cache)
        return mx.argmax(logits, axis=-1).tolist()

    modules = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    read = [module for path, module in modules if model.is_for_few_rows(path, module)]
    weights = sum(array.nbytes for module in read for _, array in tree_flatten(module.parameters()))
    prompt, encoding, bandwidth = mx.array(ids, mx.uint32), [], []
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for turn in range(runs + 1):  # the first one warms
        for width in random.Random(turn).sample(list(seconds), len(seconds)):
            took, _ = timed(run, width)
            cache.trim(width)
            if turn:
                seconds[width].append(took)
        if turn:
            bandwidth.append(measure_bandwidth())
            encoding.append(timed(lambda: mx.eval(model.encode(prompt)))[0])
    medians = [median(times) for times in seconds.values()]
    return medians, median(encoding), weights, median(bandwidth)


def measure_bandwidth(halves=np.ones((2, 2**25), np.float32)):  # noqa: B008
    """Bytes a second at which two threads read memory."""
    with ThreadPoolExecutor(2) as pool:
        return halves.nbytes / timed(lambda: list(pool.map(np.max, halves)))[0]


def fit(seconds):
    """alpha of seconds[k] = (1 + alpha * k) * seconds[0], least squares."""
    excess = [s / seconds[0] - 1 for s in seconds]
    return sum(k * e for k, e in enumerate(excess)) / sum(k * k for k in range(len(seconds)))


def main():
    parser = argparse.ArgumentParser(description="Time passes over 1 to 25 tokens.")
    parser.add_argument("--size", choices=SIZES, default="demo", help="default: demo")
    parser.add_argument("--runs", type=command.between(1), default=15, help="default: 15")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = command.parse(parser)
    with checkpoint(arguments.size) as folder:
        seconds, encoding, weights, bandwidth = measure(folder, arguments.runs)
    result = {"size": arguments.size, "seconds": seconds, "alpha": fit(seconds)}
    result |= {"encoding": encoding, "bytes": weights, "bandwidth": bandwidth}
    if arguments.json:
        print(json.dumps(result))
        return
    for k, s in enumerate(seconds):
        print(f"{k + 1:3} tokens {s * 1e3:8.2f} ms  {s / seconds[0]:5.2f}")
    print(f"alpha = {result['alpha']:.3f}")
    note("fitted: one pass over k + 1 tokens costs 1 + alpha * k single-token passes")
    print(f"encoding {PROMPT_TOKENS} tokens: {encoding * 1e3:.1f} ms")
    speed, share = weights / seconds[0], weights / seconds[0] / bandwidth
    print(
        f"a pass reads {weights / 1e6:.1f} MB of weights; over one token at {speed / 1e9:.1f} GB/s,"
    )
    print(f"{share:.2f} of the {bandwidth / 1e9:.1f} GB/s at which two threads read memory")


if __name__ == "__main__":
    sys.exit(command.run("verify_cost.py", main))

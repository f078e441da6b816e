"""The n-gram search, `find_draft`, beside other ways to search, for contexts of up to a million.

    python benchmarks/search.py

Contexts are random ids below 5,000, the last two tokens planted once in the middle, n from 3 to 1;
arrays are made beforehand. `numpy`: a sliding window per n. `python-loop`: a list and one position
at a time. `mlx-loop`: the same on an MLX array, an evaluation per position. The loops only search
contexts of up to 16,384 tokens.

All of them use one core, and each has a process of its own that is pinned to one: MLX computes in
a thread beside Python's, and on an otherwise idle virtual machine waking a sleeping core for it
takes longer (60 µs here) than searching 16,384 tokens. In a decoding pass, of which the search is
a part, there is nothing to wake. `--no-pin` leaves placing them to the system.
"""

from start import command

# isort: split
import argparse
import json
import random
import sys
import time

from common import Engine, median, note, serve

SIZES = [512, 4096, 16384, 32768, 131072, 1_000_000]
LOOPS = 16384  # the longest context for a loop over positions
NGRAM_MAX, NGRAM_MIN, NUM_DRAFT, IDS = 3, 1, 10, 5000
ROUNDS, SECONDS = 5, 0.2  # per round: as many calls as fit, at least one


def context(size):
    ids = random.Random(size).choices(range(2, IDS), k=size)
    ids[size // 2 : size // 2 + 2] = ids[-2:]
    return ids


def use_mlx():
    import mlx.core as mx

    from prompt_lookup import find_draft

    def search(ids):
        draft = find_draft(ids, NGRAM_MAX, NGRAM_MIN, NUM_DRAFT)
        mx.eval(draft)
        return draft

    return search, lambda ids: mx.array(ids, mx.uint32)


def use_numpy():
    import numpy as np
    from numpy.lib.stride_tricks import sliding_window_view

    def search(ids):
        for n in range(NGRAM_MAX, NGRAM_MIN - 1, -1):
            matches = (sliding_window_view(ids[:-1], n) == ids[-n:]).all(axis=1)
            start = matches.argmax() + n
            if matches[start - n]:
                return ids[start : start + NUM_DRAFT]
        return ids[:0]

    return search, lambda ids: np.array(ids, np.uint32)


def loop(equal):
    def search(ids):
        size = len(ids)
        for n in range(NGRAM_MAX, NGRAM_MIN - 1, -1):
            last = ids[size - n :]
            for start in range(size - n):
                if equal(ids[start : start + n], last):
                    return ids[start + n : start + n + NUM_DRAFT]
        return ids[:0]

    return search


def use_python_loop():
    return loop(lambda a, b: a == b), list


def use_mlx_loop():
    import mlx.core as mx

    return loop(lambda a, b: mx.array_equal(a, b).item()), lambda ids: mx.array(ids, mx.uint32)


ENGINES = {
    "mlx": use_mlx,
    "numpy": use_numpy,
    "python-loop": use_python_loop,
    "mlx-loop": use_mlx_loop,
}


def serve_engine(name):
    def load():
        search, array = ENGINES[name]()
        contexts = {}

        def answer(size):
            """Median seconds of one call, and the draft."""
            if size not in contexts:
                contexts[size] = array(context(size))
                search(contexts[size])
            ids, took = contexts[size], []
            end = time.perf_counter() + SECONDS
            while not took or time.perf_counter() < end:
                began = time.perf_counter()
                draft = search(ids)
                took.append(time.perf_counter() - began)
            return median(took), [int(i) for i in draft]

        return answer

    serve(load)


def measure(rounds, pin):
    engines = [Engine(__file__, name, pin=pin) for name in ENGINES]
    took, drafts = {}, {}
    for turn in range(rounds):
        for size in SIZES:
            for engine in engines:
                if engine.name.endswith("loop") and (size > LOOPS or turn and size == LOOPS):
                    continue
                seconds, draft = engine.ask(size=size)
                took.setdefault((size, engine.name), []).append(seconds)
                if drafts.setdefault(size, draft) != draft:
                    raise RuntimeError(f"{engine.name} finds {draft}, not {drafts[size]}")
    for engine in engines:
        engine.close()
    return [
        {"tokens": size, "engine": name, "seconds": median(seconds)}
        for (size, name), seconds in took.items()
    ]


def main():
    parser = argparse.ArgumentParser(description="Time the n-gram search.")
    parser.add_argument(
        "--rounds", type=command.between(1), default=ROUNDS, help=f"default: {ROUNDS}"
    )
    parser.add_argument("--no-pin", action="store_true", help="let the system place threads")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = command.parse(parser)
    if arguments.engine:
        return serve_engine(arguments.engine)
    rows = measure(arguments.rounds, not arguments.no_pin)
    if arguments.json:
        print(json.dumps(rows))
        return
    ours = {row["tokens"]: row["seconds"] for row in rows if row["engine"] == "mlx"}
    for row in rows:
        us, ratio = row["seconds"] * 1e6, row["seconds"] / ours[row["tokens"]]
        print(f"{row['tokens']:9} tokens {row['engine']:12} {us:12.1f} µs {ratio:9.1f} x")
    note("x: times our seconds")


if __name__ == "__main__":
    sys.exit(command.run("search.py", main))

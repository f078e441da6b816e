"""When are two machines faster than one? On paper, for the passes of FLAN-T5s over one token.

    python benchmarks/machines.py
    mlx.launch -n 2 python benchmarks/machines.py --memory FOLDER

A pass reads the decoder's weights and the head from memory; divided by two ranks, each reads half
of the decoder and all of the head, and they exchange their parts three times a layer. What is sent
is counted as well: by a small model whose sums are recorded.
"""

from start import ROOT, command

# isort: split
import argparse
import sys

SIZES = {  # d_model, heads * d_kv, d_ff, layers
    "base": (768, 768, 2048, 12),
    "XL": (2048, 2048, 5120, 24),
    "XXL": (4096, 4096, 10240, 24),
}
VOCAB = 32128
LINKS = {"10 GbE": (10e9 / 8, 100e-6), "Thunderbolt 5": (80e9 / 8, 20e-6)}  # bytes/s, s a message


def count_bytes():
    """(bytes that a rank sends in a pass over one token, three sums of d_model floats a layer)"""
    import mlx.core as mx

    import model
    import ranks

    sent = []

    def record(x, group):
        sent.append(x.nbytes)
        return x

    t5, _ = model.load(str(ROOT / "demo" / "t5-demo"))
    cache, token = t5.start(mx.array([2, 3], mx.uint32))
    t5.fewest, ranks.all_sum = 1, record
    for block in t5.decoder.block:
        for sublayer in block.layer:
            sublayer.group = "two ranks"
    mx.eval(t5.decode(token, cache))
    return sum(sent), 3 * t5.config.d_model * 4 * t5.config.num_decoder_layers


def print_memory(folder):
    """Of a rank, what it holds of the model and the most that MLX held while it was loaded."""
    sys.path.insert(0, str(ROOT))
    import mlx.core as mx
    from mlx.utils import tree_flatten

    import model
    import ranks

    group = ranks.join()
    t5, _ = model.load(folder, group)
    share = sum(array.nbytes for _, array in tree_flatten(t5.parameters()))
    print(f"MB of a rank: {share / 1e6:.1f} at most {mx.get_peak_memory() / 1e6:.1f}", flush=True)
    ranks.leave(group)


def main():
    parser = argparse.ArgumentParser(description="When are two machines faster than one?")
    parser.add_argument(
        "--bandwidth",
        type=command.between(1e-3, 1e9, float),
        default=400,
        help="of memory, GB/s (400)",
    )
    parser.add_argument(
        "--bytes",
        type=command.between(1e-3, 1e3, float),
        default=2,
        help="of a weight (2: bfloat16)",
    )
    parser.add_argument("--memory", metavar="FOLDER", help="with mlx.launch: what a rank holds")
    arguments = command.parse(parser)
    if arguments.memory:
        print_memory(arguments.memory)
        return
    print(
        "sent by a rank for a token, demo model: {} bytes counted, {} computed".format(
            *count_bytes()
        )
    )
    print(f"| | sent, kB | 1 machine, ms | {' | '.join(f'2, {link}' for link in LINKS)} |")
    print("|---|---|---|" + "---|" * len(LINKS))
    for name, (d_model, inner, d_ff, layers) in SIZES.items():
        scale = arguments.bytes / arguments.bandwidth / 1e9
        decoder = layers * d_model * (6 * inner + 3 * d_ff) * scale  # seconds
        head, message = VOCAB * d_model * scale, d_model * arguments.bytes
        cells = [f"{3 * layers * message / 1e3:.0f}", f"{(decoder + head) * 1e3:.1f}"]
        for speed, latency in LINKS.values():
            seconds = decoder / 2 + head + 3 * layers * (latency + message / speed)
            cells.append(f"{seconds * 1e3:.1f} ({(decoder + head) / seconds:.2f}x)")
        print(f"| FLAN-T5 {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(command.run("machines.py", main))

"""Do rows of logits keep their bits, and texts their tokens, with the BLAS that answers here?

    python tests/machines/bits.py FOLDER ... [--every 4] [--texts FOLDER --prompts 200]

Which machine this is, the environment says (FAST_BLAS, OPENBLAS_CORETYPE, OPENBLAS_NUM_THREADS, …);
a BLAS reads it once, so that each machine is a process of its own: test_machines.py starts them.
Prints one line of JSON: which library answered, how much was compared, and all that differed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import argparse  # noqa: E402
import ctypes  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import struct  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from divergence import make_prompts, measure  # noqa: E402

from model import load  # noqa: E402

WIDEST = 32
EDGES = 64, 128, 256, 512  # positions where caches grow, or sums over keys are cut
PROMPTS = 1, 2, 3, 7, 40, 255, 256, 257, 600
LONG_PROMPT = 3000  # only where the encoder has few heads: it computes 9 million scores in each
MAX_TOKENS = 12


class Comparison:
    """Logits of one text after one prompt, fed in many ways: each row keeps its bits."""

    def __init__(self, model, prompt, tokens, report):
        self.model, self.tokens, self.report = model, tokens, report
        self.cache, _ = model.start(prompt)
        self.position = 0
        self.bits = np.zeros((tokens.size, model.vocab_size), np.uint32)
        self.known = np.zeros(tokens.size, bool)

    def feed(self, width, way):
        """One pass over the next tokens of the text."""
        place = slice(self.position, self.position + width)
        logits = np.array(self.model.decode(self.tokens[place], self.cache))
        assert np.isfinite(logits).all() and logits.std() > 0, "nothing to compare"
        rows = logits.view(np.uint32)  # so that 0 is not -0
        known = self.known[place]
        wrong = known & (rows != self.bits[place]).any(axis=1)
        self.bits[place][~known] = rows[~known]
        self.known[place] = True
        self.report["passes"] += 1
        self.report["rows"] += int(known.sum())
        if wrong.any():
            found = dict(way=way, position=self.position, width=width)
            found["rows"] = np.flatnonzero(wrong).tolist()
            self.report["differ"].append(self.report["now"] | found)
        self.position += width

    def feed_pieces(self, end, rng, way):
        """The text up to `end` in passes of all widths, in random order."""
        widths = []
        while self.position < end:
            widths = widths or rng.sample(range(1, WIDEST + 1), WIDEST)
            self.feed(min(widths.pop(), end - self.position), way)

    def back_to(self, position):
        self.cache.trim(self.position - position)
        self.position = position

    def reject(self, width):
        """Other tokens are fed and forgotten, as a draft that is wrong."""
        mx.eval(self.model.decode(self.tokens[:width] + 1, self.cache))
        self.cache.trim(width)


def random_ids(rng, n, vocab):
    return mx.array([rng.randrange(3, vocab - 1) for _ in range(n)], mx.uint32)


def compare(model, prompt_size, windows, every, rng, report):
    """Feeds one text in pieces, but from each window on one by one and in a pass of each width (of
    a fourth of them, at random, if `every` is 4); then all of it in other pieces; then at once.
    """
    prompt = random_ids(rng, prompt_size, model.vocab_size)
    tokens = random_ids(rng, windows[-1] + WIDEST, model.vocab_size)
    comparison = Comparison(model, prompt, tokens, report)
    for window in windows:
        comparison.feed_pieces(window, rng, "pieces")
        for _ in range(WIDEST // every):
            comparison.feed(1, "one by one")
        for width in rng.sample(range(1, WIDEST + 1), WIDEST // every):
            comparison.back_to(window)
            comparison.feed(width, "one pass")
        comparison.back_to(window)
        comparison.reject(rng.randint(1, WIDEST))
    comparison.feed_pieces(tokens.size, rng, "pieces")
    comparison.back_to(0)
    comparison.feed_pieces(tokens.size, rng, "other pieces")
    comparison.back_to(0)
    comparison.feed(tokens.size, "all at once")


def compare_checkpoint(folder, i, every, report):
    """A long text after one prompt, short ones after others: what is which depends on i."""
    model, _ = load(folder)
    rng = random.Random(i)
    sizes = list(PROMPTS[i % 3 :: 3])
    sizes = sizes[i // 3 % 3 :] + sizes[: i // 3 % 3]
    config = json.loads((folder / "config.json").read_text())
    if config["num_heads"] * config["num_layers"] <= 4:
        sizes.append(LONG_PROMPT)
    for size in sizes:
        windows = [0]
        if size == sizes[0]:
            # Some widths end before the edge, some just there, some behind it.
            windows += [edge - rng.randint(1, WIDEST // 2) for edge in EDGES]
        report["now"] = dict(checkpoint=folder.name, prompt=size)
        compare(model, size, windows, every, rng, report)


def compare_texts(folder, n, report):
    """Texts of a model whose logits nearly tie, with and without drafts."""
    model, _ = load(folder)
    found = measure(model, None, make_prompts(n), None, MAX_TOKENS)
    for drafter, (differ, accepted, _) in found.items():
        report["texts"][drafter] = dict(differ=differ, accepted=accepted, of=n)


def mapped():
    """(start, end, path) of every part of a file that is in this process's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *path = line.split(maxsplit=5)
        if path and access.startswith("r"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end, path[0]


def who_answers():
    """The libraries whose cblas_sgemm libmlx.so calls: it holds their functions' addresses.

    That a library is in memory says little: NumPy, too, brings an OpenBLAS along.
    """
    parts = list(mapped())
    mlx = [ctypes.string_at(a, b - a) for a, b, path in parts if path.endswith("libmlx.so")]
    libraries = {path for _, _, path in parts if any(n in path for n in ("blas", "blis", "mkl"))}
    found = {}
    for path in sorted(path for path in libraries if ".so" in path):
        library = ctypes.CDLL(path)
        for name in ("cblas_sgemm", "scipy_cblas_sgemm"):
            address = ctypes.cast(getattr(library, name, None), ctypes.c_void_p).value
            owner = [p for a, b, p in parts if address and a <= address < b]
            if owner == [path] and any(struct.pack("P", address) in part for part in mlx):
                found[path] = core(library)
    return found


def core(library):
    """The kind of processor that a BLAS takes this one for, in its own words."""
    for name in ("scipy_openblas_get_corename", "openblas_get_corename"):
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype = ctypes.c_char_p
            return function().decode()
    if hasattr(library, "bli_arch_query_id"):
        library.bli_arch_string.restype = ctypes.c_char_p
        return library.bli_arch_string(library.bli_arch_query_id()).decode()
    if hasattr(library, "mkl_get_version_string"):
        text = ctypes.create_string_buffer(200)
        library.mkl_get_version_string(text, len(text))
        return text.value.decode().strip()
    return ""


def main():
    parser = argparse.ArgumentParser(description="Compare bits and texts with this BLAS.")
    parser.add_argument("folders", type=Path, nargs="*", help="Checkpoints, in float32.")
    parser.add_argument("--every", type=int, default=1, help="One width in so many (default 1).")
    parser.add_argument("--texts", type=Path, help="A checkpoint of benchmarks/divergence.py.")
    parser.add_argument("--prompts", type=int, default=200, help="How many texts (default 200).")
    options = parser.parse_args()
    report = dict(passes=0, rows=0, differ=[], texts={})
    for i, folder in enumerate(options.folders):
        compare_checkpoint(folder, i, options.every, report)
    if options.texts:
        compare_texts(options.texts, options.prompts, report)
    print(json.dumps(report | dict(blas=who_answers())))


if __name__ == "__main__":
    main()

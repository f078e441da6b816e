"""Compare every kind of T5 with transformers on PyTorch, live, on fresh random checkpoints.

    python tests/live/compare.py [--seed 1]     # needs torch, transformers; prints a table

The checkpoints are those of tests/make_golden.py with other random weights. Compared are all
logits of a text of 300 tokens after a prompt of 150, fed at once and one by one, and the greedy
text with plain decoding, prompt lookup and a draft model (the model itself).
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import command  # noqa: E402

if __name__ == "__main__":
    command.begin(tidy=True)

import argparse  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from decoder import Decoder, SpeculativeDecoder  # noqa: E402
from model import load  # noqa: E402
from prompt_lookup import PromptLookupDecoder  # noqa: E402


def compare(name, folder, seed):
    """-> (largest difference of a logit in standard deviations, same argmax, same greedy texts)"""
    from make_golden import make, reference

    make(name, folder, seed)
    said = reference(folder, seed, 300)
    model, _ = load(folder)
    prompt, fed = mx.array(said["prompt"]), mx.array(said["fed"])
    cache, _ = model.start(prompt)
    at_once = model.decode(fed, cache)
    cache.trim(300)
    one_by_one = mx.concatenate([model.decode(fed[i : i + 1], cache) for i in range(300)])
    theirs = said["logits"]
    difference, argmax = 0.0, True
    for ours in (np.array(at_once), np.array(one_by_one)):
        difference = max(difference, np.abs(ours - theirs).max() / theirs.std())
        argmax = argmax and (ours.argmax(1) == theirs.argmax(1)).all()

    greedy = [i for i in said["greedy"].tolist() if i not in model.eos_ids]
    decoders = [
        Decoder(model, eos_id=model.eos_ids),
        PromptLookupDecoder(model, eos_id=model.eos_ids, num_draft=5, fixed_draft=True),
        SpeculativeDecoder(model, model, eos_id=model.eos_ids, num_draft=4, fixed_draft=True),
    ]
    texts = [[t.id for t in d.stream(prompt, max_tokens=24)] for d in decoders]
    return difference, argmax, all(text == greedy for text in texts)


def main():
    parser = argparse.ArgumentParser(description="Compare every kind of T5 with transformers.")
    parser.add_argument(
        "--seed", type=command.between(0), default=1, help="Of the weights and tokens (1)."
    )
    seed = command.parse(parser).seed
    try:
        from make_golden import FAMILIES
    except ImportError as error:
        raise ValueError(f"{error}: pip install torch") from None
    print("| family | largest logit difference / std | same argmax | same greedy texts |")
    print("|---|---|---|---|")
    right = True
    with command.folder(Path(tempfile.gettempdir(), f"t5-{os.urandom(4).hex()}")) as folder:
        for name in FAMILIES:
            difference, *same = compare(name, folder / name, seed)
            words = ["yes" if s else "NO" for s in same]
            print(f"| {name} | {difference:.1e} | {' | '.join(words)} |", flush=True)
            right = right and difference < 1e-4 and all(same)
    if not right:
        raise ValueError("not all families are as in transformers")


if __name__ == "__main__":
    sys.exit(command.run("compare.py", main))

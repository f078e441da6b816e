"""Every kind of T5 computes what transformers computes: golden files of tests/make_golden.py."""

import functools
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from model import load

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


@functools.cache
def family(name):
    return (*load(GOLDEN / name), np.load(GOLDEN / name / "golden.npz"))


def error(ours, theirs):
    """The largest difference, relative to the standard deviation of the reference."""
    return np.abs(np.array(ours) - theirs).max() / theirs.std()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name):
    model, _, golden = family(name)
    cache, first = model.start(mx.array(golden["prompt"]))
    assert first.dtype == mx.uint32 and first.tolist() == golden["fed"][:1].tolist()
    logits = model.decode(mx.array(golden["fed"]), cache)
    assert logits.shape == (len(golden["fed"]), model.vocab_size)
    logits = np.array(logits)[golden["rows"]]
    assert error(logits, golden["logits"]) < 1e-4
    assert (logits.argmax(1) == golden["logits"].argmax(1)).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_single_tokens_give_the_same_logits(name):
    model, _, golden = family(name)
    cache, _ = model.start(mx.array(golden["prompt"]))
    fed = mx.array(golden["fed"])
    logits = [model.decode(fed[i : i + 1], cache) for i in range(fed.size)]
    logits = np.array(mx.concatenate(logits))[golden["rows"]]
    assert error(logits, golden["logits"]) < 1e-4
    assert (logits.argmax(1) == golden["logits"].argmax(1)).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_that_of_transformers(name):
    model, _, golden = family(name)
    cache, token = model.start(mx.array(golden["prompt"]))
    written = []
    while len(written) < 24 and not (written and written[-1] in model.eos_ids):
        token = mx.argmax(model.decode(token, cache), axis=-1)
        written.append(token.item())
    assert written == golden["greedy"].tolist()

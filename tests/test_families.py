"""Every kind of T5 computes what transformers computes: golden files of tests/make_golden.py."""

import functools
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from decoder import Decoder, SpeculativeDecoder
from model import load
from prompt_lookup import PromptLookupDecoder

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
    expected = [i for i in golden["greedy"].tolist() if i not in model.eos_ids]
    for decoder in (
        Decoder(model, eos_id=model.eos_ids),
        PromptLookupDecoder(model, eos_id=model.eos_ids, num_draft=5, fixed_draft=True),
        SpeculativeDecoder(model, model, eos_id=model.eos_ids, num_draft=4, fixed_draft=True),
    ):
        stream = decoder.stream(mx.array(golden["prompt"]), max_tokens=24)
        assert [token.id for token in stream] == expected
        assert stream.stats.stop == ("eos" if len(expected) < 24 else "length")


@pytest.mark.parametrize("name", ["t5-v1.0", "mt5", "umt5", "odd-sizes"])
def test_the_code_for_other_devices(name, monkeypatch):
    """What runs on a GPU computes the same, here on the CPU."""
    monkeypatch.setattr("cpu.in_use", lambda: False)
    model, golden = load(GOLDEN / name)[0], np.load(GOLDEN / name / "golden.npz")
    fed = mx.array(golden["fed"])
    cache, _ = model.start(mx.array(golden["prompt"]))
    logits = model.decode(fed, cache)
    assert error(np.array(logits)[golden["rows"]], golden["logits"]) < 1e-4
    cache.trim(fed.size)
    pieces = [model.decode(fed[i : i + 7], cache) for i in range(0, fed.size, 7)]
    assert mx.array_equal(mx.concatenate(pieces), logits)

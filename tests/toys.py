"""Toy models with the three calls, whose bits do not depend on the width of a pass.

What the tests of the decoders drive: quick, and any difference between two texts is the decoder's.
"""

import mlx.core as mx
import numpy as np

from decoder import SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder

MOST = 4096  # positions


class Cache:
    def __init__(self, state):
        self.state = state  # (positions + 1,): the hash of every prefix, the empty one's first
        self.offset = 0

    def trim(self, n):
        assert 0 <= n <= self.offset, f"trim({n}) of {self.offset}"
        self.offset -= n


class HashModel:
    """Logits = habit * (a table of the last token) + whim * (a hash of everything before).

    Much habit makes texts that repeat themselves, so that drafts are accepted; whim makes the whole
    prefix count, so that one wrong or missing token in the cache changes what follows. Models with
    the same `table` have the same habits and with the same `seed` the same whims. `levels`
    rounds the logits, so that ties abound. `fed` are the tokens of every pass.
    """

    def __init__(self, vocab=24, habit=6.0, whim=2.0, seed=0, table=0, levels=None, encoder=True):
        rng = np.random.default_rng([table, 7])
        self.habits = mx.array(rng.random((64, vocab)) * habit, mx.float32)
        rng = np.random.default_rng([seed, 8])
        self.whims = mx.array(rng.random((512, vocab)) * whim, mx.float32)
        rng = np.random.default_rng(6)
        self.weights = mx.array(rng.integers(0, 2**31, MOST) * 2 + 1, mx.uint32)
        self.levels, self.is_encoder_decoder = levels, encoder
        self.fed, self.record = [], True

    def start(self, prompt):
        if prompt.size == 0:
            raise ValueError("nothing to start from")
        text = prompt if self.is_encoder_decoder else prompt[:-1]
        state = mx.sum((text + 1) * self.weights[MOST - text.size :], keepdims=True)
        token = mx.array([0], mx.uint32) if self.is_encoder_decoder else prompt[-1:]
        return Cache(state), token

    def decode(self, tokens, cache):
        assert tokens.dtype == mx.uint32 and tokens.ndim == 1 and tokens.size > 0
        if self.record:
            self.fed.append(tokens)
        past, end = cache.offset, cache.offset + tokens.size
        state = cache.state[past] + mx.cumsum((tokens + 1) * self.weights[past:end])
        cache.state = mx.concatenate([cache.state[: past + 1], state])
        cache.offset = end
        logits = self.habits[tokens & 63] + self.whims[(state * 0x9E3779B1) >> 23]
        if self.levels:
            logits = mx.round(logits * self.levels)
        return logits


class ScriptModel:
    """Writes a given text, whatever it is fed: the most likely token at position t is text[t].

    `vocab_size` as a T5 has it. `poison`: {position: a logit there}.
    """

    is_encoder_decoder = True

    def __init__(self, text, vocab=16, poison=None, dtype=mx.float32):
        rows = np.zeros((len(text) + 32, vocab), np.float32)
        rows[np.arange(len(text)), text] = 8
        rows[len(text) :, 2] = 8
        for position, value in (poison or {}).items():
            rows[position, 5] = value
        self.rows, self.vocab_size, self.calls = mx.array(rows, dtype), vocab, 0

    def start(self, prompt):
        return Cache(None), mx.array([0], mx.uint32)

    def decode(self, tokens, cache):
        self.calls += 1
        cache.offset += tokens.size
        return self.rows[cache.offset - tokens.size : cache.offset]


def prompts(n, vocab=24, seed=0, longest=30):
    """n random prompts, of tokens from 2 on (0 starts a text, 1 ends it)."""
    rng = np.random.default_rng([seed, 9])
    sizes = rng.integers(1, longest + 1, n)
    return [mx.array(rng.integers(2, vocab, size), mx.uint32) for size in sizes]


def drafting(model, draft_model, **options):
    yield PromptLookupDecoder(model, **options)
    yield SpeculativeDecoder(model, draft_model, **options)


def write(decoder, prompt, max_tokens=20, **options):
    """(ids, which of them were drafted, statistics)"""
    stream = decoder.stream(prompt, max_tokens, **options)
    tokens = list(stream)
    return [t.id for t in tokens], [t.drafted for t in tokens], stream.stats

"""What a checkpoint or a user asks of the logits, as the decoders' `logits_processors`.

A processor is a function of the ids that stand before a position, (T,) uint32, and of the logits
there, (1, V). The ids are those that transformers counts: of an encoder-decoder the start token and
the output, so that min_length 5 is 4 tokens of output; of a causal model prompt and output. All is
part of a pass's graph: nothing here waits for the device.
"""

import math

import mlx.core as mx


def marked(ids, logits):
    """Which of the V tokens are among the ids, (1, V); an id beyond V is none."""
    width = logits.shape[-1]
    marks = mx.zeros((1, width + 1), mx.bool_)
    marks[:, mx.minimum(ids, width)] = True
    return marks[:, :width]


def repetition_penalty(penalty):
    """What stands there is less likely: positive logits are divided, negative ones multiplied."""

    def process(ids, logits):
        punished = mx.where(logits < 0, logits * penalty, logits / penalty)
        return mx.where(marked(ids, logits), punished, logits)

    return process


def no_repeat_ngram(n):
    """No n tokens stand there twice."""

    def process(ids, logits):
        places = ids.size - n + 1
        if places < 1:
            return logits
        same = mx.ones((places,), mx.bool_)
        for i in range(n - 1):
            same = same & (ids[i : i + places] == ids[places + i])
        return mx.where(marked(mx.where(same, ids[n - 1 :], 2**32 - 1), logits), -math.inf, logits)

    return process


def sequence_bias(biases):
    """biases: [(ids, bias)]: added to the last id's logit where the ids before it stand."""
    by_length: dict = {}
    for ids, bias in biases:
        by_length.setdefault(len(ids), []).append((ids, bias))
    groups = []
    for length, pairs in by_length.items():
        table = mx.array([ids for ids, _ in pairs], mx.uint32)
        groups.append((length, table, mx.array([bias for _, bias in pairs], mx.float32)))

    def process(ids, logits):
        width = logits.shape[-1]
        for length, table, values in groups:
            if length > ids.size:
                continue
            same = mx.all(table[:, :-1] == ids[ids.size - length + 1 :], axis=1)
            bias = mx.zeros((width + 1,), mx.float32)
            bias = bias.at[mx.minimum(table[:, -1], width)].add(mx.where(same, values, 0))
            logits = logits + bias[:width].astype(logits.dtype)
        return logits

    return process


def minimum_length(length, eos_ids):
    """No end before so many ids stand there."""
    eos = mx.array(list(eos_ids), mx.uint32)

    def process(ids, logits):
        if ids.size >= length or eos.size == 0:
            return logits
        return mx.where(marked(eos, logits), -math.inf, logits)

    return process


def forced_first(token):
    """The token behind the first id."""

    def process(ids, logits):
        if ids.size != 1:
            return logits
        here = marked(mx.array([token], mx.uint32), logits)
        return mx.where(here, 0, -math.inf).astype(logits.dtype)

    return process


def bad_words(words, eos_ids):
    words = [word for word in words if word not in [[eos] for eos in eos_ids]]
    return sequence_bias([(word, -math.inf) for word in words])

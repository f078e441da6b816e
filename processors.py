"""What a checkpoint or a user asks of the logits, as the decoders' `logits_processors`.

A processor is a function of the ids that stand before a position, (T,) uint32, and of the logits
there, (1, V). The ids are those that transformers counts: of an encoder-decoder the start token and
the output, so that min_length 5 is 4 tokens of output; of a causal model prompt and output. All is
part of a pass's graph: nothing here waits for the device. OPTIONS is all that the command line
knows about them.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

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


def is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def is_id(value):
    return type(value) is int and 0 <= value < 2**32 - 1


def are_ids(value):
    return isinstance(value, list) and len(value) > 0 and all(map(is_id, value))


def are_pairs(value):
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and are_ids(pair[0]) and is_number(pair[1])
        for pair in value
    )


def is_bias(value):
    return isinstance(value, dict) and all(
        id.isdecimal() and is_id(int(id)) and is_number(bias) for id, bias in value.items()
    )


def bad_words(words, eos_ids):
    words = [word for word in words if word not in [[eos] for eos in eos_ids]]
    return sequence_bias([(word, -math.inf) for word in words])


class Option(NamedTuple):
    key: str  # in generation_config.json; --key on the command line
    neutral: Any  # does nothing
    is_right: Callable
    wanted: str
    make: Callable  # (value, the ids that end a text) -> a processor
    help: str


OPTIONS = [  # in the order in which transformers applies them
    Option(
        "logit_bias",
        {},
        is_bias,
        'like {"ID": BIAS}',
        lambda value, _: sequence_bias([([int(id)], bias) for id, bias in value.items()]),
        "added to logits (none)",
    ),
    Option(
        "sequence_bias",
        [],
        are_pairs,
        "like [[[ID, …], BIAS], …]",
        lambda value, _: sequence_bias(value),
        "added to the last id's logit behind the others (none)",
    ),
    Option(
        "repetition_penalty",
        1,
        lambda value: is_number(value) and value > 0,
        "a number above 0",
        lambda value, _: repetition_penalty(value),
        "what stands there is less likely (1)",
    ),
    Option(
        "no_repeat_ngram_size",
        0,
        is_id,
        "an integer from 0",
        lambda value, _: no_repeat_ngram(value),
        "no N tokens twice (0: off)",
    ),
    Option(
        "bad_words_ids",
        [],
        lambda value: isinstance(value, list) and all(map(are_ids, value)),
        "like [[ID, …], …]",
        bad_words,
        "token sequences never written (none)",
    ),
    Option(
        "min_length",
        0,
        is_id,
        "an integer from 0",
        minimum_length,
        "no end before N tokens, the start token counts (0)",
    ),
    Option(
        "forced_bos_token_id",
        None,
        is_id,
        "a token id",
        lambda value, _: forced_first(value),
        "the first token (none)",
    ),
]

# What would change a greedy text, too, and its neutral values
NOT_DONE = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "do_sample": (False,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "min_new_tokens": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
}


def check(option, name, value):
    if not option.is_right(value):
        raise ValueError(f"{name} is {json.dumps(value):.60}: it must be {option.wanted}")
    return value


def add_options(add):
    """Adds them to a command line; add: argparse's add_argument."""
    for option in OPTIONS:
        flag = f"--{option.key.replace('_', '-')}"

        def parse(text, option=option):
            try:
                return check(option, "it", json.loads(text))
            except (ValueError, RecursionError):
                wanted = f"{text:.60} is not {option.wanted}"
                raise argparse.ArgumentTypeError(wanted) from None

        add(flag, type=parse, metavar="N" if option.is_right(5) else "JSON", help=option.help)
    off = "nothing that generation_config.json says of these"
    add("--no-generation-config", action="store_true", help=off)


def from_options(args, model):
    """The processors that the options ask for, else the checkpoint; says so on standard error."""
    config = {} if args.no_generation_config else getattr(model.config, "generation", {})
    made, used = [], []
    for option in OPTIONS:
        value = getattr(args, option.key)
        if value is None and config.get(option.key) is not None:
            value = check(option, f"generation_config.json: {option.key}", config[option.key])
            if value != option.neutral:
                used.append(f"{option.key} {json.dumps(value):.60}")
        if value is not None and value != option.neutral:
            made.append(option.make(value, model.eos_ids))
    left = [
        f"{key} {json.dumps(config[key]):.60}"
        for key, neutral in NOT_DONE.items()
        if config.get(key) is not None and config[key] not in neutral
    ]
    said = [", ".join(used)] * bool(used) + [f"without effect: {', '.join(left)}"] * bool(left)
    if said:
        print(f"note: generation_config.json: {'; '.join(said)}", file=sys.stderr)
    return made

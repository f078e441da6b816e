"""The options about logits: on the command line, in a checkpoint's generation_config.json or, where
there is none, in its config.json, as in transformers.

One table has them all. MLX is imported only when a processor is made.
"""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import command


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


class Option(NamedTuple):
    key: str  # in generation_config.json; --key on the command line
    neutral: Any  # does nothing
    is_right: Callable
    wanted: str
    make: Callable  # (processors.py, value, the ids that end a text) -> a processor
    help: str


OPTIONS = [  # in the order in which transformers applies them
    Option(
        "logit_bias",
        {},
        is_bias,
        'like {"ID": BIAS}',
        lambda p, value, _: p.sequence_bias([([int(id)], bias) for id, bias in value.items()]),
        "added to logits",
    ),
    Option(
        "sequence_bias",
        [],
        are_pairs,
        "like [[[ID, …], BIAS], …]",
        lambda p, value, _: p.sequence_bias(value),
        "behind others",
    ),
    Option(
        "repetition_penalty",
        1,
        lambda value: is_number(value) and value > 0,
        "a number above 0",
        lambda p, value, _: p.repetition_penalty(value),
        "against repetition",
    ),
    Option(
        "no_repeat_ngram_size",
        0,
        is_id,
        "an integer from 0",
        lambda p, value, _: p.no_repeat_ngram(value),
        "no N tokens twice, 0: off",
    ),
    Option(
        "bad_words_ids",
        [],
        lambda value: isinstance(value, list) and all(map(are_ids, value)),
        "like [[ID, …], …]",
        lambda p, value, eos_ids: p.bad_words(value, eos_ids),
        "never written",
    ),
    Option(
        "min_length",
        0,
        is_id,
        "an integer from 0",
        lambda p, value, eos_ids: p.minimum_length(value, eos_ids),
        "no end before N ids",
    ),
    Option(
        "forced_bos_token_id",
        None,
        is_id,
        "a token id",
        lambda p, value, _: p.forced_first(value),
        "the first token",
    ),
]

# What would change a greedy text or its length, too, and its neutral values
NOT_DONE = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "do_sample": (False,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "max_length": (),
    "max_new_tokens": (),
    "max_time": (),
    "min_new_tokens": (0,),
    "stop_strings": ([],),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "task_specific_params": ({},),
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

        neutral = "none" if option.neutral in ({}, [], None) else option.neutral
        help = f"{option.help}, {option.wanted} ({neutral})"
        add(flag, type=parse, metavar="N" if option.is_right(5) else "JSON", help=help)
    off = "nothing that generation_config.json says of these"
    add("--no-generation-config", action="store_true", help=off)


def of_checkpoint(name):
    """A folder or an id -> the file that says how to generate, what it says."""
    import checkpoint

    folder = checkpoint.find_folder(name)
    config = checkpoint.read_json(folder / "config.json")
    if not (folder / "generation_config.json").exists():
        return "config.json", config
    tasks = {"task_specific_params": config.get("task_specific_params")}
    return "generation_config.json", checkpoint.read_json(folder / "generation_config.json") | tasks


def from_options(args, eos_ids):
    """The processors that the options ask for, else the checkpoint; says so on standard error."""
    import processors

    file, config = ("", {}) if args.no_generation_config else of_checkpoint(args.model)
    made, used = [], []
    for option in OPTIONS:
        value = getattr(args, option.key)
        if value is None and config.get(option.key) is not None:
            value = check(option, f"{file}: {option.key}", config[option.key])
            if value != option.neutral:
                used.append(f"{option.key} {json.dumps(value):.60}")
        if value is not None and value != option.neutral:
            made.append(option.make(processors, value, eos_ids))
    left = [
        f"{key} {json.dumps(config[key]):.60}"
        for key, neutral in NOT_DONE.items()
        if config.get(key) is not None and config[key] not in neutral
    ]
    said = [", ".join(used)] * bool(used) + [f"without effect: {', '.join(left)}"] * bool(left)
    if said:
        command.say(f"note: {file}: {'; '.join(said)}")
    return made

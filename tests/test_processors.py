"""Processors: the same text with and without drafts, and what each forbids, told by brute force."""

import argparse
import io
import json
import math
import re
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from toys import HashModel, drafting, prompts, write

import logits_options
import processors
from decoder import Decoder
from prompt_lookup import PromptLookupDecoder
from text import unknown, unknown_line

EOS = 1
KINDS = {
    "bias": processors.sequence_bias([([5], 1.5), ([6, 7], -3.0), ([6, 7], -1.0), ([2], 9.0)]),
    "penalty": processors.repetition_penalty(1.3),
    "ngram": processors.no_repeat_ngram(2),
    "bad-words": processors.bad_words([[3], [4, 5], [EOS]], [EOS]),
    "min-length": processors.minimum_length(9, [EOS]),
    "first": processors.forced_first(7),
}


def process_one_by_one(kind, ids, logits):
    """What KINDS[kind] should make of them, in Python."""
    out = list(logits)
    for t in range(len(out)):
        if kind == "bias":
            out[t] += (
                1.5 * (t == 5) + 9.0 * (t == 2) - 4.0 * (t == 7 and ids[-1] == 6 and len(ids) > 1)
            )
        elif kind == "penalty" and t in ids:
            out[t] = out[t] * 1.3 if out[t] < 0 else out[t] / 1.3
        elif kind == "ngram" and (ids[-1], t) in zip(ids, ids[1:], strict=False):
            out[t] = -math.inf
        elif kind == "bad-words" and (t == 3 or (t == 5 and ids[-1] == 4 and len(ids) > 1)):
            out[t] = -math.inf
        elif kind == "min-length" and t == EOS and len(ids) < 9:
            out[t] = -math.inf
        elif kind == "first" and len(ids) == 1:
            out[t] = 0 if t == 7 else -math.inf
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_processors_against_python(kind):
    rng = np.random.default_rng(4)
    changed = 0
    for size in [1, 1, 2, 3, 8, 9, 10, 40, 40, 40]:
        ids = rng.integers(0, 9, size).tolist()  # an id beyond the width of the logits, too
        logits = rng.normal(size=(1, 8)).astype(np.float32)
        ours = KINDS[kind](mx.array(ids, mx.uint32), mx.array(logits))
        expected = process_one_by_one(kind, ids, logits[0].tolist())
        assert ours.shape == (1, 8) and np.allclose(np.array(ours)[0], expected, atol=1e-6)
        changed += not np.array_equal(np.array(ours), logits)
    assert changed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temp", [0, 0.8])
def test_text_is_the_same_with_and_without_drafts(kind, temp, request):
    """With --whole: 100 prompts, each with every ceiling of the draft lengths."""
    whole = request.config.getoption("--whole")
    accepted = changed = 0
    for seed, prompt in enumerate(prompts(100 if whole else 18)):
        encoder, ceilings = seed % 2 == 0, (1, 4, 24) if whole else [(1, 4, 24)[seed % 3]]
        model = HashModel(seed=seed, encoder=encoder)
        draft_model = HashModel(seed=seed + 1, encoder=encoder)
        options = {"temp": temp, "logits_processors": [KINDS[kind]]}
        plain = write(Decoder(model, **options), prompt, 16)[0]
        changed += plain != write(Decoder(model, temp=temp), prompt, 16)[0]
        for ceiling in ceilings:
            options |= {"num_draft": ceiling, "fixed_draft": True}
            for decoder in drafting(model, draft_model, **options):
                ids, _, stats = write(decoder, prompt, 16)
                assert ids == plain
                accepted += stats.accepted
    assert accepted > 20
    assert changed or kind == "first"  # of a causal model's, the ids are more than one


@pytest.mark.parametrize("encoder", [True, False])
def test_a_processor_sees_what_stands_before_each_position(encoder):
    """The ids of each row tell which row it is: here they alone make the text."""
    seen = []

    def count(ids, logits):
        assert logits.shape == (1, 24)
        seen.append(ids)
        return mx.where(mx.arange(24) == mx.sum(ids) % 22 + 2, 50.0, logits)

    model = HashModel(encoder=encoder)
    prompt = mx.array([5, 6, 7], mx.uint32)
    start = [0] if encoder else [5, 6, 7]
    text = []
    for _ in range(12):
        text.append((sum(start) + sum(text)) % 22 + 2)
    decoders = [Decoder(model, None, logits_processors=[count])]
    options = {"eos_id": None, "num_draft": 5, "fixed_draft": True, "logits_processors": [count]}
    decoders += drafting(model, HashModel(seed=1, encoder=encoder), **options)
    for decoder in decoders:
        seen.clear()
        ids, drafted, _ = write(decoder, prompt, 12)
        assert ids == text
        for row in seen:
            assert row.tolist()[: len(start)] == start
    assert sum(drafted) > 6  # the draft model's drafts were made with the processor


@pytest.mark.parametrize("temp", [0, 0.8])
def test_processors_that_forbid_everything(temp):
    """Behind three tokens; one line says so, and no token is made up."""
    model, forbid = HashModel(), processors.bad_words([[token] for token in range(24)], [])
    late = [lambda ids, logits: forbid(ids, logits) if ids.size > 3 else logits]
    options = {"eos_id": None, "temp": temp, "logits_processors": late}
    for decoder in Decoder(model, **options), *drafting(model, model, **options):
        written = []
        with pytest.raises(ValueError, match="^the logits processors forbid every token$"):
            for token in decoder.stream(mx.array([5, 6, 5], mx.uint32), 20):
                written.append(token)
        assert len(written) <= 3


def operations(*arrays):
    """How often each operation stands in the graph behind arrays that are not evaluated yet."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    return Counter(re.findall(r'label ?= ?"([A-Za-z]+)', dot.getvalue()))


def by_hand(model, count):
    """The operations of a pass over so many tokens, and of the choice of the likeliest ones."""
    cache, token = model.start(mx.array([5, 6, 5], mx.uint32))
    mx.eval(cache.state)
    logits = model.decode(mx.array([3] * count, mx.uint32), cache)
    tokens = mx.argmax(logits, axis=-1)
    return operations(tokens, mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0])


@pytest.mark.parametrize("none", [None, [], ()])
def test_without_processors_a_pass_is_decode_and_argmax(monkeypatch, none):
    """Nothing else is in its graph but what joins the last token, the draft and the cache."""
    model, prompt, passes = HashModel(), mx.array([5, 6, 5], mx.uint32), []

    def write_down(*arrays):
        passes.append((arrays[0].size, operations(arrays[0], arrays[-1])))

    def read(output, accepted, values, *search):
        write_down(output, values)
        return mx.eval(output, accepted, values, *search) or (output, accepted, values, *search)

    monkeypatch.setattr(mx, "async_eval", lambda token, value, ids: write_down(token, value))
    next(Decoder(model, None, logits_processors=none).stream(prompt, 2))
    penalty = [processors.repetition_penalty(2.0)]
    next(Decoder(model, None, logits_processors=penalty).stream(prompt, 2))
    (_, plain), _, (_, punished), _ = passes
    start = operations(model.start(prompt)[0].state)
    assert plain - start - by_hand(model, 1) == Counter() != punished - start - by_hand(model, 1)

    passes.clear()
    monkeypatch.setattr("decoder.read", read)
    options = {"num_draft": 3, "fixed_draft": True, "logits_processors": none}
    for _ in PromptLookupDecoder(model, None, **options).stream(prompt, 20):
        pass
    assert max(size for size, _ in passes) > 1
    for size, found in passes[1:]:
        assert set(found - by_hand(model, size)) <= {"Concatenate", "Slice"}


def parsed(*options):
    parser = argparse.ArgumentParser()
    logits_options.add_options(parser.add_argument)
    return parser.parse_args(options)


@pytest.fixture
def made(tmp_path):
    """generation_config.json, options -> the processors that are made of them."""

    def make(generation, *options, config={}):  # noqa: B006
        for name, content in ("generation_config", generation), ("config", config):
            path = tmp_path / f"{name}.json"
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_text(json.dumps(content))
        args = parsed(*options)
        args.model = tmp_path
        return logits_options.from_options(args, (EOS,))

    return make


def test_a_checkpoint_is_asked_where_no_option_says_otherwise(made, capsys):
    config = {"no_repeat_ngram_size": 3, "min_length": 5, "num_beams": 4, "num_return_sequences": 1}
    config |= {"max_length": 80, "length_penalty": 2.0}
    assert len(made(config)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "note: generation_config.json: no_repeat_ngram_size 3, min_length 5;"
        " without effect: num_beams 4, max_length 80"
    )
    assert len(made(config, "--min-length", "0")) == 1
    assert "min_length" not in capsys.readouterr().err
    assert made(config, "--no-generation-config") == []
    assert made({"repetition_penalty": 1.0, "min_length": 0}) == []
    assert capsys.readouterr().err == ""


def test_config_json_speaks_where_there_is_no_generation_config(made, capsys):
    """As in transformers; what a checkpoint says of tasks does not hold for a prompt."""
    config = {
        "repetition_penalty": 1.5,
        "task_specific_params": {"summarization": {"num_beams": 4}},
    }
    assert len(made(None, config=config)) == 1
    said = capsys.readouterr().err
    assert said.startswith("note: config.json: repetition_penalty 1.5; without effect: task_spec")
    assert made({}, config=config) == []
    said = capsys.readouterr().err
    assert said.startswith("note: generation_config.json: without effect: task_specific_params {")


@pytest.mark.parametrize("key, value", [("min_length", "x"), ("repetition_penalty", 0)])
def test_a_checkpoint_with_a_wrong_value(made, key, value):
    with pytest.raises(ValueError, match=f"generation_config.json: {key} is .*it must be"):
        made({key: value})


@pytest.mark.parametrize(
    "option, text",
    [
        ("--no-repeat-ngram-size", "-1"),
        ("--repetition-penalty", "0"),
        ("--bad-words-ids", "[3]"),
        ("--logit-bias", '{"x": 1}'),
        ("--logit-bias", '{"1": NaN}'),
        ("--min-length", "1.5"),
    ],
)
def test_wrong_options(option, text, capsys):
    with pytest.raises(SystemExit):
        parsed(f"{option}={text}")
    assert f"{text} is not" in capsys.readouterr().err


def test_every_option_arrives(made):
    values = {
        "logit_bias": {"5": 2.0},
        "sequence_bias": [[[5, 6], 2.0]],
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5]],
        "min_length": 4,
        "forced_bos_token_id": 5,
    }
    assert {option.key for option in logits_options.OPTIONS} == set(values)
    ids, logits = mx.array([5, 5, 5], mx.uint32), mx.ones((1, 8))
    for key, value in values.items():
        (from_option,) = made({}, f"--{key.replace('_', '-')}", json.dumps(value))
        (from_config,) = made({key: value})
        for before in ids, ids[:1]:
            assert mx.array_equal(from_option(before, logits), from_config(before, logits))


class Tokenizer:
    """One token per letter; `{` is unknown, a line break counts as a space, 0xAD is dropped."""

    unk_token_id = 2

    def encode(self, text):
        text = text.replace("\n", " ").replace("\xad", "")
        return [2 if c == "{" else ord(c) for c in text] + [1]


def test_unknown_characters():
    lost = unknown(Tokenizer(), "a {b{\n c\xad")
    assert lost == ["{", "{", "\n", "\xad"]
    assert unknown(Tokenizer(), "a b") == []
    line = unknown_line(Tokenizer(), lost)
    assert line.endswith(r" does not know '{', '\xad' (3 times), takes '\n' for a space (once)")
    line = unknown_line(Tokenizer(), ["\n"] * 40)  # a plain text of many lines
    assert line == r"note: in the texts, the tokenizer takes '\n' for a space (40 times)"
    line = unknown_line(Tokenizer(), [*"abcdefghijkl\n"])
    assert "'j' and 2 others (12 times), takes others for a space (once)" in line

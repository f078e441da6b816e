"""How the T5 and its cache behave, whatever the weights: feeding, rewinding, bad input."""

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from cpu import CHUNK
from model import load

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "demo" / "t5-demo"
GOLDEN = Path(__file__).parent / "golden"
ONE_FILE = ["t5-v1.0", "t5-v1.1", "mt5", "umt5"]
PROMPT = mx.array([5, 9, 23, 42, 5, 9, 1])


@pytest.fixture(scope="module")
def model():
    return load(GOLDEN / "flan-t5")[0]


@pytest.fixture
def copy(tmp_path):
    """A function: name of a golden checkpoint -> a copy of it that may be damaged."""
    return lambda name: Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def text(length, seed=0):
    ids = np.random.default_rng(seed).integers(3, 150, length)
    return mx.array(np.concatenate([[0], ids[1:]]).astype(np.uint32))


def one_by_one(model, tokens, cache):
    return mx.concatenate([model.decode(tokens[i : i + 1], cache) for i in range(tokens.size)])


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def edit_tensors(path, change):
    """change(header, data) edits a safetensors file's header in place, or returns other data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    data = change(header, data) or data
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


# Feeding


def test_pieces_of_any_length_give_the_same_bits(model):
    tokens = text(2 * CHUNK + 40)
    cache, _ = model.start(PROMPT)
    expected = one_by_one(model, tokens, cache)
    rng = random.Random(0)
    for most in (3, 11, 25, 100, 1000):
        cache, _ = model.start(PROMPT)
        done, logits = 0, []
        while done < tokens.size:
            piece = tokens[done : done + rng.randint(1, most)]
            logits.append(model.decode(piece, cache))
            done += piece.size
        assert cache.offset == tokens.size
        assert mx.array_equal(mx.concatenate(logits), expected), f"pieces of up to {most}"


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 30])
def test_trim_leaves_no_trace(model, length):
    tokens, other = text(length), text(40, seed=1)
    cache, _ = model.start(PROMPT)
    expected = one_by_one(model, tokens, cache)
    cache, _ = model.start(PROMPT)
    model.decode(tokens[:-20], cache)
    model.decode(other, cache)  # a long rejected draft, across the end of a chunk or not
    cache.trim(40)
    assert cache.offset == length - 20
    logits = model.decode(tokens[-20:-15], cache)
    model.decode(other[:7], cache)
    cache.trim(7)
    logits = mx.concatenate([logits, one_by_one(model, tokens[-15:], cache)])
    assert mx.array_equal(logits, expected[-20:])


def test_trim_to_nothing_and_start_again(model):
    tokens = text(30)
    cache, _ = model.start(PROMPT)
    first = model.decode(tokens, cache)
    cache.trim(30)
    assert cache.offset == 0
    assert mx.array_equal(model.decode(tokens, cache), first)


def test_two_generations_at_once(model):
    a, b = text(50, seed=1), text(50, seed=2)
    expected = []
    for tokens, prompt in ((a, PROMPT), (b, PROMPT[:3])):
        cache, _ = model.start(prompt)
        expected.append(model.decode(tokens, cache))
    cache_a, _ = model.start(PROMPT)
    cache_b, _ = model.start(PROMPT[:3])
    rows_a, rows_b = [], []
    for i in range(0, 50, 5):
        rows_a.append(model.decode(a[i : i + 5], cache_a))
        rows_b.append(model.decode(b[i : i + 5], cache_b))
    assert mx.array_equal(mx.concatenate(rows_a), expected[0])
    assert mx.array_equal(mx.concatenate(rows_b), expected[1])


def test_logits_depend_on_the_whole_prompt_and_text(model):
    tokens = text(12)
    cache, _ = model.start(PROMPT)
    logits = model.decode(tokens, cache)
    cache, _ = model.start(mx.concatenate([mx.array([6]), PROMPT[1:]]))
    assert not mx.allclose(model.decode(tokens, cache)[-1], logits[-1])
    cache, _ = model.start(PROMPT)
    changed = mx.concatenate([mx.array([7], mx.uint32), tokens[1:]])
    assert not mx.allclose(model.decode(changed, cache)[-1], logits[-1])


def test_ids_beyond_the_table_read_its_last_row(model):
    caches = [model.start(PROMPT)[0] for _ in range(2)]
    a = model.decode(mx.array([0, 2**32 - 1, 10**6], mx.uint32), caches[0])
    b = model.decode(mx.array([0, model.vocab_size - 1, model.vocab_size - 1]), caches[1])
    assert mx.array_equal(a, b) and mx.isfinite(a).all()


# Bad input


@pytest.mark.parametrize(
    "prompt, says",
    [
        (mx.array([], mx.uint32), "at least one"),
        (mx.array([[1, 2]]), "at least one"),
        (mx.array([1.0, 2.0]), "integer"),
        (mx.array([5, 160]), "160"),
        (mx.array([5, -3]), "-3"),
    ],
)
def test_a_bad_prompt_is_refused(model, prompt, says):
    with pytest.raises(ValueError, match=says):
        model.start(prompt)


@pytest.mark.parametrize("tokens", [mx.array([], mx.uint32), mx.array([[1]]), mx.array(1)])
def test_decode_takes_one_dimension(model, tokens):
    cache, _ = model.start(PROMPT)
    with pytest.raises(ValueError, match="at least one"):
        model.decode(tokens, cache)


@pytest.mark.parametrize("n", [-1, 6])
def test_trim_is_checked(model, n):
    cache, _ = model.start(PROMPT)
    model.decode(text(5), cache)
    with pytest.raises(ValueError, match=str(n)):
        cache.trim(n)


def unlink(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def generation(**changes):
    return lambda folder: edit_json(folder / "generation_config.json", **changes)


def tokenizer(**changes):
    return lambda folder: edit_json(folder / "tokenizer_config.json", **changes)


def cut_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])


def no_decoder(folder):
    file = str(folder / "model.safetensors")
    tensors = mx.load(file)
    mx.eval(tensors)
    mx.save_safetensors(file, {n: t for n, t in tensors.items() if not n.startswith("decoder")})


def negative_offsets(folder):
    """MLX's own check lets this through, and fails where the tensor is read."""

    def change(header, data):
        entry = header["lm_head.weight"]
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [begin - end - 1000, -1000]

    edit_tensors(folder / "model.safetensors", change)


def extra_tensor(folder):
    def change(header, data):
        header["extra.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

    edit_tensors(folder / "model.safetensors", change)


def corrupt_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def index(weight_map):
    return lambda f: edit_json(f / "model.safetensors.index.json", weight_map=weight_map)


def index_elsewhere(folder):
    """The tensors are there, but outside the folder, where nothing is read."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= mx.load(str(file))
    mx.save_safetensors(str(folder.parent / "model.safetensors"), tensors)
    index(dict.fromkeys(tensors, "../model.safetensors"))(folder)


@pytest.mark.parametrize(
    "family, damage, says",
    [
        ("t5-v1.1", unlink("model.safetensors"), "no weights"),
        ("t5-v1.1", unlink("config.json"), "config.json"),
        ("t5-v1.1", unlink("tokenizer_config.json", "spiece.model"), "tokenizer"),
        ("t5-v1.1", cut_weights, "model.safetensors cannot be read"),
        ("t5-v1.1", negative_offsets, "model.safetensors cannot be read"),
        (
            "t5-v1.1",
            lambda f: (f / "config.json").write_text("[]"),
            "config.json as JSON: .*object",
        ),
        (
            "t5-v1.1",
            lambda f: (f / "config.json").write_text("{"),
            "cannot read config.json as JSON",
        ),
        ("t5-v1.1", config(model_type="bert"), "bert"),
        ("t5-v1.1", config(model_type="longt5"), "longt5"),
        ("t5-v1.1", config(model_type="switch_transformers"), "switch_transformers"),
        ("t5-v1.1", no_decoder, "encoder-only"),
        ("t5-v1.1", extra_tensor, "extra.weight"),
        ("t5-v1.1", config(d_ff=65), r"\(130, 32\).*\(128, 32\).*wi.weight"),
        ("t5-v1.1", config(feed_forward_proj="gated-tanh"), "activation 'tanh'"),
        ("t5-v1.1", config(feed_forward_proj="leaky-relu"), "leaky-relu"),
        ("t5-v1.1", config(num_layers=1), "says 1 encoder layers, the weights have 2"),
        ("t5-v1.1", config(relative_attention_num_buckets=3), "buckets is 3"),
        ("t5-v1.1", config(relative_attention_max_distance=16), "distance is 16"),
        ("t5-v1.1", config(d_kv=True), "d_kv is True"),
        ("t5-v1.1", config(d_kv=8.0), "d_kv is 8.0"),
        ("t5-v1.1", config(decoder_start_token_id=160), "160"),
        ("t5-v1.1", config(eos_token_id="</s>"), "eos_token_id is '</s>'"),
        ("t5-v1.1", config(eos_token_id=[1, None]), "eos_token_id"),
        ("t5-v1.1", config(eos_token_id=True), "eos_token_id is True"),
        ("t5-v1.1", config(eos_token_id=99999), "eos_token_id is 99999, .* below 160"),
        ("t5-v1.1", config(eos_token_id=[1, 160]), "eos_token_id is .1, 160., .* below 160"),
        ("odd-sizes", generation(eos_token_id=2**70), "eos_token_id is 1180591620717411303424"),
        *[
            ("t5-v1.1", config(**{name: size}), "2000000000|000 .* layers|disagree")
            for name in ("num_layers", "num_decoder_layers", "d_model", "d_ff", "d_kv", "num_heads")
            for size in (2_000_000_000, 10**6)
        ],
        ("t5-v1.1", config(vocab_size=2**29), "disagree"),
        ("t5-v1.1", tokenizer(model_max_length="512"), "the tokenizer does not work"),
        ("byt5", tokenizer(model_max_length="512"), "the tokenizer does not work"),
        ("t5-v1.1", tokenizer(extra_ids=2**63), "9223372036854775808 extra_ids"),
        ("byt5", tokenizer(extra_ids=2 * 10**9), "2000000000 extra_ids"),
        ("odd-sizes", tokenizer(model_max_length=[]), "the tokenizer"),
        ("t5-v1.1", config(quantization={"bits": 3, "group_size": 64}), "quantization"),
        ("byt5", config(vocab_size=383), r"\(384, 32\)"),
        ("sharded", unlink("model-00002-of-00003.safetensors"), "model-00002-of-00003"),
        ("sharded", corrupt_index, "index.json as JSON"),
        ("sharded", index(None), "index.json does not map tensors to files"),
        ("sharded", index({"a": 5}), "index.json does not map tensors to files"),
        ("sharded", index_elsewhere, "model.safetensors cannot be read"),
    ],
)
def test_what_is_not_a_t5_is_told_so_in_one_line(copy, family, damage, says):
    folder = copy(family)
    damage(folder)
    with pytest.raises(ValueError, match=says) as error:
        load(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)


def test_which_file_tells_the_special_ids(copy):
    """config.json says what the decoder starts with, generation_config.json what ends a text."""
    folder = copy("t5-v1.1")
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [2, 9], "decoder_start_token_id": 8}'
    )
    edit_json(folder / "config.json", eos_token_id=3, decoder_start_token_id=7)
    model, _ = load(folder)
    assert model.eos_ids == (2, 9) and model.start(PROMPT)[1].tolist() == [7]
    edit_json(folder / "config.json", decoder_start_token_id=None)
    assert load(folder)[0].start(PROMPT)[1].tolist() == [8]


def test_a_tokenizer_with_more_ids_than_the_model(copy):
    folder = copy("t5-v1.1")
    edit_json(folder / "tokenizer_config.json", extra_ids=11)
    with pytest.raises(ValueError, match="161 ids.*160"):
        load(folder)


@pytest.mark.parametrize("name", ["no/such-model", "no-such-model", "no/such/folder", "", "/no"])
def test_neither_a_folder_nor_on_the_hub(name):
    with pytest.raises(ValueError, match="no such folder") as error:
        load(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("safetensors", [True, False])
def test_a_hub_id_is_downloaded_by_huggingface_hub(copy, monkeypatch, safetensors):
    folder, asked = copy("t5-v1.1"), []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns, ignore_patterns))
        if not safetensors and len(asked) == 1:
            (folder / "model.safetensors").unlink()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    if safetensors:
        assert load("google/t5-v1_1-tiny")[0].eos_ids == (1,)
    else:
        with pytest.raises(ValueError, match="no weights"):
            load("google/t5-v1_1-tiny")
    patterns = [p for _, allowed, _ in asked for p in allowed]
    assert {name for name, _, _ in asked} == {"google/t5-v1_1-tiny"}
    assert any("bin" in p for p in patterns) is not safetensors
    assert not any(p.endswith((".py", "*")) for p in patterns)  # no code, no other weights


def test_code_in_a_checkpoint_is_not_run(copy):
    folder = copy("t5-v1.1")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "evil.Config"})
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    try:
        load(folder)
    except ValueError:
        pass  # told that the tokenizer needs code is fine
    assert not (folder / "ran").exists()


def mutate(folder, rng):
    """Damage a checkpoint in one of the ways in which files get damaged; says what was done."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    kind = rng.choice(["header bytes", "bytes", "cut", "remove", "rename", "retype", "config"])
    if kind in ("header bytes", "bytes", "cut"):
        content = bytearray(weights.read_bytes())
        if kind == "cut":
            del content[rng.randrange(len(content)) :]
        length = 8 + int.from_bytes(content[:8], "little") if kind == "header bytes" else math.inf
        for _ in range(rng.choice([1, 3, 20]) if kind != "cut" else 0):
            content[rng.randrange(min(length, len(content)))] ^= 1 << rng.randrange(8)
        weights.write_bytes(content)
    elif kind == "config":
        content = json.loads(config.read_text())
        field = rng.choice(sorted(content))
        values = [..., None, "x", -1, 0, 3.5, [], {}, True, 10**12, 7, math.nan, [1, "a"]]
        edit_json(config, **{field: rng.choice(values)})
    else:

        def change(header, data):
            name = rng.choice(sorted(set(header) - {"__metadata__"}))
            if kind == "remove":
                del header[name]
            elif kind == "rename":
                header[name.replace("weight", "wait")] = header.pop(name)
            elif rng.random() < 0.5:
                header[name]["dtype"] = rng.choice(["F16", "I32", "F64", "BOOL", "F8_E4M3", "X"])
            else:
                shape = header[name]["shape"]
                shapes = [shape[::-1], [math.prod(shape)], [], [-1, -1], ["a"], None, [10**30]]
                header[name]["shape"] = rng.choice(shapes)

        edit_tensors(weights, change)


@pytest.mark.parametrize("seed", range(100))
def test_a_damaged_checkpoint_gives_one_line_or_works(copy, seed):
    rng = random.Random(seed)
    folder = copy(rng.choice(ONE_FILE))
    mutate(folder, rng)
    try:
        model, _ = load(folder)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return
    cache, token = model.start(PROMPT)
    logits = model.decode(mx.concatenate([token, token]), cache)
    mx.eval(logits)
    assert logits.shape == (2, model.vocab_size)


def test_a_model_can_be_used_in_another_thread():
    script = """
import threading
from model import load
import mlx.core as mx
from prompt_lookup import PromptLookupDecoder
model, tokenizer = load("demo/t5-demo")
prompt = mx.array([*range(5, 40)], mx.uint32)
texts = []
def write():
    texts.append([token.id for token in PromptLookupDecoder(model, None).stream(prompt, 20)])
# What a thread left unread has to be read again, also by a next one of the same number.
for function in (lambda: model.start(prompt), write, write):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
write()
assert texts[0] and texts[0] == texts[1] == texts[2], texts
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_one_evaluation_per_pass(monkeypatch):
    """Over three chunks of the cache: nothing in the model waits for the device."""
    import decoder

    model, _ = load(DEMO)
    prompt = mx.array([10, 11, 12], mx.uint32)
    list(decoder.Decoder(model, None).stream(prompt, 5))
    evaluations, evaluate = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluations.append(1) or evaluate(*arrays))
    drafter = decoder.SpeculativeDecoder(model, model, None, num_draft=8, fixed_draft=True)
    stream = drafter.stream(prompt, 600)
    assert len(list(stream)) == 600
    in_passes, before = len(evaluations), len(evaluations)
    model.start(prompt)  # the CPU encodes with some of NumPy; both models did so above
    assert in_passes - 2 * (len(evaluations) - before) == stream.stats.passes


def test_equal_prompts_are_encoded_once(model, monkeypatch):
    """Once in a row, and not where the weights are others by then."""
    encoded = []
    encode = type(model).encode
    monkeypatch.setattr(
        type(model), "encode", lambda self, ids: encoded.append(ids.tolist()) or encode(self, ids)
    )

    def first_logits(ids):
        cache, token = model.start(ids)
        return model.decode(token, cache)

    one, other = [5, 6, 7], [5, 6]
    results = [first_logits(ids) for ids in (one, one, other, one)]
    assert encoded == [one, other, one]
    assert all(mx.array_equal(results[i], results[0]) for i in (1, 3))
    assert not mx.array_equal(results[2], results[0])
    norm = model.encoder.final_layer_norm
    before = norm.weight
    norm.weight = 2 * before
    changed = first_logits(one)
    norm.weight = before
    assert not mx.array_equal(changed, results[0])
    assert mx.array_equal(first_logits(one), results[0])
    model.forget()
    first_logits(one)
    assert encoded == [one, other, one, one, one, one]


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_another_relative_bias_is_used_at_once(model, stack):
    """Not what was computed from the old one: the same logits as of a model in training."""

    def logits():
        cache, start = model.start([5, 6, 7])
        return model.decode(mx.concatenate([start, mx.array([5, 6, 7], mx.uint32)]), cache)

    bias = getattr(model, stack).block[0].layer[0].SelfAttention.relative_attention_bias
    before, first = bias.weight, logits()
    try:
        bias.weight = 1 - before
        model.train()
        wanted = logits()
        model.eval()
        assert mx.allclose(logits(), wanted, rtol=1e-4, atol=1e-4)
        assert not mx.allclose(wanted, first, atol=1e-2)
    finally:
        model.eval()
        bias.weight = before
    assert mx.array_equal(logits(), first)


def test_training_lowers_the_loss():
    """Teacher forcing through mlx.nn and mlx.optimizers, on a tiny T5 made from a config alone."""
    import mlx.nn as nn
    import mlx.optimizers as optimizers
    from mlx.utils import tree_flatten

    from checkpoint import Config
    from model import T5

    sizes = dict(vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_heads=4)
    mx.random.seed(0)
    model = T5(
        Config(**sizes, num_layers=2, num_decoder_layers=2, is_gated=True, activation="silu")
    )
    prompt, target = mx.array([3, 4, 5, 6, 1]), mx.array([7, 8, 9, 10, 11, 12, 1])

    def loss(prompt, target):
        return nn.losses.cross_entropy(model(prompt, target), target, reduction="mean")

    step, optimizer = nn.value_and_grad(model, loss), optimizers.Adam(learning_rate=3e-3)
    losses = []
    for _ in range(40):
        value, gradients = step(prompt, target)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(value.item())
    assert losses[-1] < 0.5 * losses[0]
    names = {"encoder", "decoder", "shared"}
    assert set(gradients) == names
    assert all(mx.abs(gradient).max() > 0 for _, gradient in tree_flatten(gradients))


def test_gradients_are_those_of_plain_mlx(monkeypatch):
    """What the CPU computes outside of MLX's graph must not be part of training."""
    import mlx.nn as nn

    import cpu

    def gradients(text):
        model = load(GOLDEN / "flan-t5")[0].train()
        loss = nn.value_and_grad(model, lambda: mx.logsumexp(model(text, text[:9]), axis=1).mean())
        value, found = loss()
        stacks = found["encoder"], found["decoder"]
        biases = [stack["block"][0]["layer"][0]["SelfAttention"] for stack in stacks]
        return value, [bias["relative_attention_bias"]["weight"] for bias in biases]

    long = text(50)
    value, found = gradients(long)
    monkeypatch.setattr(cpu, "prepare", lambda *_: None)
    right_value, right = gradients(long)
    assert abs(value - right_value) < 1e-4
    for ours, theirs in zip(found, right, strict=True):
        assert mx.abs(theirs).max() > 1e-4 and mx.allclose(ours, theirs, rtol=1e-3, atol=1e-6)

"""convert.py: what it writes loads, computes the same up to rounding, and appears whole or not."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import widen  # noqa: E402

from checkpoint import UNUSED  # noqa: E402
from convert import convert  # noqa: E402
from model import load  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def logits(folder, reference, feed=40, model=None):
    """The reference's tokens, `feed` at a time -> logits of all of them."""
    model = model or load(folder)[0]
    cache, _ = model.start(mx.array(reference["prompt"]))
    fed = mx.array(reference["fed"][:40])
    rows = [model.decode(fed[i : i + feed], cache) for i in range(0, 40, feed)]
    return mx.concatenate(rows)


def error(ours, reference):
    theirs = reference["logits"]
    return np.abs(np.array(ours.astype(mx.float32)) - theirs).max() / theirs.std()


def golden(name):
    return np.load(GOLDEN / name / "golden.npz")


def scaled(source, folder, **factors):
    """A copy of a checkpoint with tensors multiplied, by the end of their names."""
    shutil.copytree(source, folder)
    tensors = mx.load(str(folder / "model.safetensors"))
    for name in tensors:
        for end, factor in factors.items():
            if name.endswith(f"{end}.weight"):
                tensors[name] = tensors[name] * factor
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["t5-v1.0", "mt5", "sharded", "umt5", "codet5", "byt5"])
def test_a_plain_copy_computes_the_same(tmp_path, name):
    before, after, skipped = convert(GOLDEN / name, tmp_path / "out")
    reference = golden(name)
    assert skipped == [] and after < 1.2 * before
    written = set(mx.load(str(tmp_path / "out" / "model.safetensors")))
    assert written & UNUSED == {"shared.weight"}  # once, under one name
    copy, original = logits(tmp_path / "out", reference), logits(GOLDEN / name, reference)
    assert mx.array_equal(copy, original)
    model, _ = load(tmp_path / "out")
    assert model.eos_ids == load(GOLDEN / name)[0].eos_ids


@pytest.mark.parametrize("dtype, most", [("float32", 1e-4), ("float16", 0.03), ("bfloat16", 0.3)])
@pytest.mark.parametrize("name", ["flan-t5", "umt5", "ul2"])
def test_a_cast_copy_computes_nearly_the_same(tmp_path, name, dtype, most):
    before, after, _ = convert(GOLDEN / name, tmp_path / "out", dtype=dtype)
    assert after < before * (1.1 if dtype == "float32" else 0.6)
    ours = logits(tmp_path / "out", golden(name))
    assert ours.dtype == DTYPES[dtype]
    assert load(tmp_path / "out")[0].embed(mx.array([3])).dtype == mx.float32  # the residual stream
    assert error(ours, golden(name)) < most


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("bits, most", [(8, 0.3), (4, 3.0)])
def test_a_quantized_copy(tmp_path, dtype, bits, most):
    options = dict(quantize=True, bits=bits, group_size=32, dtype=dtype)
    before, after, skipped = convert(GOLDEN / "flan-t5", tmp_path / "out", **options)
    assert skipped == [] and after < before * (0.4 if bits == 8 else 0.27) + 20_000
    tensors = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert tensors["shared.weight"].dtype == mx.uint32
    assert tensors["decoder.block.0.layer.0.SelfAttention.q.scales"].dtype != mx.uint32
    assert error(logits(tmp_path / "out", golden("flan-t5")), golden("flan-t5")) < most


def test_matrices_that_the_group_size_does_not_divide_stay(tmp_path):
    # d_model is 32: only wo, whose rows are 64 long, is divided by 64
    _, _, skipped = convert(GOLDEN / "flan-t5", tmp_path / "out", quantize=True, bits=8)
    assert "shared.weight" in skipped and "encoder.block.0.layer.1.DenseReluDense.wo" not in skipped
    tensors = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert tensors["shared.weight"].dtype == mx.float32
    assert tensors["encoder.block.0.layer.1.DenseReluDense.wo.weight"].dtype == mx.uint32
    assert error(logits(tmp_path / "out", golden("flan-t5")), golden("flan-t5")) < 0.2


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("name", ["flan-t5", "t5-v1.0"])
def test_bits_do_not_depend_on_how_tokens_are_fed(tmp_path, name, dtype, quantize):
    out = tmp_path / "out"
    convert(GOLDEN / name, out, dtype=dtype, quantize=quantize, bits=4, group_size=32)
    model, _ = load(out)
    expected = logits(out, golden(name), 1, model)
    for feed in (2, 3, 7, 11, 25, 40):
        ours = logits(out, golden(name), feed, model)
        assert mx.array_equal(ours, expected), f"{feed} at a time"


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("name", ["flan-t5", "t5-v1.0"])
def test_float16_does_not_overflow_in_the_feed_forward(tmp_path, name, quantize):
    """Feed-forward outputs of about a million, as in real T5s: beyond float16's 65,504."""
    source = scaled(GOLDEN / name, tmp_path / "large", wi=3e3, wi_0=30, wi_1=30, wo=30)
    convert(source, tmp_path / "float32", quantize=quantize, bits=8, group_size=32)
    convert(source, tmp_path / "float16", "float16", quantize=quantize, bits=8, group_size=32)
    model, _ = load(tmp_path / "float32")
    feed_forward = model.decoder.block[0].layer[2].DenseReluDense
    assert mx.abs(feed_forward(mx.ones((4, 32)))).max() > 1e5
    exact, half = (logits(tmp_path / d, golden(name)) for d in ("float32", "float16"))
    assert mx.isfinite(half).all() and mx.abs(exact - half).max() < 0.1 * mx.std(exact)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A random checkpoint of 50 MB, larger than what else is in memory."""
    folder = tmp_path_factory.mktemp("large") / "t5"
    shutil.copytree(GOLDEN / "flan-t5", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= dict(d_model=256, d_ff=1024, d_kv=64, vocab_size=12_000, num_layers=3)
    config |= dict(num_decoder_layers=3)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {k: mx.array(v) for k, v in widen.random_weights(config).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder, max(tensor.nbytes for tensor in tensors.values())


def peak(job):
    """Bytes that were in use at most while `job()` ran, beyond what was before."""
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = job()
    return mx.get_peak_memory() - before, mx.get_active_memory() - before, result


def test_loading_holds_one_tensor_twice_at_most(large):
    folder, largest = large
    most, after, _model = peak(lambda: load(folder)[0])
    assert after > 30e6 and most - after < 1.2 * largest


@pytest.mark.parametrize("options", [dict(dtype="bfloat16"), dict(quantize=True, bits=8)])
def test_converting_holds_one_tensor_twice_at_most(large, tmp_path, options):
    folder, largest = large
    most, after, (_, written, _) = peak(lambda: convert(folder, tmp_path / "out", **options))
    assert after < 1e6 and most - written < 1.2 * largest


def test_float16_that_cannot_hold_a_weight_is_refused(tmp_path):
    source = scaled(GOLDEN / "flan-t5", tmp_path / "large", lm_head=1e6)
    with pytest.raises(ValueError, match="lm_head.weight.*bfloat16"):
        convert(source, tmp_path / "out", dtype="float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large"]


def test_all_files_but_the_weights_are_copied(tmp_path):
    shutil.copytree(GOLDEN / "codet5", tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    (tmp_path / "in" / "pytorch_model.bin.index.json").write_text("{}")
    convert(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer_config.json",
        "vocab.json",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config
    model, tokenizer = load(tmp_path / "out")
    assert model.eos_ids == (2, 9) and tokenizer("a")["input_ids"]


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(dtype="int8"), "int8"),
        (dict(quantize=True, bits=3), "3 bits"),
        (dict(quantize=True, group_size=48), "groups of 48"),
        (dict(model="no/such-model"), "no such folder"),
        (dict(model=ROOT), "config.json"),
    ],
)
def test_bad_options_leave_nothing_behind(tmp_path, options, says):
    with pytest.raises(ValueError, match=says) as error:
        convert(**dict(model=GOLDEN / "ul2", out=tmp_path / "out") | options)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path):
    shutil.copytree(GOLDEN / "flan-t5", tmp_path / "in")
    tensors = mx.load(str(tmp_path / "in" / "model.safetensors"))
    mx.eval(tensors)
    del tensors["decoder.final_layer_norm.weight"]
    mx.save_safetensors(str(tmp_path / "in" / "model.safetensors"), tensors)
    with pytest.raises(
        ValueError, match="Missing 1 parameters: decoder.final_layer_norm.weight"
    ) as error:
        convert(tmp_path / "in", tmp_path / "out")
    assert str(error.value).startswith(f"{tmp_path / 'in'}: config.json and the weights")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_quantizing_twice_is_refused(tmp_path):
    convert(GOLDEN / "flan-t5", tmp_path / "a", quantize=True, group_size=32)
    with pytest.raises(ValueError, match="quantized already"):
        convert(tmp_path / "a", tmp_path / "b", quantize=True, group_size=32)


def run(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "convert.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


def test_the_command_line(tmp_path):
    source, out = GOLDEN / "flan-t5", tmp_path / "out"
    done = run("--model", source, "--out", out, "--quantize", "--bits", 8, "--dtype", "bfloat16")
    assert done.returncode == 0 and "MB ->" in done.stdout and "shared.weight" in done.stdout
    again = run("--model", source, "--out", out)
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and "exists" in again.stderr


@pytest.mark.parametrize(
    "options, says",
    [
        (["--dtype", "float8"], "float8"),
        (["--quantize", "--bits", "3"], "3 bits"),
        (["--quantize", "--bits", "x"], "--bits: invalid int value: 'x'"),
        (["--bits", "4"], "need --quantize"),
        (["--group-size", "32", "--dtype", "bfloat16"], "need --quantize"),
        (["--model"], "--model"),
    ],
)
def test_bad_options_on_the_command_line(tmp_path, options, says):
    done = run("--model", GOLDEN / "flan-t5", "--out", tmp_path / "out", *options)
    assert done.returncode == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_a_failure_leaves_no_folder_on_the_way_to_the_output(tmp_path):
    shutil.copytree(GOLDEN / "flan-t5", tmp_path / "in")
    tensors = mx.load(str(tmp_path / "in" / "model.safetensors"))
    del tensors["decoder.final_layer_norm.weight"]
    mx.save_safetensors(str(tmp_path / "in" / "model.safetensors"), tensors)
    with pytest.raises(ValueError, match="final_layer_norm"):
        convert(tmp_path / "in", tmp_path / "new" / "deep" / "out")
    with pytest.raises(ValueError, match="exists"):
        convert(GOLDEN / "flan-t5", tmp_path / "new" / ".." / "in")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    convert(GOLDEN / "flan-t5", tmp_path / "new" / "deep" / "out")
    assert [p.name for p in (tmp_path / "new").rglob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_leaves_nothing_behind(tmp_path, name):
    script = f"""
import os, signal, sys, convert
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
convert.command.begin(tidy=True)
convert._copy_files = lambda *_: os.kill(os.getpid(), signal.{name})
sys.argv[1:] = ["--model", {str(GOLDEN / "flan-t5")!r}, "--out", {str(tmp_path / "out")!r}]
sys.exit(convert.command.run("convert.py", convert.main))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert done.returncode > 128 and list(tmp_path.iterdir()) == []

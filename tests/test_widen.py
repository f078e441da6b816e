"""benchmarks/widen.py: a wider, deeper checkpoint with the same function."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import widen  # noqa: E402

DEMO = ROOT / "demo" / "t5-demo"
# Every number differs from the demo's, none is a multiple of it, encoder and decoder differ.
ODD = dict(zip(widen.NAMES, (200, 7, 40, 700, 8, 7, 5000), strict=True))
widen.SIZES["odd"] = ODD


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    out = tmp_path_factory.mktemp("widen") / "odd"
    widen.write(DEMO, out, "odd")
    return out


@pytest.fixture(scope="module")
def prompts():
    lines = (ROOT / "demo" / "edits.jsonl").read_text().splitlines()
    edits = [json.loads(line) for line in lines]
    return [edit["prompt"] for edit in edits[::80]]


def greedy(folder, prompts):
    """Ids that our plain decoder writes, and the logits of a pass over the first of them."""
    import mlx.core as mx

    from decoder import Decoder
    from model import load

    model, tokenizer = load(str(folder))
    prompts = [mx.array(tokenizer(p).input_ids, mx.uint32) for p in prompts]
    texts = [[t.id for t in Decoder(model).stream(p, max_tokens=100)] for p in prompts]
    cache, start = model.start(prompts[0])
    tokens = mx.concatenate([start, mx.array(texts[0], mx.uint32)])
    return texts, np.array(model.decode(tokens, cache))


def test_the_widened_model_writes_the_same_tokens(wide, prompts):
    texts, logits = greedy(DEMO, prompts)
    wide_texts, wide_logits = greedy(wide, prompts)
    assert sum(map(len, texts)) > 50
    assert wide_texts == texts
    old = logits.shape[1]
    assert np.abs(wide_logits[:, :old] - logits).max() < 1e-4 * logits.std()
    # The added rows of the vocabulary are the pad token's.
    assert np.abs(wide_logits[:, old:] - logits[:, :1]).max() < 1e-4 * logits.std()


def test_the_epsilon_of_the_norms_is_widened_too(tmp_path, prompts):
    """The demo's is too small to be seen in its logits."""
    source = shutil.copytree(DEMO, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.1}))
    widen.write(source, tmp_path / "wide", "odd")
    (_, logits), (_, wide_logits) = (greedy(tmp_path / f, prompts[:1]) for f in ("source", "wide"))
    assert np.abs(wide_logits[:, : logits.shape[1]] - logits).max() < 1e-4 * logits.std()


def test_the_widened_model_has_the_sizes_that_were_asked_for(wide):
    config = json.loads((wide / "config.json").read_text())
    assert {name: config[name] for name in ODD} == ODD
    tensors = load_file(wide / "model.safetensors")
    assert tensors["shared.weight"].shape == (5000, 200)
    assert tensors["encoder.block.7.layer.0.SelfAttention.q.weight"].shape == (280, 200)
    assert tensors["decoder.block.6.layer.1.EncDecAttention.o.weight"].shape == (200, 280)
    assert tensors["decoder.block.6.layer.2.DenseReluDense.wi.weight"].shape == (700, 200)


def test_added_layers_do_their_work(wide):
    """They add nothing, but their inputs are not zeros, which a machine might treat specially."""
    tensors = load_file(wide / "model.safetensors")
    for kind in ("SelfAttention.q", "SelfAttention.v"):
        assert tensors[f"encoder.block.7.layer.0.{kind}.weight"].any()
    assert not tensors["encoder.block.7.layer.0.SelfAttention.o.weight"].any()
    assert not tensors["encoder.block.7.layer.1.DenseReluDense.wo.weight"].any()


def test_sizes_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(ValueError, match="size is 't5-huge'"):
        widen.write(DEMO, tmp_path / "out", "t5-huge")
    (tmp_path / "config.json").write_text('{"d_model": 128}')
    with pytest.raises(ValueError, match="config.json lacks num_heads, d_kv, "):
        widen.write(tmp_path, tmp_path / "out", "odd")
    widen.SIZES["narrow"] = ODD | {"d_ff": 64}
    with pytest.raises(ValueError, match="smaller than .* in d_ff"):
        widen.write(DEMO, tmp_path / "out", "narrow")
    assert not (tmp_path / "out").exists()


def test_transformers_writes_the_same_tokens_too(wide, prompts):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(str(DEMO))
    texts = {}
    for folder in (DEMO, wide):
        model = T5ForConditionalGeneration.from_pretrained(str(folder)).eval()
        with torch.inference_mode():
            texts[folder] = [
                model.generate(
                    torch.tensor([tokenizer(p).input_ids]), max_new_tokens=100, do_sample=False
                )[0].tolist()
                for p in prompts
            ]
    assert texts[wide] == texts[DEMO]
    assert [[t for t in ids if t > 1] for ids in texts[wide]] == greedy(wide, prompts)[0]

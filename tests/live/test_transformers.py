"""What needs PyTorch: the comparison of compare.py as tests, and PyTorch's own checkpoint files."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the live comparison needs PyTorch")
sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx  # noqa: E402
from make_golden import FAMILIES, GOLDEN  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from convert import convert  # noqa: E402
from model import load  # noqa: E402

from compare import compare  # noqa: E402  isort: skip


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_agrees(tmp_path, name, seed):
    difference, same_argmax, same_texts = compare(name, tmp_path / name, seed)
    assert difference < 1e-4 and same_argmax and same_texts


def logits(folder):
    model, _ = load(folder)
    cache, token = model.start(mx.array([5, 6, 7]))
    return model.decode(mx.concatenate([token, token + 4]), cache)


@pytest.fixture
def without_weights(tmp_path):
    """A golden checkpoint whose weights were taken out of the folder, and the weights."""
    folder = Path(shutil.copytree(GOLDEN / "flan-t5", tmp_path / "flan-t5"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return folder, tensors


@pytest.mark.parametrize("new_format", [True, False])
def test_a_pytorch_file(without_weights, new_format):
    folder, tensors = without_weights
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=new_format)
    assert mx.array_equal(logits(folder), logits(GOLDEN / "flan-t5"))
    convert(folder, folder.parent / "out")
    assert mx.array_equal(logits(folder.parent / "out"), logits(GOLDEN / "flan-t5"))


def test_pytorch_shards_in_bfloat16(without_weights, tmp_path):
    folder, tensors = without_weights
    weight_map = {}
    for i in (0, 1):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        shard = {k: tensors[k].bfloat16() for k in sorted(tensors)[i::2]}
        torch.save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(GOLDEN / "flan-t5", tmp_path / "bfloat16", dtype="bfloat16")
    assert mx.array_equal(logits(folder), logits(tmp_path / "bfloat16"))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_that_runs_code_is_refused(without_weights, tmp_path):
    folder, _ = without_weights
    for write in (torch.save, lambda x, f: f.write_bytes(pickle.dumps(x))):
        write({"shared.weight": Evil(str(tmp_path / "ran"))}, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pytorch_model.bin cannot be read") as error:
            load(folder)
        assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


def test_a_pytorch_file_without_pytorch(without_weights, monkeypatch):
    folder, tensors = without_weights
    torch.save(tensors, folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="pip install torch"):
        load(folder)


def test_transformers_reads_what_convert_writes(tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    convert(GOLDEN / "mt5", tmp_path / "out")
    theirs, theirs_before = (
        AutoModelForSeq2SeqLM.from_pretrained(folder)
        .eval()(input_ids=torch.tensor([[5, 6, 7]]), decoder_input_ids=torch.tensor([[7, 11]]))
        .logits
        for folder in (tmp_path / "out", GOLDEN / "mt5")
    )
    assert torch.equal(theirs, theirs_before)

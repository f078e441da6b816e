"""What a T5 checkpoint is on disk: its files, its config, its tensors. Nothing here computes.

`model.load` and `convert.py` read checkpoints through this file. Bad input raises ValueError with
one line that names what is wrong.
"""

import json
import os
import re
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import safe_open  # it comes with transformers

EMBEDDINGS = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
UNUSED = {  # copies of the embedding, and a bias that old checkpoints carry and nobody reads
    *EMBEDDINGS,
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
}
QUANTIZATIONS = [{"group_size": g, "bits": b} for g in (32, 64, 128) for b in (4, 8)]
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Config:
    """What the computation needs to know; the numbers are named and default as in config.json."""

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    activation: str = "relu"
    is_gated: bool = False
    own_head: bool = False  # lm_head.weight is in the checkpoint: else the embedding is the head
    scale_outputs: bool = True  # by d_model ** -0.5, before the head
    bias_in_every_layer: bool = False  # umT5
    start_id: int = 0
    eos_ids: tuple = (1,)
    quantization: dict | None = None  # {"group_size": 64, "bits": 4}, written by convert.py


@contextmanager
def one_line(failure):
    """Whatever a library raises in here becomes a ValueError of one line: failure, reason."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= 300 else f"{reason[:300]} …"
        raise ValueError(f"{failure}: {reason}") from None


def read_json(path: Path) -> dict:
    """The JSON object in a file."""
    with one_line(f"cannot read {path.name} as JSON"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    return content


def _check(right, name, value, wanted):
    """ValueError unless what a config says is right."""
    if not right:
        raise ValueError(f"the config's {name} is {value!r:.100}, not {wanted}")


def _token_ids(name, configs, default, size=2**31):
    """The ids under `name`, all below size, in the first of the configs that has some."""
    for config in configs:
        ids = config.get(name)
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        right = all(type(i) is int and 0 <= i < size for i in ids)
        _check(right, name, config.get(name), f"a token id below {size}, or a list of them")
        if ids:
            return tuple(ids)
    return default


def read_config(folder: Path) -> Config:
    """Config from config.json and, where it exists, generation_config.json."""
    config, generation = read_json(folder / "config.json"), {}
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json")
    kind = config.get("model_type")
    _check(kind in ("t5", "mt5", "umt5"), "model_type", kind, "t5, mt5 or umt5")

    defaults = {"d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 250112}
    defaults = {} if kind == "t5" else defaults
    values: dict = {}
    for entry in fields(Config):
        if entry.type not in (int, float) or entry.name == "start_id":
            continue
        value: Any = config.get(entry.name)
        if value is None and entry.name == "num_decoder_layers":
            value = values["num_layers"]
        elif value is None:
            value = defaults.get(entry.name, entry.default)
        right = type(value) in (int, entry.type) and 0 < value < 2**30
        _check(right, entry.name, value, "a number above 0 and below 2**30")
        values[entry.name] = value
    inner, size = values["num_heads"] * values["d_kv"], values["vocab_size"]
    _check(inner < 2**29, "num_heads * d_kv", inner, "below 2**29")
    buckets = values["relative_attention_num_buckets"]
    _check(buckets >= 4, "relative_attention_num_buckets", buckets, "at least 4")
    reach = values["relative_attention_max_distance"]
    _check(reach > buckets // 2, "relative_attention_max_distance", reach, "above half the buckets")

    feed_forward = config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    gate, _, activation = str(feed_forward).rpartition("-")
    _check(gate in ("", "gated"), "feed_forward_proj", feed_forward, "an activation or gated-...")
    activation = "gelu_new" if feed_forward == "gated-gelu" else activation
    # transformers 5 ties every T5; v1.1 is told by what tie_word_embeddings said in the file.
    scale = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    values |= {
        "activation": str(config.get("dense_act_fn", activation)),
        "is_gated": config.get("is_gated_act", gate == "gated") is True,
        "scale_outputs": kind != "mt5" and bool(scale),
        "bias_in_every_layer": kind == "umt5",
    }

    default = () if "eos_token_id" in config else (1,)
    values["eos_ids"] = _token_ids("eos_token_id", [generation, config], default, size)
    pad = _token_ids("pad_token_id", [config], (0,))
    values["start_id"] = start = _token_ids("decoder_start_token_id", [config, generation], pad)[0]
    _check(start < size, "decoder_start_token_id", start, f"below vocab_size {size}")

    values["quantization"] = how = config.get("quantization")
    known = "bits 4 or 8 and group_size 32, 64 or 128"
    _check(how is None or how in QUANTIZATIONS, "quantization", how, known)
    return Config(**values)


def find_folder(path_or_id) -> Path:
    """The local folder of a checkpoint; a Hugging Face id is downloaded by huggingface_hub."""
    name, failure = str(path_or_id), "there is no such folder"
    if os.path.isdir(name):
        return Path(name)
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):  # no id either
        raise ValueError(failure)
    try:
        with one_line(f"{failure}, and the Hugging Face hub did not help"):
            from huggingface_hub import snapshot_download

            for weights in ("model*.safetensors", "pytorch_model*.bin"):
                wanted = ["*.json", "*.model", "*.txt", weights]
                folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns="*/*"))
                if list(folder.glob(weights)):
                    break
        return folder
    except ValueError:
        if os.path.isdir(os.path.dirname(name)):  # a folder was meant
            raise ValueError(failure) from None
        raise


def open_tensors(folder: Path) -> dict:
    """All tensors by name, not read yet: from safetensors, or from PyTorch files where it is."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _open_file(folder / name)
        if index.is_file():
            with one_line(f"{index.name} does not map tensors to files"):
                # Without their directories: nothing outside the folder is read.
                files = {Path(file).name for file in read_json(index)["weight_map"].values()}
            shards = [_open_file(folder / file) for file in sorted(files)]
            return {name: tensor for shard in shards for name, tensor in shard.items()}
    raise ValueError("the folder has no weights (no model.safetensors or pytorch_model.bin)")


def _open_file(path):
    """The tensors of one file by name, not read yet."""
    with one_line(f"{path.name} cannot be read"):
        if path.suffix == ".safetensors":
            safe_open(path, "numpy")  # refuses what MLX's own check of the header lets through
            return mx.load(str(path), format="safetensors")
        try:
            import torch
        except ImportError:
            raise ValueError(
                "that needs PyTorch: pip install torch, or convert the checkpoint to safetensors"
                " with convert.py where it is installed"
            ) from None
        mapped = zipfile.is_zipfile(path)  # not so before PyTorch 1.6
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError("it holds more than tensors by name")
        return dict(tensors)


def to_mlx(tensor):
    """A tensor of open_tensors as an MLX array."""
    if isinstance(tensor, mx.array):
        return tensor
    import torch

    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def load_tokenizer(folder, vocab_size):
    """The folder's tokenizer, which has to work, with ids that must all be below vocab_size."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses PyTorch, we do not
    from transformers import AutoTokenizer

    file = folder / "tokenizer_config.json"
    more = read_json(file).get("extra_ids") if file.exists() else 0  # transformers makes a list
    if isinstance(more, int) and more > vocab_size:
        raise ValueError(f"the tokenizer has {more} extra_ids, the model only {vocab_size} ids")
    with one_line("the tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    files = tokenizer.vocab_files_names.values()  # none for ByT5
    if files and not any((folder / name).is_file() for name in files):
        # transformers made up an empty one
        raise ValueError(f"the folder has no tokenizer, none of {', '.join(files)}")
    with one_line("the tokenizer does not work"):
        ids = tokenizer("a b", verbose=False).input_ids
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        most = max(len(tokenizer), 1 + max(ids, default=0))
    if most > vocab_size:
        raise ValueError(f"the tokenizer has {most} ids, the model only {vocab_size}")
    return tokenizer


def check_depth(config, tensors):
    """ValueError unless the tensors have the layers that the config says, and a decoder."""
    for stack, depth in ("encoder", config.num_layers), ("decoder", config.num_decoder_layers):
        found = {name.split(".")[2] for name in tensors if name.startswith(f"{stack}.block.")}
        if not found and stack == "decoder":
            raise ValueError("encoder-only checkpoints are not supported: there is no decoder")
        if found != {str(i) for i in range(min(depth, len(found) + 1))}:
            raise ValueError(
                f"config.json says {depth} {stack} layers, the weights have {len(found)}"
            )

"""What a T5 checkpoint is on disk: its files, its config, its tensors. Nothing here computes.

`model.load` and `convert.py` read checkpoints through this file. Bad input raises ValueError with
one line that names what is wrong.
"""

import fast_blas  # isort: skip  (a fast BLAS on Linux: before mlx.core)

import ctypes
import io
import json
import math
import mmap
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx

EMBEDDINGS = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
UNUSED = {  # copies of the embedding, and a bias that old checkpoints carry and nobody reads
    *EMBEDDINGS,
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
}


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
    scale_outputs: bool = True  # by d_model ** -0.5, before the head
    bias_in_every_layer: bool = False  # umT5
    start_id: int = 0
    eos_ids: tuple = (1,)
    quantization: dict | None = None  # {"group_size": 64, "bits": 4}, written by convert.py


def read_config(folder: Path) -> Config:
    """Config from config.json and, where it exists, generation_config.json."""
    config, generation = read_json(folder / "config.json"), {}
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json")
    kind = config.get("model_type")
    if kind not in ("t5", "mt5", "umt5"):
        raise ValueError(f"model_type {kind!r} is not supported; t5, mt5 and umt5 are")
    names = config.get("architectures") or []
    if config.get("is_encoder_decoder") is False or "EncoderModel" in str(names):
        raise ValueError("encoder-only checkpoints are not supported: there is no decoder")

    defaults = {"d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 250112}
    defaults = {} if kind == "t5" else defaults
    values: dict = {}
    for field in fields(Config):
        if field.type not in (int, float) or field.name == "start_id":
            continue
        value: Any = config.get(field.name)
        if value is None and field.name == "num_decoder_layers":
            value = values["num_layers"]
        elif value is None:
            value = defaults.get(field.name, field.default)
        right = isinstance(value, int if field.type is int else (int, float))
        if not right or isinstance(value, bool) or not 0 < value < 2**31:
            raise ValueError(f"config.json: {field.name} is {value!r}, not a number above 0")
        values[field.name] = value
    buckets = values["relative_attention_num_buckets"]
    if buckets < 4 or values["relative_attention_max_distance"] <= buckets // 2:
        raise ValueError(
            f"config.json: relative_attention_num_buckets is {buckets} with a maximum distance of"
            f" {values['relative_attention_max_distance']}; at least 4 and more than half of it"
        )

    # transformers 5 ties every T5; v1.1 is told by what tie_word_embeddings said in the file.
    scale = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    feed_forward = config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    gate, _, activation = str(feed_forward).rpartition("-")
    if gate not in ("", "gated"):
        raise ValueError(
            f"config.json: feed_forward_proj is {feed_forward!r}, not an activation or gated-..."
        )
    activation = "gelu_new" if feed_forward == "gated-gelu" else activation
    values |= {
        "activation": config.get("dense_act_fn", activation),
        "is_gated": config.get("is_gated_act", gate == "gated") is True,
        "scale_outputs": kind != "mt5" and bool(scale),
        "bias_in_every_layer": kind == "umt5",
    }

    said = [("generation_config.json", generation), ("config.json", config)]
    values["eos_ids"] = _token_ids("eos_token_id", said, () if "eos_token_id" in config else (1,))
    pad = _token_ids("pad_token_id", said[1:], (0,))
    values["start_id"] = _token_ids("decoder_start_token_id", said[::-1], pad)[0]
    if values["start_id"] >= values["vocab_size"]:
        raise ValueError(
            f"decoder_start_token_id {values['start_id']} is not below vocab_size"
            f" {values['vocab_size']}"
        )

    values["quantization"] = quantization = config.get("quantization")
    if quantization is not None and (
        not isinstance(quantization, dict)
        or quantization.get("bits") not in (4, 8)
        or quantization.get("group_size") not in (32, 64, 128)
    ):
        raise ValueError(
            f"config.json: quantization is {quantization!r}, not bits 4 or 8 and group_size 32, 64"
            " or 128"
        )
    return Config(**values)


def _token_ids(name, said, default):
    """The ids under `name` in the first file that has some."""
    for file, content in said:
        found = content.get(name)
        ids = found if isinstance(found, list) else [found]
        if any(
            isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids if ids != [None]
        ):
            raise ValueError(f"{file}: {name} is {found!r}, not a token id or a list of them")
        if found is not None and ids:
            return tuple(ids)
    return default


def read_json(path: Path) -> dict:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return content


def find_folder(path_or_id) -> Path:
    """The local folder of a checkpoint; a Hugging Face id is downloaded by huggingface_hub."""
    name = str(path_or_id)
    if os.path.isdir(name):
        return Path(name)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
        raise ValueError("there is no such folder")
    from huggingface_hub import snapshot_download

    def download(*patterns):
        try:
            return Path(
                snapshot_download(name, allow_patterns=list(patterns), ignore_patterns="*/*")
            )
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(
                f"there is no such folder, and the Hugging Face hub did not help: {reason}"
            ) from None

    folder = download("*.json", "*.model", "*.txt", "model*.safetensors")
    if not list(folder.glob("*.safetensors")):
        folder = download("pytorch_model*.bin")
    return folder


def open_tensors(folder: Path) -> dict:
    """All tensors by name, not read yet: from safetensors, or from PyTorch files where it is."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        read = _open_safetensors if name.endswith("safetensors") else _open_pytorch
        if (folder / name).is_file():
            return read(folder / name)
        if (folder / f"{name}.index.json").is_file():
            shards = read_json(folder / f"{name}.index.json").get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
                raise ValueError(f"{name}.index.json has no weight_map from tensors to files")
            tensors: dict = {}
            for shard in sorted(set(shards.values())):
                if Path(shard).name != shard or not (folder / shard).is_file():
                    raise ValueError(f"the shard {shard!r} of {name}.index.json is missing")
                tensors |= read(folder / shard)
            return tensors
    raise ValueError("the folder has no weights (no model.safetensors or pytorch_model.bin)")


def _open_safetensors(path):
    """MLX trusts a file's header; a truncated or damaged one is found here."""
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "U32": 4, "I32": 4, "I64": 8, "U8": 1}
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path.name} is truncated, or is no safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                if entry["dtype"] not in sizes:
                    raise ValueError(f"{path.name}: {name} has the unknown type {entry['dtype']}")
                if end > size - 8 - length:
                    raise ValueError(f"{path.name} is truncated: {name} lies beyond its end")
                if (
                    any(n < 0 for n in entry["shape"])
                    or begin < 0
                    or (end - begin != math.prod(entry["shape"]) * sizes[entry["dtype"]])
                ):
                    raise ValueError(f"{path.name}: {name} does not have the size of its shape")
        except (
            json.JSONDecodeError,
            UnicodeError,
            RecursionError,
            LookupError,
            TypeError,
            AttributeError,
        ):
            raise ValueError(f"{path.name}: the header is damaged") from None
    try:
        return mx.load(HugePages(path), format="safetensors")
    except Exception as error:
        raise ValueError(f"{path.name}: {str(error).splitlines()[0]}") from None


class HugePages(io.FileIO):
    """A file that asks Linux to put what is read from it into pages of 2 MB.

    Weights are read from memory in every pass, which is the faster the fewer pages there are.
    """

    def readinto(self, buffer):
        if fast_blas.path and len(buffer) >= 2**21:  # advice: no harm where it is not taken
            start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            first, last = -(-start // 2**21), (start + len(buffer)) // 2**21
            madvise = ctypes.CDLL(None).madvise
            madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
            madvise(first * 2**21, (last - first) * 2**21, mmap.MADV_HUGEPAGE)
        done = 0
        while n := super().readinto(memoryview(buffer)[done:]):  # 2 GB at a time
            done += n
        return done


def _open_pytorch(path):
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{path.name} needs PyTorch to be read: pip install torch, or convert the checkpoint"
            " to safetensors with convert.py where it is installed"
        ) from None
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before PyTorch 1.6: cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path.name} cannot be read: {reason}") from None


def to_mlx(tensor):
    """A tensor of open_tensors as an MLX array."""
    if isinstance(tensor, mx.array):
        return tensor
    import torch

    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def load_tokenizer(folder, vocab_size):
    """The folder's tokenizer, whose ids must all be below vocab_size."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses PyTorch, we do not
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the tokenizer cannot be loaded: {reason}") from None
    files = tokenizer.vocab_files_names.values()  # none for ByT5
    if files and not any((folder / name).is_file() for name in files):
        # transformers made up an empty one
        raise ValueError(f"the folder has no tokenizer, none of {', '.join(files)}")
    if len(tokenizer) > vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} ids, the model only {vocab_size}")
    return tokenizer


class Weights:
    """The tensors of a checkpoint; each is checked, read and forgotten as it is taken."""

    def __init__(self, tensors: dict, quantization: dict | None):
        self.tensors, self.quantization = tensors, quantization

    def take(self, name, *shape, dtypes=(mx.float32, mx.float16, mx.bfloat16)):
        """The tensor `name`, which must have that shape."""
        if name not in self.tensors:
            raise ValueError(f"the weights have no tensor {name}")
        tensor = self.tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, where config.json asks for {shape}"
            )
        tensor = to_mlx(tensor)
        if tensor.dtype not in dtypes:
            names = ", ".join(str(d).removeprefix("mlx.core.") for d in dtypes)
            raise ValueError(
                f"{name} holds {str(tensor.dtype).removeprefix('mlx.core.')}, not {names}"
            )
        return tensor

    def matrix(self, names, rows, columns, widen=False):
        """Matrices (rows, columns) that share their input, as one of len(names) * rows rows.

        -> (weight, [], None), or (weight, [scales, biases], how) where convert.py has quantized it.
        `widen`: what computes in float16 is cast to float32.
        """
        parts: dict = {"weight": (columns, {})}
        if f"{names[0]}.scales" in self.tensors:
            if self.quantization is None:
                raise ValueError(f"{names[0]} is quantized, but config.json does not say how")
            groups = columns // self.quantization["group_size"]
            packed = columns * self.quantization["bits"] // 32
            parts = {"weight": (packed, {"dtypes": (mx.uint32,)}), "scales": (groups, {})}
            parts["biases"] = (groups, {})
        arrays = []
        for part, (width, kind) in parts.items():
            pieces = [self.take(f"{name}.{part}", rows, width, **kind) for name in names]
            arrays.append(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces))
            if widen and arrays[-1].dtype == mx.float16:
                arrays[-1] = arrays[-1].astype(mx.float32)
            mx.eval(arrays[-1])  # here, so that the pieces can go
        return arrays[0], arrays[1:], self.quantization if arrays[1:] else None

    def finish(self):
        """Raise ValueError where a tensor is left that no T5 has."""
        left = sorted(set(self.tensors) - UNUSED)
        if left:
            raise ValueError(
                f"the weights have {len(left)} tensors that this T5 does not, such as {left[0]}"
            )

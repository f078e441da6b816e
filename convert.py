"""Copy a T5 checkpoint into one new folder, cast or quantized, for `main.py --model`.

    python convert.py --model google/flan-t5-base --out flan-t5-base-4bit --quantize

The folder holds Hugging Face's files and tensor names: config.json, generation_config.json, the
tokenizer and *.safetensors. Tensors are read, changed and written one after another, and what was
written is loaded once: the result has to fit in memory, not the checkpoint.
"""

import fast_blas  # noqa: F401  isort: skip  (a fast BLAS on Linux: before mlx.core)

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

import checkpoint
from model import load

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
SHARD_BYTES = 2**30  # a file is written whenever this much has gathered


def convert(model, out, dtype=None, quantize=False, bits=4, group_size=64):
    """Write the checkpoint `model`, a folder or a Hugging Face id, to the new folder `out`.

    dtype: "float32", "bfloat16" or "float16"; None keeps what each tensor has. In float16 `load`
    widens the feed-forward's `wo` to float32, because its products overflow in many T5s.
    quantize: store matrices in `bits` (4 or 8) with a scale and a bias for each `group_size` (32,
    64 or 128) elements, as mx.quantize does. Norms and relative biases stay as they are, and so
    does a matrix whose rows the group size does not divide.

    Returns (bytes of weights before, after, names of matrices that could not be quantized).
    Raises ValueError, and leaves nothing behind, where this cannot be done.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists; the output must be a new folder")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if bits not in (4, 8) or group_size not in (32, 64, 128):
        raise ValueError(
            f"cannot quantize to {bits} bits in groups of {group_size}; bits are 4 or 8, group"
            " sizes 32, 64 or 128"
        )
    quantization = {"group_size": group_size, "bits": bits} if quantize else None
    work = None
    try:
        folder = checkpoint.find_folder(model)
        if checkpoint.read_config(folder).quantization:
            raise ValueError("this checkpoint is quantized already; convert the original one")
        tensors = checkpoint.open_tensors(folder)
        before = sum(tensor.nbytes for tensor in tensors.values())
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        skipped = _write_tensors(tensors, work, DTYPES.get(dtype), quantization)
        _copy_files(folder, work, dtype, quantization)
        after = sum(file.stat().st_size for file in work.glob("*.safetensors"))
        load(work)  # what was written works, or is not kept
        work.chmod(0o755)
        os.rename(work, out)
        return before, after, skipped
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{model}: {str(error).removeprefix(f'{work}: ')}") from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _write_tensors(tensors, work, dtype, quantization):
    """Change each tensor and write files of about SHARD_BYTES, as the hub has them."""
    embedding = next((name for name in checkpoint.EMBEDDINGS if name in tensors), None)
    shard: dict = {}
    shards: list = []
    skipped: list = []
    for name in sorted(tensors):
        tensor = checkpoint.to_mlx(tensors.pop(name))
        if name in checkpoint.UNUSED and name != embedding:
            continue  # copies, and what nobody reads
        name = checkpoint.EMBEDDINGS[0] if name == embedding else name
        if dtype is not None and mx.issubdtype(tensor.dtype, mx.floating):
            tensor = tensor.astype(dtype)
            if dtype == mx.float16 and not mx.isfinite(tensor).all():
                raise ValueError(f"{name} has values that float16 cannot hold; use bfloat16")
        arrays = {name: tensor}
        if quantization and tensor.ndim == 2 and "relative_attention_bias" not in name:
            if tensor.shape[1] % quantization["group_size"]:
                skipped.append(name)
            else:
                key = name.removesuffix("weight")
                parts = mx.quantize(tensor, **quantization)
                arrays = dict(zip([name, f"{key}scales", f"{key}biases"], parts, strict=True))
        del tensor
        mx.eval(arrays)  # now, so that what it was made from can go
        shard |= arrays
        if sum(array.nbytes for array in shard.values()) >= SHARD_BYTES:
            shards.append(_write_shard(work, len(shards), shard))
            shard = {}
    if shard:
        shards.append(_write_shard(work, len(shards), shard))
    if len(shards) == 1:
        (work / "shard-0.safetensors").rename(work / "model.safetensors")
        return skipped
    weight_map: dict = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (work / f"shard-{i}.safetensors").rename(work / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return skipped


def _write_shard(work, number, shard):
    mx.save_safetensors(str(work / f"shard-{number}.safetensors"), shard, {"format": "pt"})
    return list(shard)


def _copy_files(folder, work, dtype, quantization):
    """Everything but the weights: config.json says what was done, the rest stays as it is."""
    config = checkpoint.read_json(folder / "config.json")
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    if quantization:
        config["quantization"] = quantization
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in [f for pattern in ("*.json", "*.model", "*.txt") for f in folder.glob(pattern)]:
        if file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, work / file.name)


def main():
    parser = argparse.ArgumentParser(
        description="Copy a T5 checkpoint into one new folder, cast or quantized."
    )
    parser.add_argument(
        "--model", required=True, help="The checkpoint: a local folder or a Hugging Face id."
    )
    parser.add_argument("--out", required=True, help="The folder to write; it must not exist.")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="Cast the weights; without it they keep their type."
    )
    parser.add_argument("--quantize", action="store_true", help="Quantize the matrices.")
    parser.add_argument(
        "--bits", type=int, default=4, choices=(4, 8), help="Bits per weight (default 4)."
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=64,
        choices=(32, 64, 128),
        help="Weights that share a scale and a bias (default 64).",
    )
    options = vars(parser.parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    try:
        before, after, skipped = convert(**options)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 2
    for name in skipped:
        print(f"not quantized, {options['group_size']} does not divide its rows: {name}")
    print(f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB in {options['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

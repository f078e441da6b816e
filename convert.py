"""Copy a T5 checkpoint into one new folder, cast or quantized, for `main.py --model`.

    python convert.py --model google/flan-t5-base --out flan-t5-base-4bit --quantize

The folder holds Hugging Face's files and tensor names: config.json, generation_config.json, the
tokenizer and model.safetensors. Tensors are read and changed one after another, and what was
written is loaded once: the result has to fit in memory, not the checkpoint.
"""

import command

if __name__ == "__main__":
    command.begin(tidy=True)

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import mlx.core as mx

import checkpoint
from model import load

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


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
    out = Path(os.path.normpath(out))
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists; the output must be a new folder")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if bits not in (4, 8) or group_size not in (32, 64, 128):
        raise ValueError(
            f"{bits} bits in groups of {group_size}: must be 4 or 8 bits in groups of 32, 64 or 128"
        )
    quantization = {"group_size": group_size, "bits": bits} if quantize else None
    there = next(parent for parent in out.absolute().parents if parent.exists())
    work = there / f".{out.name}.{os.urandom(4).hex()}"
    try:
        folder = checkpoint.find_folder(model)
        if checkpoint.read_config(folder).quantization:
            raise ValueError("this checkpoint is quantized already; convert the original one")
        tensors = checkpoint.open_tensors(folder)
        before = sum(tensor.nbytes for tensor in tensors.values())
        with command.folder(work):
            skipped = _write_tensors(tensors, work, DTYPES.get(dtype), quantization)
            _copy_files(folder, work, dtype, quantization)
            after = (work / "model.safetensors").stat().st_size
            load(work)  # what was written works, or is not kept
            work.chmod(0o755)
            out.parent.mkdir(parents=True, exist_ok=True)
            os.rename(work, out)
        return before, after, skipped
    except (OSError, RuntimeError) as error:  # RuntimeError: MLX's, for instance on a full disk
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot write {out}: {reason}") from None
    except ValueError as error:
        raise ValueError(f"{model}: {str(error).removeprefix(f'{work}: ')}") from None


def _write_tensors(tensors, work, dtype, quantization):
    """Change each tensor and write them to one file."""
    embedding = next((name for name in checkpoint.EMBEDDINGS if name in tensors), None)
    for name in checkpoint.UNUSED - {embedding}:
        tensors.pop(name, None)
    written: dict = {}
    skipped = []
    for source in sorted(tensors):
        name = checkpoint.EMBEDDINGS[0] if source == embedding else source
        tensor = checkpoint.to_mlx(tensors.pop(source))
        if dtype is not None and mx.issubdtype(tensor.dtype, mx.floating):
            tensor = tensor.astype(dtype)
            if dtype == mx.float16 and not mx.isfinite(tensor).all():
                raise ValueError(f"{name} has values that float16 cannot hold; use bfloat16")
        names, parts = [name], [tensor]
        if quantization and tensor.ndim == 2 and "relative_attention_bias" not in name:
            if tensor.shape[1] % quantization["group_size"]:
                skipped.append(name)
            else:
                names += [name.removesuffix("weight") + part for part in ("scales", "biases")]
                parts = [*mx.quantize(tensor, **quantization)]
        mx.eval(parts)  # now, so that what it was made from can go
        written |= zip(names, parts, strict=True)
    mx.save_safetensors(str(work / "model.safetensors"), written, {"format": "pt"})
    return skipped


def _copy_files(folder, work, dtype, quantization):
    """Everything but the weights: config.json says what was done, the rest stays as it is."""
    config = checkpoint.read_json(folder / "config.json")
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    if quantization:
        config["quantization"] = quantization
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in folder.iterdir():
        left = file.name == "config.json" or file.name.endswith(".index.json")
        if file.suffix in (".json", ".model", ".txt") and not left:
            shutil.copyfile(file, work / file.name)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Copy a T5 to a new folder, cast or quantized. Defaults in parentheses.",
        argument_default=argparse.SUPPRESS,  # what is not given is left to convert()
    )
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="a local folder or a Hugging Face id")
    add("--out", required=True, metavar="FOLDER", help="what to write; it must not exist")
    add("--dtype", metavar="D", help="float32, bfloat16 or float16 (as it is)")
    add("--quantize", action="store_true", help="quantize the matrices")
    add("--bits", type=int, metavar="N", help="4 or 8 bits per weight (4)")
    add("--group-size", type=int, metavar="N", help="32, 64 or 128 weights share a scale (64)")
    options = vars(command.parse(parser, argv))
    if "quantize" not in options and {"bits", "group_size"} & options.keys():
        parser.error("--bits and --group-size need --quantize")
    before, after, skipped = convert(**options)
    for name in skipped:
        print(f"not quantized, the group size does not divide its rows: {name}")
    print(f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB in {options['out']}")


if __name__ == "__main__":
    sys.exit(command.run("convert.py", main))

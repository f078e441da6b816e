"""Several processes that work together, started by `mlx.launch`: what they tell each other.

Each is a rank, by number. Rank 0 alone reads and prints. Where the process was not launched as one
of several, the group is None and nothing here needs MLX.
"""

import hashlib
import json
import os
import sys

NUMBERS = "MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"  # mlx.launch's, Open MPI's, MPICH's
SAMPLES, SAMPLE = 256, 4096  # of a file: how many, bytes of each


def number():
    """This process's rank; None where it was not launched as one of several."""
    return next((int(os.environ[name]) for name in NUMBERS if name in os.environ), None)


def join():
    """The group of all ranks, or None. ValueError where they do not find each other."""
    if number() is None:
        return None
    import mlx.core as mx

    try:
        group = mx.distributed.init()
    except RuntimeError as error:
        raise ValueError(f"the processes do not find each other: {error}") from None
    if group.size() == 1:
        return None
    # A lost connection is an exception, and MLX writes the same to standard error many times.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return group


def exchange(value, group):
    """A value that JSON can hold, from each rank -> the list of all."""
    if group is None:
        return [value]
    import mlx.core as mx
    import numpy as np

    data = json.dumps(value).encode()
    all_sizes = mx.distributed.all_gather(mx.array([len(data)]), group=group)
    most = max(np.array(all_sizes).tolist())
    padded = mx.array(np.frombuffer(data.ljust(most), np.uint8))
    everything = np.array(mx.distributed.all_gather(padded, group=group)).tobytes()
    return [json.loads(everything[i : i + most]) for i in range(0, len(everything), most)]


def agree(function, group):
    """function() on every rank; an error on any of them is a ValueError on all."""
    if group is None:
        return function()
    value = failure = None
    try:
        value = function()
    except (ValueError, OSError) as error:
        failure = str(error)
    for rank, message in enumerate(exchange(failure, group)):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}")
    return value


def share(function, group):
    """function() on rank 0, whose value all ranks get."""
    value = agree(lambda: None if group and group.rank() else function(), group)
    return value if group is None else exchange(value, group)[0]


def check_equal(what, value, group):
    """ValueError on all ranks unless rank 0 has the same value as each of the others."""
    first, *others = exchange(value, group)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ValueError(f"ranks 0 and {rank} have different {what}")


def all_sum(x, group):
    """The sum of the ranks' x, in float32 and in the order of the ranks: `mx.distributed.all_sum`
    sums each part of an array in another order, so that bits would depend on the number of rows."""
    import mlx.core as mx

    parts = mx.distributed.all_gather(x[None], group=group).astype(mx.float32)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def fingerprint(folder):
    """A hash of a checkpoint's config and of samples of its weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "generation_config.json"):
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name} {size}".encode())
                for i in range(SAMPLES):
                    file.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE))
    return digest.hexdigest()

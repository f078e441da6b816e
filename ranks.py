"""Several processes that work together, started by `mlx.launch`: what they tell each other.

Each is a rank, by number. Rank 0 alone reads and prints. Where the process was not launched as one
of several, the group is None and nothing here needs MLX.
"""

import hashlib
import itertools
import json
import os
import socket
import stat
import sys
import threading
from pathlib import Path

NUMBERS = "MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"  # mlx.launch's, Open MPI's, MPICH's
SAMPLES, SAMPLE = 256, 4096  # of a file: how many, bytes of each
LOST = "the connection to another rank was lost"
PATIENCE = 2  # seconds that an error has to show by itself once a connection is lost
turns, finished = itertools.count(), threading.Event()


def number():
    """This process's rank; None where it was not launched as one of several."""
    return next((int(os.environ[name]) for name in NUMBERS if name in os.environ), None)


def join():
    """The group of all ranks, or None. ValueError where they do not find each other."""
    hosts = os.environ.get("MLX_HOSTFILE")
    if number() is None or (hosts and not Path(hosts).read_text().strip()):
        return None  # mlx.launch -n 1 names nobody
    import mlx.core as mx

    before = connections()
    try:
        group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise ValueError(f"the processes do not find each other: {error}") from None
    if group.size() == 1:
        return None
    # A lost connection is an exception, and MLX writes the same to standard error many times.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if hosts:  # the ring, which may also wait forever for what a dead rank does not send
        peers = [socket.socket(fileno=os.dup(number)) for number in connections() - before]
        threading.Thread(target=watch, args=[peers], daemon=True).start()
    return group


def connections():
    """The numbers of this process's files that are connected sockets."""
    found = set()
    for number in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as file:
                    file.getpeername()
                found.add(number)
        except OSError:
            pass
    return found


def is_open(peer):
    try:
        return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def watch(peers):
    """Ends this process where a rank has gone before all of them have finished."""
    while all(map(is_open, peers)):
        if finished.wait(0.2):
            return
    if not finished.wait(PATIENCE):
        print(f"\n{os.path.basename(sys.argv[0])}: error: {LOST}", file=sys.stderr)
        os._exit(2)


def leave(group):
    """The end of the work of all ranks, for which each waits."""
    exchange(None, group)
    finished.set()


def exchange(value, group):
    """A value that JSON can hold, from each rank -> the list of all."""
    if group is None:
        return [value]
    import mlx.core as mx
    import numpy as np

    # What comes over a lost connection may be anything that was in memory, an old message too.
    turn = next(turns)
    data = json.dumps([turn, value]).encode()
    heads = np.array(mx.distributed.all_gather(mx.array([[turn, len(data)]]), group=group))
    if any(heads[:, 0] != turn):
        raise ConnectionError(LOST)
    most = int(max(heads[:, 1]))
    padded = mx.array(np.frombuffer(data.ljust(most), np.uint8))
    everything = np.array(mx.distributed.all_gather(padded, group=group)).tobytes()
    try:
        messages = [json.loads(everything[i : i + most]) for i in range(0, len(everything), most)]
        if any(number != turn for number, _ in messages):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise ConnectionError(LOST) from None
    return [value for _, value in messages]


FAILURES = ValueError, OSError, RuntimeError, MemoryError  # RuntimeError: MLX's


def agree(function, group):
    """function() on every rank; an error on any of them is a ValueError on all."""
    if group is None:
        return function()
    value = failure = None
    try:
        value = function()
    except FAILURES as error:
        failure = str(error) or type(error).__name__
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


def same_checkpoint(find, group):
    """find() -> a folder on every rank; ValueError unless all of them hold the same checkpoint."""
    folder = agree(find, group)
    if group:
        check_equal("checkpoints", agree(lambda: fingerprint(folder), group), group)
    return folder


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
    """A hash of a checkpoint's config and tokenizer and of samples of its weights."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.suffix in (".json", ".model", ".txt"):
            digest.update(f"{path.name} ".encode() + path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name} {size}".encode())
                for i in range(SAMPLES):
                    file.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE))
    return digest.hexdigest()

"""All that MLX's CPU backend needs, in one file that a reader with a GPU can skip.

`prepare(model)` makes an `nn.Module` fast on the CPU and gives a row of its results the same bits
among any others:

- MLX's Linux wheel links a reference BLAS of about 2 GFLOP/s. `load_blas` puts OpenBLAS in its
  place, from the package scipy-openblas32, on one thread: MLX's streams share the work instead.
- Leaf modules are swapped, as `nn.quantize` does: the matrix of a `BlockLinear` lies so that it is
  read once from memory, in sequence, whatever the number of rows.
- A T5 gets `KeysAndValues`, laid out for its attention.

Whether a row's bits depend on the number of rows is tried before products of that kind are used;
where they do, each row becomes a product of its own.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import os
import platform
import resource
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

FEW = 32  # the most rows of a pass
CHUNK = 256  # keys that one product of attention sums over
STEP = 64  # where there are no more than CHUNK keys, they grow in such steps
WORTH = 300  # microseconds of work, roughly, that are worth a stream
THREADS = "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS"


def in_use():
    """Is the CPU the device that computes?"""
    return mx.default_device() == mx.Device(mx.cpu)


@functools.cache
def streams():
    """A stream for each core, up to 8; the first is the default one."""
    more = min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1, 8) - 1
    return [None] + [mx.new_thread_local_stream(mx.cpu) for _ in range(more)]


# A fast BLAS


@functools.cache
def load_blas():
    """Let MLX's matrix products run on OpenBLAS -> the name of its kernels, "" for any other
    library, None where MLX's slow one stays, which is said in a line.

    FAST_BLAS=0 in the environment switches this off; FAST_BLAS=PATH takes another library, one that
    exports cblas_sgemm. OPENBLAS_CORETYPE and OPENBLAS_NUM_THREADS are heeded.
    """
    choice = os.environ.get("FAST_BLAS", "")
    if sys.platform != "linux":
        return ""  # Accelerate
    if choice == "0":
        return None
    try:
        if choice:
            function, kernels = ctypes.CDLL(choice).cblas_sgemm, b""
        else:
            library = open_openblas()
            library.scipy_openblas_get_corename.restype = ctypes.c_char_p
            function, kernels = library.scipy_cblas_sgemm, library.scipy_openblas_get_corename()
        redirect(function)
        return kernels.decode()
    except (ImportError, OSError, AttributeError, LookupError) as error:
        print(
            "cpu.py: MLX's matrix products run on its slow reference BLAS, tens of times slower;"
            f" remedy: pip install scipy-openblas32 ({' '.join(str(error).split())})",
            file=sys.stderr,
        )
        return None


def open_openblas():
    """OpenBLAS asks the environment once, while it is loaded; so does NumPy's own, at another time.

    Of its kernels without AVX-512 those that fuse multiplication and addition round the edges of a
    product in other ways than its middle.
    """
    wanted = {} if any(name in os.environ for name in THREADS) else {THREADS[0]: "1"}
    if platform.machine() == "x86_64" and "OPENBLAS_CORETYPE" not in os.environ:
        flags = Path("/proc/cpuinfo").read_text()
        if " avx512f " not in flags:
            wanted["OPENBLAS_CORETYPE"] = "Sandybridge" if " avx " in flags else "Nehalem"
    os.environ |= wanted
    try:
        import scipy_openblas32

        return ctypes.CDLL(str(Path(scipy_openblas32.get_lib_dir(), "libscipy_openblas.so")))
    finally:
        for name in wanted:
            del os.environ[name]


def redirect(function):
    """Let the calls that MLX makes of cblas_sgemm go to another function: overwrite its address in
    the table of imported functions, which libmlx.so has in memory since it was loaded."""

    def address(function):
        return struct.pack("<Q", ctypes.cast(function, ctypes.c_void_p).value)

    with open("/proc/self/maps") as maps:
        areas = [line.split(maxsplit=5) for line in maps if line.endswith("/libmlx.so\n")]
    old, found = address(ctypes.CDLL(areas[0][5].strip()).cblas_sgemm), False
    for area, permissions, *_ in areas:
        start, end = (int(bound, 16) for bound in area.split("-"))
        if not permissions.startswith("r") or "x" in permissions:
            continue
        place = ctypes.string_at(start, end - start).find(old)
        if place >= 0:
            page = (start + place) // mmap.PAGESIZE * mmap.PAGESIZE
            mprotect = ctypes.CDLL(None, use_errno=True).mprotect
            mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
            if mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
                raise OSError(ctypes.get_errno(), "mprotect failed")
            ctypes.memmove(start + place, address(function), len(old))
            found = True
    if not found:
        raise LookupError("libmlx.so does not import cblas_sgemm")


# Matrices


class BlockLinear(nn.Module):
    """nn.Linear in float32: x (L, K) @ weight (N, K).T + bias.

    `blocks` is (B, P, depth, width): the columns of the matrix in B blocks, each in P pieces whose
    products are added, filled up with zeros. There are many narrow blocks, or for the many rows of
    a prompt (`few` is False) one for each stream.
    """

    def __init__(self, weight, bias=None, few=True):
        super().__init__()
        self.rows, self.columns = weight.shape
        width, depth = narrow_blocks()
        if not few:
            parts = used_streams(10 * FEW, weight)
            width, depth = math.ceil(self.rows / parts / 16) * 16, self.columns
        pieces = math.ceil(self.columns / depth)
        if self.rows % width or self.columns % pieces:
            weight = mx.pad(weight, [(0, -self.rows % width), (0, -self.columns % pieces)])
        weight = weight.reshape(-1, width, pieces, weight.shape[1] // pieces)
        self.blocks = mx.contiguous(weight.transpose(0, 2, 3, 1))
        self.alone = few and not rows_of_products_agree(self.columns)
        if bias is not None:
            self.bias = bias

    @property
    def weight(self):
        """The matrix (N, K) itself, for a model that computes with it."""
        matrix = self.blocks.transpose(0, 3, 1, 2).flatten(0, 1).flatten(1)
        return matrix[: self.rows, : self.columns]

    def __call__(self, x):
        *outer, _ = x.shape
        x = x.astype(mx.float32).reshape(math.prod(outer), self.columns)
        blocks = self.blocks
        if len(x) > FEW and len(blocks) > len(streams()):  # worth a copy without gaps
            blocks = blocks.transpose(1, 2, 0, 3).reshape(1, 1, -1, blocks.shape[3] * len(blocks))
        y = multiply(x, blocks, self.alone and len(x) <= FEW)
        y = y if y.shape[1] == self.rows else y[:, : self.rows]
        y = y.reshape(*outer, self.rows)
        return y + self.bias if "bias" in self else y


class BlockEmbedding(BlockLinear):
    """nn.Embedding for a table that is the output head as well."""

    def as_linear(self, x):
        return super().__call__(x)

    def __call__(self, ids):
        width = self.blocks.shape[3]
        return self.blocks[ids // width, ..., ids % width].flatten(-2)[..., : self.columns]


def used_streams(rows, *read, more=0):
    """How many streams are worth it for `rows` of a product that reads these arrays, each row
    costing an eighth of the reading, and for more microseconds of other work."""
    microseconds = sum(array.nbytes for array in read) / 25e3 * (1 + rows / 8) + more
    return min(len(streams()), math.ceil(microseconds / WORTH))


def multiply(x, blocks, alone=False):
    """x (L, K), blocks (B, P, depth, width) -> (L, B * width), the blocks shared by the streams.
    Each row is a product by itself where they are `alone`."""
    _, pieces, depth, _ = blocks.shape
    if x.shape[1] < pieces * depth:
        x = mx.pad(x, [(0, 0), (0, pieces * depth - x.shape[1])])
    if pieces > 1:
        x = mx.contiguous(x.reshape(len(x), pieces, depth).swapaxes(0, 1))
    count = min(used_streams(x.shape[-2], blocks), len(blocks))
    share, parts = math.ceil(len(blocks) / count), []
    for i, stream in enumerate(streams()[:count]):
        part = blocks if count == 1 else blocks[i * share : (i + 1) * share]
        parts.append(product(x, part, alone, stream))
    y = parts[0] if count == 1 else mx.concatenate(parts, axis=3 if share == 1 else 0)
    return y.transpose(1, 2, 0, 3).reshape(y.shape[2], -1)


def product(x, blocks, alone, stream=None):
    """x (P, L, depth), or for one piece (L, depth), blocks (B, P, depth, width) ->
    (B, 1, L, width)"""
    if alone:
        y = mx.matmul(x[..., None, :], blocks[:, :, None], stream=stream).squeeze(3)
    else:
        y = mx.matmul(x, blocks, stream=stream)
    return y if blocks.shape[1] == 1 else y.sum(axis=1, keepdims=True, stream=stream)


@functools.cache
def narrow_blocks():
    """The width of narrow blocks, and how many elements one product sums over. OpenBLAS with
    AVX-512 does not copy the matrix where FEW * width * depth <= 10**6."""
    direct = load_blas() in ("SkylakeX", "Cooperlake", "SapphireRapids")
    return (32, 960) if direct else (64, 2**31)


@functools.cache
def rows_of_products_agree(columns):
    """Do a row's bits in a product with narrow blocks not depend on the other rows?"""
    width, depth = narrow_blocks()
    pieces = math.ceil(columns / depth)
    x, blocks = random((FEW, columns), (3, pieces, math.ceil(columns / pieces), width))
    whole = multiply(x, blocks)
    same = [mx.array_equal(multiply(x[:n], blocks), whole[:n]) for n in range(1, FEW)]
    same += [mx.array_equal(multiply(x[n:], blocks), whole[n:]) for n in range(1, FEW)]
    return mx.stack(same).all().item()


def random(*shapes):
    return [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]


# Attention


class KeysAndValues:
    """What one layer's attention looks at; see layers.KeysAndValues.

    Keys lie as (heads, d_kv, positions), values as (heads, positions, d_kv), in float32. Sums over
    positions are made in chunks, and what is masked adds exact zeros, so that a row's bits depend
    neither on the number of rows nor on how many keys come after its own.
    """

    def __init__(self, keys=None, values=None):
        self.text = None if keys is None else (keys, values)
        self.keys: Any = None
        self.values: Any = None
        self.mask: Any = None

    @staticmethod
    def visible(positions):
        step = STEP if positions <= CHUNK else CHUNK
        return math.ceil(positions / step) * step

    @staticmethod
    def room(position):
        return math.inf

    def update(self, k, v, position):
        """Write k, v (heads, L, d_kv) at `position`, over what was there."""
        heads, length, d_kv = k.shape
        end = position + length
        if self.keys is None:
            self.keys, self.values = mx.zeros((heads, d_kv, 0)), mx.zeros((heads, 0, d_kv))
        room = self.visible(end) - self.keys.shape[2]
        if room > 0:
            self.keys = mx.pad(self.keys, [(0, 0), (0, 0), (0, room)])
            self.values = mx.pad(self.values, [(0, 0), (0, room), (0, 0)])
        self.keys[..., position:end] = k.swapaxes(1, 2)
        self.values[:, position:end] = v

    def attend(self, q, bias=None):
        """q (heads, L, d_kv), bias (heads, L, S) -> (heads, L, d_kv), S the first positions."""
        if self.text and bias is not None:
            return attend_whole(q, *self.text, bias)
        if self.text:
            k, v = self.text
            size, pieces = k.shape[1], math.ceil(k.shape[1] / CHUNK)
            empty = 16 * pieces * math.ceil(size / pieces / 16) - size
            keys = mx.pad(k.swapaxes(1, 2).astype(mx.float32), [(0, 0), (0, 0), (0, empty)])
            self.keys = mx.contiguous(keys)
            self.values = mx.pad(v.astype(mx.float32), [(0, 0), (0, empty), (0, 0)])
            self.mask = mx.where(mx.arange(size + empty) < size, 0.0, -math.inf)
            self.text = None
        mask = self.mask if bias is None else bias
        keys, values = self.keys[..., : mask.shape[-1]], self.values[:, : mask.shape[-1]]
        alone = not rows_of_attention_agree(q.shape[2])
        return attend(q.astype(mx.float32), keys, values, mask, alone).astype(q.dtype)


class KVCache:
    """KeysAndValues with the calls that a model of mlx-lm makes of a layer's cache.

    MLX's own attention reads it: where its products are small and OpenBLAS has AVX-512, a row's
    bits do not depend on the number of rows; there is no such promise elsewhere.
    """

    def __init__(self, window=None):
        """window: of how many tokens a sliding window is; what has left it is kept."""
        self.memory, self.window, self.offset = KeysAndValues(), window, 0

    state = property(lambda self: (self.memory.keys, self.memory.values))
    keys = property(lambda self: self.memory.keys[None].swapaxes(2, 3))
    values = property(lambda self: self.memory.values[None])

    def update_and_fetch(self, keys, values):
        """keys, values (1, heads, L, d_kv) -> all of them, some more, which make_mask masks."""
        _, heads, length, d_kv = keys.shape
        if self.offset == 0:
            self.memory.keys = mx.zeros((heads, d_kv, 0), keys.dtype)
            self.memory.values = mx.zeros((heads, 0, values.shape[3]), values.dtype)
        self.memory.update(keys[0], values[0], self.offset)
        self.offset += length
        return self.keys_and_values()

    def keys_and_values(self):
        visible = self.memory.visible(self.offset)
        return self.keys[..., :visible, :], self.values[..., :visible, :]

    def make_mask(self, n, window_size=None, return_array=True):
        rows = mx.arange(self.offset, self.offset + n)[:, None]
        columns = mx.arange(self.memory.visible(self.offset + n))
        mask, window = columns <= rows, window_size or self.window
        return mask & (columns > rows - window) if window else mask

    def trim(self, n):
        self.offset -= n


def attend(q, keys, values, mask, alone=False):
    """q (heads, L, d_kv), keys (heads, d_kv, S), values (heads, S, d_kv), mask (S,) or (heads, L,
    S) -> (heads, L, d_kv), the heads shared by the streams. alone: each row's products by
    themselves."""
    heads, rows, _ = q.shape
    exps = 0.008 * heads * rows * keys.shape[2]  # and what belongs to them, in microseconds
    count = min(heads, used_streams(rows, keys, values, more=exps))
    if count == 1:
        return attend_heads(q, keys, values, mask, alone)
    share, parts = math.ceil(heads / count), []
    for i, stream in enumerate(streams()[:count]):
        part = slice(i * share, (i + 1) * share)
        own = mask if mask.ndim == 1 else mask[part]
        with mx.stream(stream or mx.default_stream(mx.cpu)):
            parts.append(attend_heads(q[part], keys[part], values[part], own, alone))
    return mx.concatenate(parts)


def attend_heads(q, keys, values, mask, alone):
    heads, rows, d_kv = q.shape
    if alone and mask.ndim == 3:  # products of one size, whatever is visible
        room = -mask.shape[2] % CHUNK
        keys = mx.pad(keys, [(0, 0), (0, 0), (0, room)])
        values = mx.pad(values, [(0, 0), (0, room), (0, 0)])
        mask = mx.pad(mask, [(0, 0), (0, 0), (0, room)], constant_values=-math.inf)
    pieces = math.ceil(keys.shape[2] / CHUNK)
    if alone:
        parts = keys.reshape(heads, 1, d_kv, pieces, -1).swapaxes(2, 3)
        scores = (q[:, :, None, None] @ parts).reshape(heads, rows, -1) + mask
    else:
        scores = q @ keys + mask
    p = exp(scores - scores.max(axis=-1, keepdims=True))
    total = p.sum(axis=-1, keepdims=True)
    if pieces > 1 or alone:
        p = p.reshape(heads, rows, pieces, -1).swapaxes(1, 2)
        values = values.reshape(heads, pieces, -1, d_kv)
    if alone:
        y = (p[..., None, :] @ values[:, :, None]).squeeze(3)
    else:
        y = p @ values
    y = y.sum(axis=1) if y.ndim == 4 else y
    return y / total


@functools.cache
def rows_of_attention_agree(d_kv):
    """In `attend`: do a row's bits not depend on other rows, nor on masked keys?"""
    most = 3 * CHUNK
    q, keys, values, bias = random((1, FEW, d_kv), (1, d_kv, most), (1, most, d_kv), (FEW, most))

    def rows(length, position, visible):
        seen = mx.arange(visible) <= position + mx.arange(length)[:, None]
        mask = mx.where(seen, bias[:length, :visible], -math.inf)
        return attend(q[:, :length], keys[..., :visible], values[:, :visible], mask)

    same, sizes = [], [*range(STEP, CHUNK, STEP), *range(CHUNK, most + 1, CHUNK)]
    for size in sizes:
        first = size - FEW
        whole, few_keys = rows(FEW, first, size), rows(FEW, STEP - FEW, STEP)
        for n in range(1, FEW):
            same.append(mx.array_equal(rows(n, first, size), whole[:, :n]))
            same.append(mx.array_equal(rows(n, STEP - FEW, size), few_keys[:, :n]))
        same += [mx.array_equal(rows(FEW, first, other), whole) for other in sizes if other > size]
    return mx.stack(same).all().item()


def exp(x):
    """e to the x; in MLX on the CPU a power costs a half or a third of it."""
    return mx.power(math.e, x) if in_use() else mx.exp(x)


# For the many rows of a prompt: NumPy, whose exp is several times as fast, on all cores


@functools.cache
def workers():
    return ThreadPoolExecutor(len(streams()))


def attend_whole(q, k, v, bias):
    """The same for an encoder: q (heads, L, d_kv), k, v (heads, S, d_kv), bias (heads, L, S)."""
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    share = math.ceil(len(q) / len(streams()))
    parts = [(stream, slice(i * share, (i + 1) * share)) for i, stream in enumerate(streams())]
    parts = [(stream, heads) for stream, heads in parts if heads.start < len(q)]

    def softmax(p):
        p -= p.max(axis=-1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(axis=-1, keepdims=True)

    scores = []
    for stream, heads in parts:
        scores.append(mx.addmm(bias[heads], q[heads], k[heads].swapaxes(1, 2), stream=stream))
    mx.eval(scores)
    memory = [head for part in scores for head in np.array(part, copy=False)]  # not copied
    list(workers().map(softmax, memory))
    y = [mx.matmul(p, v[heads], stream=s) for p, (s, heads) in zip(scores, parts, strict=True)]
    whole = mx.concatenate(y)
    mx.eval(whole)  # so that the scores can go
    return whole


def memory_left():
    """Bytes that this process could still get: an upper bound, by what the system tells."""
    page, limits = os.sysconf("SC_PAGE_SIZE"), []
    limits.append(page * os.sysconf("SC_PHYS_PAGES"))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        statm = Path("/proc/self/statm")
        used = page * int(statm.read_text().split()[0]) if statm.exists() else 0
        limits.append(limit - used + mx.get_cache_memory())
    for name in "memory.max", "memory/memory.limit_in_bytes":  # of a container
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits)


def check_memory(heads, queries, keys):
    """ValueError where the bias and the scores of `attend_whole` have no room."""
    # Each row of the bias is cut from a longer one.
    needed = 4 * heads * queries * (2 * keys + queries)
    left = memory_left() if in_use() else math.inf
    if needed > left:
        has = f"there are {max(left, 0) / 1e9:.1f} GB"
        raise ValueError(
            f"the prompt of {keys} tokens is too long: encoding it takes {needed / 1e9:.1f} GB of"
            f" memory or more, {has}"
        )


class Activation(nn.Module):
    """layers.Activation; for many rows in NumPy where it has an exp in it."""

    def __init__(self, original):
        super().__init__()
        self.original = original

    def __call__(self, x):
        if self.training or len(x) <= FEW or self.original.name in ("relu", "gelu"):
            return self.original(x)

        def part(x):
            gelu = self.original.name.startswith("gelu")
            factor = math.sqrt(8 / math.pi) * (1 + 0.044715 * x * x) if gelu else 1
            with np.errstate(over="ignore"):
                return x / (1 + np.exp(-factor * x))

        mx.eval(x)
        memory = np.array(x, copy=False)
        parts = (memory[i : i + FEW] for i in range(0, len(x), FEW))
        return mx.array(np.concatenate(list(workers().map(part, parts))))


# Modules


class RMSNorm(nn.Module):
    """nn.RMSNorm in fewer operations, for a float32 input."""

    def __init__(self, weight, eps):
        super().__init__()
        columns = len(weight)
        self.weight = weight[None].astype(mx.float32) * columns**0.5
        self._eps = mx.array([[eps * columns]])

    def __call__(self, x):
        return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + self._eps) * self.weight


def prepare(model, few=lambda path, module: isinstance(module, nn.Linear)):
    """Make an nn.Module fast and exact on the CPU; nothing happens where that is not the device.

    few(path, module): is a Linear there for the few rows of a pass, rather than for a prompt's; is
    an Embedding the output head as well? What is not float32 stays as it is. `model.alpha` becomes
    what one more row adds to the cost of a pass.
    """
    if not in_use():
        return
    fast = load_blas() is not None

    def swap(path, module):
        nonlocal fast
        if type(module) is nn.RMSNorm and module.weight.dtype == mx.float32:
            return RMSNorm(module.weight, module.eps)
        if type(module).__name__ == "Activation":
            return Activation(module)
        pays, weight = few(path, module), module.get("weight")
        if weight is None or weight.dtype != mx.float32:
            fast = fast and not pays
        elif type(module) is nn.Linear:
            return BlockLinear(weight, module.get("bias"), pays)
        elif type(module) is nn.Embedding and pays:
            return BlockEmbedding(weight)
        return module

    leaves = tree_map_with_path(swap, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    model.train(model.training)
    model.keys_and_values = KeysAndValues
    model.alpha = 0.1 if fast else 1.0

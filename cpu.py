"""All that MLX's CPU backend needs, in one file that a reader with a GPU can skip.

`prepare(model)` makes any float32 `nn.Module` fast on the CPU, and gives a row of its results the
same bits among any others. It does three things:

- MLX's Linux wheel links a reference BLAS of about 2 GFLOP/s; `load_blas` puts OpenBLAS, from the
  package scipy-openblas32, in its place.
- Leaf modules are swapped, as `nn.quantize` does: the matrix of a `BlockLinear` lies in narrow
  blocks, which OpenBLAS reads once from memory, whatever the number of rows.
- A model with `model.keys_and_values` (T5 here) gets `KeysAndValues`, attention in chunks of keys.

In which of these products a row's bits depend on the number of rows is found by trying; where they
do, each row becomes a product of its own.
"""

import ctypes
import functools
import math
import mmap
import os
import platform
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

FEW = 32  # rows of a narrow pass, the most that are one product
BLOCK = 32  # columns of a block
DEPTH = 960  # longest sum: OpenBLAS computes up to 10**6 multiplications in its most direct way
CHUNK = 256  # keys of a product of attention
STEP = 64  # where these are all, there may be fewer, in such steps
QUERIES = 512  # of a prompt whose scores are in memory at the same time


def in_use():
    """Is the CPU the device that computes?"""
    return mx.default_device() == mx.Device(mx.cpu)


# A fast BLAS


def load_blas():
    """Let MLX's matrix products run on OpenBLAS; True where they do, or need not (macOS).

    FAST_BLAS=0 in the environment switches this off; FAST_BLAS=PATH takes another library, one that
    exports cblas_sgemm. OPENBLAS_CORETYPE chooses OpenBLAS's kernels, as always.
    """
    choice = os.environ.get("FAST_BLAS", "")
    if sys.platform != "linux" or choice == "0":
        return sys.platform != "linux"
    try:
        if choice:
            function = ctypes.CDLL(choice).cblas_sgemm
        else:
            function = _openblas().scipy_cblas_sgemm
        _redirect("libmlx.so", b"cblas_sgemm", function)
        return True
    except (ImportError, OSError, AttributeError, StopIteration) as error:
        _warn(f"{choice or 'scipy-openblas32'}: {' '.join(str(error).split())}")
        return False


@functools.cache
def _warn(reason):
    print(
        "cpu.py: MLX's matrix products run on its slow reference BLAS, tens of times slower"
        f" ({reason}); remedy: pip install scipy-openblas32",
        file=sys.stderr,
    )


@functools.cache
def _openblas():
    # Kernels without AVX-512 that fuse multiplication and addition round the edges of a product
    # in other ways than its middle. OpenBLAS asks the environment once, when it is loaded.
    kernels = None
    if platform.machine() == "x86_64" and "OPENBLAS_CORETYPE" not in os.environ:
        flags = Path("/proc/cpuinfo").read_text()
        kernels = None if " avx512f " in flags else "Sandybridge" if " avx " in flags else "Nehalem"
    if kernels:
        os.environ["OPENBLAS_CORETYPE"] = kernels
    try:
        import scipy_openblas32  # it may load the library itself

        return ctypes.CDLL(str(Path(scipy_openblas32.get_lib_dir(), "libscipy_openblas.so")))
    finally:
        if kernels:
            del os.environ["OPENBLAS_CORETYPE"]


def _redirect(library, symbol, function):
    """Let a loaded library's calls of a function that it imports go to another one.

    The address lies in a table in the library's memory, which is described there in the terms of
    the ELF format (64 bits): program headers -> dynamic section -> relocations.
    """
    read = ctypes.string_at
    with open("/proc/self/maps") as maps:
        base = next(int(m.split("-")[0], 16) for m in maps if m.rstrip().endswith(f"/{library}"))
    (headers,), (count,) = (
        struct.unpack("<Q", read(base + 32, 8)),
        struct.unpack("<H", read(base + 56, 2)),
    )
    for header in range(base + headers, base + headers + 56 * count, 56):
        kind, _, _, address = struct.unpack("<IIQQ", read(header, 24))
        if kind == 2:  # PT_DYNAMIC
            at = base + address
    tags = {}
    while tag := struct.unpack("<Q", read(at, 8))[0]:
        tags[tag] = struct.unpack("<Q", read(at + 8, 8))[0]
        at += 16
    names, symbols, table, size = tags[5], tags[6], tags[23], tags[2]  # STRTAB, SYMTAB, JMPREL, …
    for entry in range(table, table + size, 24):
        slot, info = struct.unpack("<QQ", read(entry, 16))
        name = names + struct.unpack("<I", read(symbols + 24 * (info >> 32), 4))[0]
        if read(name, len(symbol) + 1) == symbol + b"\0":
            page = (base + slot) // mmap.PAGESIZE * mmap.PAGESIZE
            mprotect = ctypes.CDLL(None, use_errno=True).mprotect
            mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
            if mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
                raise OSError(ctypes.get_errno(), "mprotect failed")
            target = ctypes.cast(function, ctypes.c_void_p).value
            ctypes.c_void_p.from_address(base + slot).value = target
            return
    raise OSError(f"{library} imports no {symbol.decode()}")


# Matrices


class BlockLinear(nn.Module):
    """x (L, K) @ weight (N, K).T in float32; nn.Linear with its matrix as OpenBLAS likes it.

    `blocks` is (N / width, K, width), N filled up with zeros: one block, or narrow ones.
    """

    def __init__(self, weight, bias=None):
        super().__init__()
        self.rows, columns = weight.shape
        width, self.together = find_layout(self.rows, columns)
        if self.rows % width:
            weight = mx.pad(weight, [(0, -self.rows % width), (0, 0)])
        self.blocks = mx.contiguous(weight.reshape(-1, width, columns).swapaxes(1, 2))
        if bias is not None:
            self.bias = bias

    def __call__(self, x):
        *outer, columns = x.shape
        x = x.astype(mx.float32).reshape(-1, columns)
        if len(self.blocks) == 1 or len(x) <= FEW:
            y = multiply(x, self.blocks, self.together)
        elif len(x) <= 3 * FEW:
            parts = (x[i : i + FEW] for i in range(0, len(x), FEW))
            y = mx.concatenate([multiply(part, self.blocks, self.together) for part in parts])
        else:
            y = x @ self.blocks.swapaxes(0, 1).reshape(columns, -1)
        y = y[:, : self.rows].reshape(*outer, self.rows)
        return y + self.bias if "bias" in self else y


class BlockEmbedding(BlockLinear):
    """nn.Embedding for a table that is the output head as well."""

    def as_linear(self, x):
        return super().__call__(x)

    def __call__(self, ids):
        width = self.blocks.shape[2]
        return self.blocks[ids // width, :, ids % width]


def multiply(x, blocks, together):
    """x (L, K), blocks (B, K, W) -> (L, B * W).

    together: rows of a product; 0: each row is one of its own; else L is filled up to a multiple.
    """
    length, (count, columns, width) = len(x), blocks.shape
    if together == 0:
        y = (x[:, None] @ blocks[:, None]).squeeze(2)
    else:
        x = mx.pad(x, [(0, -length % together), (0, 0)]) if length % together else x
        pieces = math.ceil(columns / DEPTH) if count > 1 else 1
        deep = math.ceil(columns / pieces)
        y = 0
        for i in range(0, columns, deep):
            part = (x, blocks) if pieces == 1 else (x[:, i : i + deep], blocks[:, i : i + deep])
            y = y + product(*part) if i else product(*part)
    return y.swapaxes(0, 1).reshape(-1, count * width)[:length]


def product(x, blocks):
    """x (L, K) @ blocks (B, K, W) -> (B, L, W), large ones on two cores."""
    if len(blocks) == 1 or len(x) < 6 or blocks.nbytes < 2**20:
        return x @ blocks
    half = len(blocks) // 2
    return mx.concatenate([x @ blocks[:half], mx.matmul(x, blocks[half:], stream=second_stream())])


@functools.cache
def second_stream():
    return mx.new_thread_local_stream(mx.cpu)


def find_layout(rows, columns):
    """How a matrix (rows, columns) is to lie: the width of its blocks, and `together`."""
    # So many columns of the product have the same kinds of edges as all.
    few = min(rows, max(2**18 // columns // 64, 2) * 64 + rows % 64)
    width, together = try_layouts(few, columns)
    return width or rows, together


@functools.cache
def try_layouts(rows, columns):
    """The first layout with which each of 1 to FEW rows has the same bits among any others; a width
    of 0 stands for one block."""
    x = mx.random.normal((FEW, columns), key=mx.random.key(0))
    weight = mx.random.normal((rows, columns), key=mx.random.key(1))
    weight = mx.pad(weight, [(0, -rows % BLOCK), (0, 0)])
    narrow = mx.contiguous(weight.reshape(-1, BLOCK, columns).swapaxes(1, 2))
    whole = mx.contiguous(weight[:rows].T)[None]
    layouts = [(narrow, 1)] if has_small_kernels() else [(whole, 1), (narrow, 1), (narrow, 4)]
    for blocks, together in layouts:
        if rows_agree(functools.partial(multiply, blocks=blocks, together=together), x):
            return (0 if blocks is whole else BLOCK), together
    return BLOCK, 0


def rows_agree(function, x):
    """Do rows of function(x) (FEW, N) have the bits of function(x[:n]) and of any row alone?"""
    whole = function(x)
    same = [mx.array_equal(function(x[:n]), whole[:n]) for n in range(1, FEW)]
    same += [mx.array_equal(function(x[n : n + 1]), whole[n : n + 1]) for n in range(1, FEW, 5)]
    return mx.stack(same).all().item()


def has_small_kernels():
    """Does the library multiply small matrices directly, without copying them first?"""
    if _openblas.cache_info().currsize == 0:
        return False
    name = _openblas().scipy_openblas_get_corename
    name.restype = ctypes.c_char_p
    return name() in (b"SkylakeX", b"Cooperlake", b"SapphireRapids")


# Attention


class KeysAndValues:
    """What one layer's attention looks at, in chunks of keys; see model.KeysAndValues.

    Keys lie as (heads, chunks, d_kv, width), values as (heads, chunks, width, d_kv), in float32.
    The products have few shapes, and what is masked adds exact zeros, so that a row's bits depend
    neither on the number of rows nor on how many keys come after its own.
    """

    def __init__(self, keys=None, values=None):
        self.text, self.mask = None if keys is None else (keys, values), None
        self.keys = self.values = None

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
        count, width = math.ceil(end / CHUNK), min(self.visible(end), CHUNK)
        if self.keys is None:
            self.keys = mx.zeros((heads, count, d_kv, width))
            self.values = mx.zeros((heads, count, width, d_kv))
        wider, more = width - self.keys.shape[3], count - self.keys.shape[1]
        if wider > 0 or more > 0:
            more, wider = (0, max(more, 0)), (0, max(wider, 0))
            self.keys = mx.pad(self.keys, [(0, 0), more, (0, 0), wider])
            self.values = mx.pad(self.values, [(0, 0), more, wider, (0, 0)])
        k, v, done = k.astype(mx.float32).swapaxes(1, 2), v.astype(mx.float32), 0
        while done < length:
            chunk, first = divmod(position + done, CHUNK)
            n = min(length - done, CHUNK - first)
            self.keys[:, chunk, :, first : first + n] = k[:, :, done : done + n]
            self.values[:, chunk, first : first + n] = v[:, done : done + n]
            done += n

    def _lay_out(self, keys, values):
        size = keys.shape[1]
        self.update(keys, values, 0)
        count, width = self.keys.shape[1], self.keys.shape[3]
        if size < count * width:
            self.mask = mx.where(mx.arange(count * width) < size, 0.0, -math.inf)
            self.mask = self.mask.reshape(count, 1, width)

    def attend(self, q, bias=None):
        """q (heads, L, d_kv), bias (heads, L, S) -> (heads, L, d_kv), S the first positions."""
        if self.text and bias is not None:
            return attend_whole(q, *self.text, bias)
        if self.text:
            self._lay_out(*self.text)
            self.text = None
        keys, values = self.keys, self.values
        if bias is None:
            mask = self.mask
        else:
            width = min(bias.shape[2], CHUNK)
            mask = bias.reshape(*bias.shape[:2], -1, width).swapaxes(1, 2)
            if mask.shape[1] < keys.shape[1] or width < keys.shape[3]:  # after trim
                keys = keys[:, : mask.shape[1], :, :width]
                values = values[:, : mask.shape[1], :width]
        return attend(q, keys, values, mask, find_attention(q.shape[2])).astype(q.dtype)


def attend(q, keys, values, mask, together):
    """q (heads, L, d_kv), keys and values in chunks, mask broadcasts to (heads, chunks, L, width)
    -> (heads, L, d_kv). together: as in `multiply`, 0 or 1."""
    q, alone = q.astype(mx.float32)[:, None], together == 0
    scores = (q[..., None, :] @ keys[:, :, None]).squeeze(3) if alone else q @ keys
    scores = scores if mask is None else scores + mask
    top = scores.max(axis=-1, keepdims=True)
    many = scores.shape[1] > 1
    p = exp(scores - (top.max(axis=1, keepdims=True) if many else top))
    total = p.sum(axis=-1, keepdims=True)
    y = (p[..., None, :] @ values[:, :, None]).squeeze(3) if alone else p @ values
    return y.sum(axis=1) / total.sum(axis=1) if many else (y / total).squeeze(1)


@functools.cache
def find_attention(d_kv):
    """`together` for `attend`: 1 where a row's bits do not depend on what else is there, else 0."""
    most = 3 * CHUNK
    q, keys, values, bias = (
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate([(1, FEW, d_kv), (1, most, d_kv), (1, most, d_kv), (FEW, most)])
    )
    for width in range(STEP, CHUNK + 1, STEP):
        k, v, p = keys[0, :width].T, values[0, :width], mx.softmax(bias[:, :width], axis=-1)
        for x, y in (q[0], mx.contiguous(k)), (p, v):
            if not rows_agree(lambda rows, y=y: rows @ y, x):
                return 0

    def rows(length, position, visible):
        memory, place = KeysAndValues(), mx.arange(visible)
        memory.update(keys[:, :visible], values[:, :visible], 0)
        seen = place <= position + mx.arange(length)[:, None]
        mask = mx.where(seen, bias[:length, :visible], -math.inf)
        mask = mask.reshape(1, length, -1, min(visible, CHUNK)).swapaxes(1, 2)
        return attend(q[:, :length], memory.keys, memory.values, mask, 1)

    same = []
    sizes = [*range(STEP, CHUNK + 1, STEP), 2 * CHUNK, most]
    for size in sizes:
        whole = rows(FEW, size - FEW, size)
        same += [mx.array_equal(rows(n, size - FEW, size), whole[:, :n]) for n in (1, 2, 5, 11)]
        more = (rows(FEW, size - FEW, other) for other in sizes if other > size)
        same += [mx.array_equal(other, whole) for other in more]
    return int(mx.stack(same).all().item())


def exp(x):
    """e to the x; in MLX on the CPU a power costs a half or a third of it."""
    return mx.power(math.e, x) if in_use() else mx.exp(x)


# What many rows, a prompt's, need: NumPy, whose exp is many times as fast, on all cores


@functools.cache
def workers():
    return ThreadPoolExecutor(os.cpu_count())


def attend_whole(q, k, v, bias):
    """The same for an encoder: q (heads, L, d_kv), k, v (heads, S, d_kv), bias (heads, L, S)."""
    p = q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(1, 2) + bias
    mx.eval(p)
    memory = np.array(p, copy=False)
    total = np.empty((*memory.shape[:2], 1), np.float32)

    def softmax(head):
        scores = memory[head]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores.sum(axis=-1, keepdims=True, out=total[head])

    list(workers().map(softmax, range(len(memory))))
    return (p @ v.astype(mx.float32) / mx.array(total)).astype(q.dtype)


class Activation(nn.Module):
    """model.Activation, for the rows of a prompt in NumPy where it has an exp in it."""

    def __init__(self, original):
        super().__init__()
        self.original = original

    def __call__(self, x):
        if len(x) <= FEW or self.original.name in ("relu", "gelu"):
            return self.original(x)
        mx.eval(x)
        memory = np.array(x, copy=False)
        result = np.empty(memory.shape, np.float32)
        gelu = self.original.name.startswith("gelu")

        def part(rows):
            x, y = memory[rows], result[rows]
            factor = math.sqrt(8 / math.pi) * (1 + 0.044715 * x * x) if gelu else 1
            np.exp(-factor * x, out=y)
            np.divide(x, 1 + y, out=y)

        list(workers().map(part, (slice(i, i + FEW) for i in range(0, len(x), FEW))))
        return mx.array(result)


# Modules


class RMSNorm(nn.Module):
    """nn.RMSNorm in fewer operations, for a float32 input."""

    def __init__(self, weight, eps):
        super().__init__()
        columns = weight.shape[0]
        self.weight, self.eps = weight.astype(mx.float32) * columns**0.5, eps * columns

    def __call__(self, x):
        return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + self.eps) * self.weight


def prepare(model, narrow=lambda path: True):
    """Make an nn.Module fast and exact on the CPU; nothing happens where that is not the device.

    narrow(path): is this Linear or Embedding, float32, one for the few rows of a pass (True) rather
    than for the many of a prompt? An Embedding only if it is the output head, too.
    `model.alpha` gets what one more row adds to the cost of a pass.
    """
    if not in_use():
        return
    fast, few = load_blas(), []

    def swap(path, module):
        if isinstance(module, nn.RMSNorm):
            return RMSNorm(module.weight, module.eps)
        kind = {nn.Linear: BlockLinear, nn.Embedding: BlockEmbedding}.get(type(module))
        if kind and narrow(path):
            few.append(module.weight.dtype == mx.float32)
            return kind(module.weight, module.get("bias")) if few[-1] else module
        if type(module).__name__ == "Activation":
            return Activation(module)
        return module

    leaves = tree_map_with_path(swap, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
    model.keys_and_values = KeysAndValues
    model.alpha = 0.1 if fast and all(few) and few else 1.0

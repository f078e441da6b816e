"""All that MLX's CPU backend needs, in one file that a reader with a GPU can skip.

`prepare(model)` makes an `nn.Module` fast on the CPU and gives a row of its results the same bits
among any others:

- MLX's Linux wheel links a reference BLAS of about 2 GFLOP/s. `load_blas` puts OpenBLAS in its
  place, from the package scipy-openblas32, on one thread: MLX's streams share the work instead.
- Leaf modules are swapped, as `nn.quantize` does: the matrix of a `BlockLinear` lies so that it is
  read once from memory, in sequence, whatever the number of rows.
- A T5 gets `KeysAndValues`, attention in chunks of keys.

Whether a row's bits depend on the number of rows is tried for each product, before it is used; a
product of which that is true is made a row at a time.
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
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

FEW = 32  # the most rows of a pass
NARROW = 32  # columns of a narrow block
DEPTH = 960  # of a narrow block: FEW * NARROW * DEPTH is what OpenBLAS takes for a small product
CHUNK = 256  # keys of a product in attention
STEP = 64  # where these are all, there may be fewer, in such steps
LARGE = 2**20  # bytes of a matrix that is worth two streams
ALONE = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS")


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
        redirect("libmlx.so", b"cblas_sgemm", function)
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
    wanted = {} if any(name in os.environ for name in ALONE) else {ALONE[0]: "1"}
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


def redirect(library, symbol, function):
    """Let the calls that a loaded library makes of a function it imports go to another one.

    The function's address lies in a table in memory, which the ELF format (64 bits) describes:
    program headers -> dynamic section -> relocations, each with the place and the symbol.
    """

    def read(form, address):
        return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))

    with open("/proc/self/maps") as maps:
        starts = [int(m.split("-")[0], 16) for m in maps if m.rstrip().endswith(f"/{library}")]
    base, tags = starts[0], {}
    (headers,), (count,) = read("<Q", base + 32), read("<H", base + 56)
    for header in range(base + headers, base + headers + 56 * count, 56):
        kind, _, _, address = read("<IIQQ", header)
        if kind == 2:  # PT_DYNAMIC
            entry = base + address
            while (pair := read("<QQ", entry))[0]:
                tags[pair[0]] = pair[1]
                entry += 16
    names, symbols, table, size = tags[5], tags[6], tags[23], tags[2]  # DT_STRTAB … DT_PLTRELSZ
    for entry in range(table, table + size, 24):
        place, info = read("<QQ", entry)
        (name,) = read("<I", symbols + 24 * (info >> 32))
        if ctypes.string_at(names + name) == symbol:
            page = (base + place) // mmap.PAGESIZE * mmap.PAGESIZE
            mprotect = ctypes.CDLL(None, use_errno=True).mprotect
            mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
            if mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
                raise OSError(ctypes.get_errno(), "mprotect failed")
            address = ctypes.cast(function, ctypes.c_void_p).value
            ctypes.c_void_p.from_address(base + place).value = address
            return
    raise LookupError(f"{library} does not import {symbol.decode()}")


# Matrices


class BlockLinear(nn.Module):
    """nn.Linear in float32: x (L, K) @ weight (N, K).T + bias.

    `blocks` are arrays (B, K, width), one for each stream, that hold the matrix from left to right,
    filled up with zeros. In wide blocks it has a block for each stream, in narrow ones many.
    """

    def __init__(self, weight, bias=None, few=True):
        super().__init__()
        self.rows, columns = weight.shape
        layout = find_layout(self.rows % 64, columns) if few else (False, False)
        narrow, self.alone = layout[0], bool(layout[1])
        count = len(streams()[: 2 if few else 8]) if weight.nbytes >= LARGE else 1
        width = NARROW if narrow else math.ceil(self.rows / count / 16) * 16
        if self.rows % width:
            weight = mx.pad(weight, [(0, -self.rows % width), (0, 0)])
        blocks = mx.contiguous(weight.reshape(-1, width, columns).swapaxes(1, 2))
        half = math.ceil(len(blocks) / count)
        self.blocks = [blocks[i : i + half] for i in range(0, len(blocks), half)]
        if bias is not None:
            self.bias = bias

    def __call__(self, x):
        *outer, columns = x.shape
        x = x.astype(mx.float32).reshape(-1, columns)
        if self.blocks[0].shape[2] > NARROW or len(x) <= FEW:
            y = multiply(x, self.blocks, self.alone)
        elif len(x) <= 3 * FEW:
            parts = [x[i : i + FEW] for i in range(0, len(x), FEW)]
            y = mx.concatenate([multiply(part, self.blocks, self.alone) for part in parts])
        else:
            parts = [x @ b.swapaxes(0, 1).reshape(columns, -1) for b in self.blocks]
            y = mx.concatenate(parts, axis=1)
        y = y[:, : self.rows].reshape(*outer, self.rows)
        return y + self.bias if "bias" in self else y


class BlockEmbedding(BlockLinear):
    """nn.Embedding for a table that is the output head as well."""

    def as_linear(self, x):
        return super().__call__(x)

    def __call__(self, ids):
        count, _, width = self.blocks[0].shape
        rows, found = count * width, mx.array(0.0)
        for i, blocks in enumerate(self.blocks):
            here = mx.clip(ids.astype(mx.int32) - i * rows, 0, len(blocks) * width - 1)
            part = blocks[here // width, :, here % width]
            found = mx.where((ids < i * rows)[..., None], found, part) if i else part
        return found


def multiply(x, blocks, alone=False):
    """x (L, K), blocks [(B, K, width)] -> (L, N), each of `blocks` on a stream of its own. Each row
    is a product by itself where they are `alone`."""
    parts = []
    for part, stream in zip(blocks, streams(), strict=False):
        columns, width = part.shape[1:]
        pieces = 1 if width > NARROW else math.ceil(columns / DEPTH)
        deep = math.ceil(columns / pieces)
        y: Any = None
        for i in range(0, columns, deep):
            piece = (x, part) if pieces == 1 else (x[:, i : i + deep], part[:, i : i + deep])
            more = product(*piece, alone, stream)
            y = more if i == 0 else mx.add(y, more, stream=stream)
        parts.append(y)
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return y.squeeze(0) if len(y) == 1 else y.swapaxes(0, 1).reshape(len(x), -1)


def product(x, blocks, alone, stream=None):
    """(L, K) @ (B, K, width) -> (B, L, width)"""
    if alone:
        return mx.matmul(x[:, None], blocks[:, None], stream=stream).squeeze(2)
    return mx.matmul(x, blocks, stream=stream)


@functools.cache
def find_layout(edge, columns) -> tuple[bool, bool]:
    """(narrow, alone) for matrices (64 * i + edge, columns): the first layout in which each of
    1 to FEW rows has the same bits among any others. Blocks as narrow as these are multiplied
    without being copied by OpenBLAS where it has AVX-512; elsewhere they serve rows one by one."""
    direct = load_blas() in ("SkylakeX", "Cooperlake", "SapphireRapids")
    rows = max(2**18 // columns // 64, 2) * 64 + edge
    x = mx.random.normal((FEW, columns), key=mx.random.key(0))
    weight = mx.random.normal((rows, columns), key=mx.random.key(1))
    for narrow in (True,) if direct else (False, True):
        width = NARROW if narrow else rows
        padded = mx.pad(weight, [(0, -rows % width), (0, 0)]).reshape(-1, width, columns)
        blocks = [mx.contiguous(padded.swapaxes(1, 2))]
        if rows_agree(lambda r, b=blocks: multiply(r, b), x):
            return narrow, False
    return True, True


def rows_agree(function, x):
    """Do rows of function(x) (FEW, N) have the bits of function(x[:n]) and of any row alone?"""
    whole = function(x)
    same = [mx.array_equal(function(x[:n]), whole[:n]) for n in range(1, FEW)]
    same += [mx.array_equal(function(x[n : n + 1]), whole[n : n + 1]) for n in range(1, FEW, 5)]
    return mx.stack(same).all().item()


# Attention


class KeysAndValues:
    """What one layer's attention looks at, in chunks of keys; see model.KeysAndValues.

    Keys lie as (heads, chunks, d_kv, width), values as (heads, chunks, width, d_kv), in float32.
    The products have few shapes, and what is masked adds exact zeros, so that a row's bits depend
    neither on the number of rows nor on how many keys come after its own.
    """

    def __init__(self, keys=None, values=None):
        self.text, self.mask = None if keys is None else (keys, values), None
        self.keys: Any = None
        self.values: Any = None

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
        return attend(q, keys, values, mask, not rows_are_alike(q.shape[2])).astype(q.dtype)


def attend(q, keys, values, mask, alone=False):
    """q (heads, L, d_kv), keys and values in chunks, mask broadcasts to (heads, chunks, L, width)
    -> (heads, L, d_kv). alone: each row's products by themselves."""
    q = q.astype(mx.float32)[:, None]
    scores = (q[..., None, :] @ keys[:, :, None]).squeeze(3) if alone else q @ keys
    scores = scores if mask is None else scores + mask
    top = scores.max(axis=-1, keepdims=True)
    many = scores.shape[1] > 1
    p = exp(scores - (top.max(axis=1, keepdims=True) if many else top))
    total = p.sum(axis=-1, keepdims=True)
    y = (p[..., None, :] @ values[:, :, None]).squeeze(3) if alone else p @ values
    return y.sum(axis=1) / total.sum(axis=1) if many else (y / total).squeeze(1)


@functools.cache
def rows_are_alike(d_kv):
    """In `attend`: do a row's bits not depend on other rows, nor on masked keys?"""
    most = 3 * CHUNK
    q, keys, values, bias = (
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate([(1, FEW, d_kv), (1, most, d_kv), (1, most, d_kv), (FEW, most)])
    )
    for width in range(STEP, CHUNK + 1, STEP):
        k, v, p = keys[0, :width].T, values[0, :width], mx.softmax(bias[:, :width], axis=-1)
        for x, y in (q[0], mx.contiguous(k)), (p, v):
            if not rows_agree(lambda rows, y=y: rows @ y, x):
                return False

    def rows(length, position, visible):
        memory, place = KeysAndValues(), mx.arange(visible)
        memory.update(keys[:, :visible], values[:, :visible], 0)
        seen = place <= position + mx.arange(length)[:, None]
        mask = mx.where(seen, bias[:length, :visible], -math.inf)
        mask = mask.reshape(1, length, -1, min(visible, CHUNK)).swapaxes(1, 2)
        return attend(q[:, :length], memory.keys, memory.values, mask)

    same = []
    sizes = [*range(STEP, CHUNK + 1, STEP), 2 * CHUNK, most]
    for size in sizes:
        whole = rows(FEW, size - FEW, size)
        same += [mx.array_equal(rows(n, size - FEW, size), whole[:, :n]) for n in (1, 2, 5, 11)]
        more = (rows(FEW, size - FEW, other) for other in sizes if other > size)
        same += [mx.array_equal(other, whole) for other in more]
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
    heads = [slice(i, i + share) for i in range(0, len(q), share)]

    def each(function):
        results = []
        for stream, part in zip(streams(), heads, strict=False):
            with mx.stream(stream or mx.default_stream(mx.cpu)):
                results.append(function(part))
        mx.eval(results)
        return results

    def softmax(p):
        p -= p.max(axis=-1, keepdims=True)
        np.exp(p, out=p)
        return p.sum(axis=-1, keepdims=True)

    scores = each(lambda part: q[part] @ k[part].swapaxes(1, 2) + bias[part])
    memory = [head for part in scores for head in np.array(part, copy=False)]  # not copied
    totals = mx.array(np.stack(list(workers().map(softmax, memory))))
    y = each(lambda part: scores[part.start // share] @ v[part] / totals[part])
    return mx.concatenate(y)


class Activation(nn.Module):
    """model.Activation; for many rows in NumPy where it has an exp in it."""

    def __init__(self, original):
        super().__init__()
        self.original = original

    def __call__(self, x):
        if len(x) <= FEW or self.original.name in ("relu", "gelu"):
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
        self.weight, self.eps = weight.astype(mx.float32) * columns**0.5, eps * columns

    def __call__(self, x):
        return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + self.eps) * self.weight


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
        if type(module) is nn.RMSNorm:
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
    model.keys_and_values = KeysAndValues
    model.alpha = 0.1 if fast else 1.0

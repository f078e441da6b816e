"""What MLX's CPU backend needs: to be fast, and to give a row the same bits among any others.

Who reads `model.py` with a GPU in mind may skip this file: where `model.py` says `cpu.…`, it is for
the CPU (`exp` is mx.exp elsewhere). On every device there are CHUNK, STEP, MAX_WIDTH and, at the
end, `find_widths`, the self-check.
"""

import fast_blas  # isort: skip  (a fast BLAS on Linux: before mlx.core)

import functools
import math

import mlx.core as mx
import numpy as np

CACHE_BYTES = 2**21  # about what one core's cache holds
QUERIES = 1024  # whose scores are in memory at the same time
SETTLED = 64  # passes after which a model is taken to be used for long
CHUNK = 256  # positions: no block of tokens lies in two chunks, nor a sum over keys
STEP = 64  # keys: the first chunk is taken in such steps, where that does not change the bits
MAX_WIDTH = 32  # a pass over more tokens is computed in blocks of this many rows


def in_use():
    return mx.default_device() == mx.Device(mx.cpu)


def exp(x):
    """e to the x; in MLX on the CPU a power costs a third of it."""
    return mx.power(math.e, x) if in_use() else mx.exp(x)


class FewRows:
    """x (L, K) @ weight.T (K, N) in float32, for an L of a few rows.

    MKL reads a matrix from memory once for every three rows, so it is given blocks that stay in the
    processor's cache; and it rounds 2 to 15 rows alike where the matrix lies along K, 2 to 32 where
    it lies along N, which is as fast for small matrices only. More rows are taken in batches.
    """

    def __init__(self, weight):
        rows, columns = weight.shape
        if columns < 512 or weight.nbytes <= CACHE_BYTES // 4:
            self.blocks, self.most_rows = mx.contiguous(weight.T)[None], math.inf
        else:
            counts = (n for n in range(1, rows // 64) if rows % n == 0)
            count = next((n for n in counts if weight.nbytes / n <= CACHE_BYTES), 1)
            self.blocks, self.most_rows = weight.reshape(count, -1, columns).swapaxes(1, 2), 15
        self.flat = self.blocks.squeeze(0) if len(self.blocks) == 1 else weight.T
        mx.eval(self.blocks, self.flat)

    def __call__(self, x, part=False):
        """part: only the first block's columns, enough to see how the product rounds."""
        weight = self.blocks[:1] if part else self.blocks  # [0] would copy
        rows, (blocks, columns, width) = x.shape[0], weight.shape
        if rows <= 3 or (rows <= self.most_rows and blocks == 1):
            return x @ (weight.squeeze(0) if part else self.flat)
        batches = math.ceil(rows / self.most_rows)
        if batches == 1:
            return (x @ weight).swapaxes(0, 1).reshape(rows, -1)
        x = mx.pad(x, [(0, -rows % batches), (0, 0)]).reshape(batches, -1, columns)
        y = x @ weight[:, None]  # (blocks, batches, rows, width): a block serves all batches
        return y.transpose(1, 2, 0, 3).reshape(-1, blocks * width)[:rows]


def for_few_rows(linear):
    """Give those of `model.Linear` that are float32 on the CPU their FewRows; return these."""
    linear = [m for m in linear if m.weight.dtype == mx.float32] if in_use() else []
    for m in linear:
        m.weight, m.few_rows = None, FewRows(m.weight.T)
    return [m.few_rows for m in linear]


class LargePages:
    """Moves the matrices of a model that is used for long into pages of 2 MB, one at a time."""

    def __init__(self, matrices):
        self.matrices, self.passes = matrices, 0

    def count_pass(self):
        self.passes += 1
        if self.passes > SETTLED and self.passes % 4 == 0 and self.matrices:  # for it takes time
            weight = np.array(self.matrices.pop().flat, copy=False)
            fast_blas.use_large_pages(weight.ctypes.data, weight.nbytes)


def lay_out(k, v):
    """A prompt's keys and values as `attend` likes them: zeros fill the values' last chunk."""
    if v.shape[1] > CHUNK:
        v = mx.pad(v, [(0, 0), (0, -v.shape[1] % CHUNK), (0, 0)])
    return mx.contiguous(k), v


def attend(q, k, v, bias=None):
    """q (heads, L, d_kv), k (heads, d_kv, S), v (heads, S or more, d_kv) -> (heads, L, d_kv)

    bias (heads, L, S); there must be one where L is above MAX_WIDTH.

    What mx.fast.scaled_dot_product_attention computes, so that a row's bits do not depend on L:
    BLAS may cut a long sum over keys into parts, how depends on L; so it gets CHUNK at most.
    """
    if q.shape[1] > MAX_WIDTH:
        return attend_in_turns(q, k, v, bias)
    p, total = softmax(q, k, bias)
    heads, width, keys = p.shape
    if v.shape[1] > keys:
        p = mx.pad(p, [(0, 0), (0, 0), (0, v.shape[1] - keys)])
    if v.shape[1] <= CHUNK:
        return p @ v / total
    p = p.reshape(heads, width, -1, CHUNK).swapaxes(1, 2)
    return (p @ v.reshape(heads, -1, CHUNK, v.shape[-1])).sum(axis=1) / total


def softmax(q, k, bias):
    """Of the scores (heads, L, S): numerators (heads, L, S) and denominators (heads, L, 1)."""
    scores = q @ k if bias is None else q @ k + bias
    p = exp(scores - scores.max(axis=-1, keepdims=True))
    return p, p.sum(axis=-1, keepdims=True)


@functools.cache
def second_stream():
    return mx.new_thread_local_stream(mx.cpu)


def attend_in_turns(q, k, v, bias):
    """The same for the encoder: MLX computes an operation on one core, so two at a time.

    A long prompt's queries take turns as well, since the scores of all would fill the memory.
    """
    parts = []
    for h in (slice(i, i + 2) for i in range(0, q.shape[0], 2)):
        with mx.stream(second_stream() if h.start % 4 else mx.default_stream(mx.cpu)):
            rows = []
            for turn in (slice(i, i + QUERIES) for i in range(0, q.shape[1], QUERIES)):
                p, total = softmax(q[h, turn], k[h], bias[h, turn])
                rows.append(p @ v[h] / total)
            parts.append(rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1))
    return mx.concatenate(parts)


def find_widths(rows):
    """(lowest, highest) number of rows between which each row's bits are the same, and STEP
    where they do not depend on how many masked keys follow, else CHUNK.

    Matrix products round differently for 1, for a few and for many rows, at limits that depend on
    the library, the shapes and the threads; apart from that, not on a row's place or its
    neighbours. rows(n): what a model computes for the first n of MAX_WIDTH rows; rows(n, p, k): the
    same after p positions, among k keys.
    """

    def same(a, b):
        return mx.array_equal(a, b, equal_nan=True)

    widths = [1, 2, 3, 4, 6, 8, 10, 12, 14, 15, 16, 20, 24, 28, MAX_WIDTH]
    results = {n: rows(n) for n in widths}
    for i, low in enumerate(widths):
        high = low
        for n in widths[i:]:
            if not same(results[n][:low], results[low]):
                break
            high = n
        if high >= low + 8:
            break
    else:
        return (16, 16), CHUNK  # no such range: one width for all
    results.clear()  # they take memory
    few = [(n, k, p) for n in (low, high) for k in range(STEP, CHUNK, STEP) for p in (5, k - n)]
    steps = all(same(rows(n, p, k), rows(n, p, CHUNK)) for n, k, p in few)
    return (low, high), STEP if steps else CHUNK

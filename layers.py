"""The layers of a T5: attention with relative bias, feed-forward, blocks and stacks.

Modules and parameters have Hugging Face's names, but that matrices which share their input are
joined. There is no batch dimension: activations are (positions, features).
"""

import functools
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace

import cpu
import ranks

STEP = 256  # positions by which a cache grows
QUERIES = 2048  # of a prompt whose scores are in memory at the same time


def gelu_new(x):
    """The tanh approximation of GELU, written with the logistic function."""
    return x / (1 + cpu.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)))


def silu(x):
    return x / (1 + cpu.exp(-x))


# mlx.nn's are compiled, for which MLX needs a C++ compiler on the CPU.
ACTIVATIONS = {
    "relu": lambda x: mx.maximum(x, 0),
    "gelu": lambda x: x * (1 + mx.erf(x / math.sqrt(2))) / 2,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "silu": silu,
    "swish": silu,
}


class Activation(nn.Module):
    """One of ACTIVATIONS, float32."""

    def __init__(self, name):
        super().__init__()
        if name not in ACTIVATIONS:
            raise ValueError(f"unknown activation {name!r}, not of {[*ACTIVATIONS]}")
        self.name = name

    def __call__(self, x):
        return ACTIVATIONS[self.name](x)


def linear(columns, rows):
    return nn.Linear(columns, rows, bias=False)


def project(layer, x):
    """x (L, columns) -> (L, rows), in the precision of the layer's weights, quantized or not."""
    weight = layer.get("scales", layer.get("weight", x))
    return getattr(layer, "as_linear", layer)(x.astype(weight.dtype))


class KeysAndValues:
    """What one layer's attention looks at: keys and values (heads, positions, d_kv).

    `cpu.prepare` puts a class of its own in its place.
    """

    def __init__(self, keys=None, values=None):
        self.keys, self.values = keys, values

    @staticmethod
    def visible(positions):
        """How many keys are looked at, masked ones included, where there are so many positions."""
        return math.ceil(positions / STEP) * STEP

    @staticmethod
    def room(position):
        """How many tokens there may be in a block from `position` on, so that what `visible` says
        of each is told by its position alone."""
        return STEP - position % STEP

    def update(self, k, v, position):
        """Write k, v (heads, L, d_kv) at `position`, over what was there."""
        end = position + k.shape[1]
        if self.keys is None:
            self.keys, self.values = k[:, :0], v[:, :0]
        room = self.visible(end) - self.keys.shape[1]
        if room > 0:
            self.keys = mx.pad(self.keys, [(0, 0), (0, room), (0, 0)])
            self.values = mx.pad(self.values, [(0, 0), (0, room), (0, 0)])
        self.keys[:, position:end] = k
        self.values[:, position:end] = v

    def attend(self, q, bias=None):
        """q (heads, L, d_kv), bias (heads, L, S) -> (heads, L, d_kv), S the first positions."""
        k, v, mask = self.keys, self.values, None
        if bias is not None:
            k, v = k[:, : bias.shape[-1]], v[:, : bias.shape[-1]]
            mask = bias[None].astype(q.dtype)
        q, k, v = q[None], k[None], v[None]  # a batch of one
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=1, mask=mask)[0]


class Cache:
    """What one generation has computed so far; the caller holds it."""

    def __init__(self, layers):
        self.layers = layers  # KeysAndValues of the output and of the prompt, for each block
        self.offset = 0  # how many tokens have been fed

    def trim(self, n: int):
        """Forget the last n tokens: only a length moves. ValueError unless 0 <= n <= offset."""
        if not 0 <= n <= self.offset:
            raise ValueError(f"cannot trim {n} of the cache's {self.offset} tokens")
        self.offset -= n


class RelativeBias(nn.Embedding):
    """T5's bias for the distance of a key from a query, in buckets: (buckets, heads)."""

    def __init__(self, config, bidirectional):
        super().__init__(config.relative_attention_num_buckets, config.num_heads)
        self.bidirectional = bidirectional
        self.max_distance = config.relative_attention_max_distance
        self._reach, self._of = -1, None
        self._table: Any = None  # of all distances from -_reach on, in the decoder; made _of weight

    def buckets(self, distance):
        """The bucket of each distance = key position - query position, numpy integers (N,)."""
        buckets, base = self.weight.shape[0], np.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            base = (distance > 0) * buckets
            distance = np.abs(distance)
        else:
            distance = np.maximum(-distance, 0)
        # Near positions have a bucket each, far ones share buckets of logarithmic width. float32
        # as in the reference: a distance on a bucket's border must fall on the same side.
        exact = buckets // 2
        far = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
        far = far / np.float32(math.log(self.max_distance / exact)) * np.float32(buckets - exact)
        far = np.minimum(exact + far.astype(np.int64), buckets - 1)
        return base + np.where(distance < exact, distance, far)

    def row(self, first, last):
        """Of the distances first … last - 1, (heads, last - first) float32; in the decoder -inf
        where a key is yet to come."""
        distance = np.arange(first, last)
        row = self.weight[mx.array(self.buckets(distance))].astype(mx.float32).T
        return row if self.bidirectional else mx.where(mx.array(distance > 0), -math.inf, row)

    def __call__(self, position, length, keys):  # type: ignore[override]
        """(heads, length, keys) for queries from `position` on."""
        first, last = 1 - position - length, keys - position
        if self.bidirectional or self.training:
            row = self.row(first, last)
        else:
            enough = self._reach >= -first and self._table.shape[1] >= self._reach + last
            if not enough or self._of is not self.weight:
                self._reach, self._of = 4 * max(keys, STEP), self.weight  # more than is needed now
                self._table = self.row(-self._reach, keys + STEP)
                mx.eval(self._table)
            row = self._table[:, self._reach + first : self._reach + last]
        if length == 1:
            return row[:, None]
        # Row r is row[length - 1 - r :]: rows laid one after another, read with one column less.
        heads, columns = row.shape
        rows = mx.broadcast_to(row[:, None], (heads, length, columns)).reshape(heads, -1)
        rows = rows[:, length - 1 : length * columns - 1]
        return rows.reshape(heads, length, columns - 1)[:, :, :keys]


class Attention(nn.Module):
    """Multi-head attention without 1/sqrt(d_kv): T5 folds that factor into its initialization."""

    def __init__(self, config, bias=None, cross=False):
        super().__init__()
        self.heads, inner = config.num_heads, config.num_heads * config.d_kv
        if cross:
            self.q = linear(config.d_model, inner)
            self.kv = linear(config.d_model, 2 * inner)
        else:
            self.qkv = linear(config.d_model, 3 * inner)
        self.o = linear(inner, config.d_model)
        if bias:
            self.relative_attention_bias = bias

    def split(self, x, parts):
        """(L, parts * heads * d_kv) -> parts arrays (heads, L, d_kv)"""
        x = x.reshape(x.shape[0], parts * self.heads, -1).swapaxes(0, 1)
        return mx.split(x, parts) if parts > 1 else [x]

    def __call__(self, x, memory, position=None, new=None, bias=None):
        """x (L, d_model) -> (L, d_model)

        memory: KeysAndValues, to which the decoder adds those of the first `new` rows of x, from
        `position` on; in the encoder the class, since all are there at once.
        bias(position, length): (heads, length, keys).
        """
        if "q" in self:
            (q,) = self.split(project(self.q, x), 1)
        else:
            q, k, v = self.split(project(self.qkv, x), 3)
            if position is None:
                memory, position = memory(k, v), 0
            else:
                memory.update(k[:, :new], v[:, :new], position)
        parts = []
        for start in range(0, x.shape[0], QUERIES):
            part = q[:, start : start + QUERIES]
            parts.append(memory.attend(part, bias and bias(position + start, part.shape[1])))
        y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
        return project(self.o, y.swapaxes(0, 1).reshape(x.shape[0], -1))


class FeedForward(nn.Module):
    """wo(act(wi x)), or wo(act(wi_0 x) * (wi_1 x)) where the checkpoint is gated."""

    def __init__(self, config):
        super().__init__()
        self.wi = linear(config.d_model, (2 if config.is_gated else 1) * config.d_ff)
        self.wo = linear(config.d_ff, config.d_model)
        self.act, self.is_gated = Activation(config.activation), config.is_gated

    def __call__(self, x):
        x = project(self.wi, x).astype(mx.float32)
        if not self.is_gated:
            return project(self.wo, self.act(x))
        gate, x = mx.split(x, 2, axis=-1)
        return project(self.wo, self.act(gate) * x)


class Sublayer(nn.Module):
    """A part of a block with the norm of its input: x + part(norm(x)).

    group: the ranks among which the part is divided; their results are added up.
    """

    def __init__(self, config, name, part):
        super().__init__()
        self.name, self[name], self.group = name, part, None
        self.layer_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def __call__(self, x, *arguments):
        # The residual stream x is float32 in every precision: in float16 many T5s overflow it.
        y = self[self.name](self.layer_norm(x), *arguments)
        return x + (y if self.group is None else ranks.all_sum(y, self.group))

    def shard(self, group):
        """Keep this rank's heads, or columns of the feed-forward."""
        self.group, part = group, self[self.name]
        if isinstance(part, Attention):
            part.heads //= group.size()
        joined = {"qkv": 3, "kv": 2, "wi": 2 if getattr(part, "is_gated", False) else 1}
        for name, module in part.children().items():
            inward = name in ("o", "wo", "relative_attention_bias")
            how = "sharded-to-all" if inward else "all-to-sharded"
            shard_inplace(module, how, segments=joined.get(name, 1), group=group)


class Block(nn.Module):
    """Self-attention, in the decoder cross-attention, and the feed-forward."""

    def __init__(self, config, bias, decoder):
        super().__init__()
        self.layer = [Sublayer(config, "SelfAttention", Attention(config, bias))]
        if decoder:
            self.layer += [Sublayer(config, "EncDecAttention", Attention(config, cross=True))]
        self.layer += [Sublayer(config, "DenseReluDense", FeedForward(config))]


class Stack(nn.Module):
    """The encoder or the decoder. Its blocks share the first one's relative bias, or have one each
    (umT5)."""

    def __init__(self, config, depth, decoder):
        super().__init__()

        def bias(i):
            own = i == 0 or config.bias_in_every_layer
            return RelativeBias(config, bidirectional=not decoder) if own else None

        self.block = [Block(config, bias(i), decoder) for i in range(depth)]
        self.final_layer_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def biases(self, keys):
        """For each block bias(position, length) -> (heads, length, keys), which keeps its last
        result: most blocks ask for the same."""
        biases: list = []
        for block in self.block:
            bias = block.layer[0].SelfAttention.get("relative_attention_bias")
            if bias:
                bias = functools.lru_cache(maxsize=1)(functools.partial(bias, keys=keys))
            biases.append(bias or biases[-1])
        return biases

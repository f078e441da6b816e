"""T5 in MLX: encoder, decoder, key-value cache, and `load` for Hugging Face checkpoints.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (https://arxiv.org/abs/1910.10683), and its family: v1.1, FLAN, mT5, MADLAD-400,
ByT5, UL2, umT5, CodeT5.

Modules and parameters have Hugging Face's names, but that `sanitize` joins matrices which share
their input. There is no batch dimension: activations are (positions, features).
"""

import functools
import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_flatten

import checkpoint
import cpu
import ranks

STEP = 256  # positions by which a cache grows
QUERIES = 2048  # of a prompt whose scores are in memory at the same time
WIDEST = 32  # a pass over more tokens is computed in blocks of at most so many


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
        heads, length, d_kv = k.shape
        room = self.visible(position + length) - (0 if self.keys is None else self.keys.shape[1])
        if room > 0:
            empty = mx.zeros((heads, room, d_kv), k.dtype)
            old = [] if self.keys is None else [self.keys]
            self.keys = mx.concatenate([*old, empty], axis=1)
            old = [] if self.values is None else [self.values]
            self.values = mx.concatenate([*old, empty], axis=1)
        self.keys[:, position : position + length] = k
        self.values[:, position : position + length] = v

    def attend(self, q, bias=None):
        """q (heads, L, d_kv), bias (heads, L, S) -> (heads, L, d_kv), S the first positions."""
        k, v, mask = self.keys, self.values, None
        if bias is not None:
            k, v = k[:, : bias.shape[-1]], v[:, : bias.shape[-1]]
            mask = bias[None].astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=1, mask=mask)[
            0
        ]


class RelativeBias(nn.Embedding):
    """T5's bias for the distance of a key from a query, in buckets: (buckets, heads)."""

    def __init__(self, config, bidirectional):
        super().__init__(config.relative_attention_num_buckets, config.num_heads)
        self.bidirectional = bidirectional
        self.max_distance = config.relative_attention_max_distance
        self._reach = -1
        self._table: Any = None  # of all distances from -_reach on, in the decoder

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
            if self._reach < -first or self._table.shape[1] < self._reach + last:
                self._reach = 4 * max(keys, STEP)  # more than is needed now
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


class T5(nn.Module):
    """An encoder-decoder whose `start` and `decode` are all that the decoders ask of a model.

    eos_ids: the ids that end a text, from generation_config.json, else config.json (maybe none).
    vocab_size: the width of the logits, which may exceed the tokenizer's ids.
    alpha: what one more token adds to the cost of a pass, in passes over one token.
    """

    is_encoder_decoder = True
    alpha = 0.05
    keys_and_values = KeysAndValues
    fewest, most = 1, WIDEST  # rows of a block, see `check_rows`

    def __init__(self, config):
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Stack(config, config.num_layers, decoder=False)
        self.decoder = Stack(config, config.num_decoder_layers, decoder=True)
        if config.own_head:
            self.lm_head = linear(config.d_model, config.vocab_size)

    @property
    def eos_ids(self):
        return self.config.eos_ids

    def embed(self, tokens):
        """(L,) -> (L, d_model) float32"""
        tokens = mx.minimum(tokens, self.vocab_size - 1)  # out of range, MLX would read garbage
        return self.shared(tokens).astype(mx.float32)

    def encode(self, prompt):
        """prompt (S,) token ids -> (S, d_model)"""
        x = self.embed(prompt)
        for block, bias in zip(self.encoder.block, self.encoder.biases(prompt.size), strict=True):
            attention, feed_forward = block.layer
            x = feed_forward(attention(x, self.keys_and_values, None, None, bias))
        return self.encoder.final_layer_norm(x)

    def start(self, prompt):
        """Encode the prompt: (S,) integer ids -> an empty Cache, the first token to feed (1,).

        Raises ValueError for an empty prompt or an id beyond the embedding table.
        """
        prompt = mx.array(prompt)
        if prompt.ndim != 1 or prompt.size == 0 or not mx.issubdtype(prompt.dtype, mx.integer):
            found = f"{prompt.dtype} of shape {prompt.shape}"
            raise ValueError(f"the prompt must be (S,) integer ids, at least one, not {found}")
        wrong = [i for i in prompt.tolist() if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} in the prompt; there are {self.vocab_size} ids")
        encoded, layers = self.encode(prompt.astype(mx.uint32)), []
        for block in self.decoder.block:
            attention = block.layer[1].EncDecAttention
            k, v = attention.split(project(attention.kv, encoded), 2)
            layers.append((self.keys_and_values(), self.keys_and_values(k, v)))
        return Cache(layers), mx.array([self.config.start_id], mx.uint32)

    def decode(self, tokens, cache):
        """One pass: tokens (L,) integer ids -> logits (L, vocab_size); the cache grows by L.

        Lazy: nothing is evaluated. Row i is the prediction of the token that follows tokens[i].
        A row's bits do not depend on L, nor on how the tokens before it were fed.
        """
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"decode takes (L,) token ids, at least one, not {tokens.shape}")
        logits, done = [], 0
        while done < tokens.size:
            width = min(tokens.size - done, self.keys_and_values.room(cache.offset))
            width = math.ceil(width / math.ceil(width / self.most))  # in equal parts
            logits.append(self.decode_block(tokens[done : done + width], cache))
            done += width
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def decode_block(self, tokens, cache):
        """`decode` for as many tokens as `most` allows, filled up where there are fewer."""
        new, position = tokens.size, cache.offset
        if new < self.fewest:
            tokens = mx.pad(tokens, (0, self.fewest - new))  # rows that nobody reads
        x = self.embed(tokens)
        biases = self.decoder.biases(self.keys_and_values.visible(position + new))
        # A cache for fewer layers runs these only, see `check_rows`.
        for block, (own, prompt), bias in zip(self.decoder.block, cache.layers, biases):  # noqa: B905
            attention, cross_attention, feed_forward = block.layer
            x = attention(x, own, position, new, bias)
            x = feed_forward(cross_attention(x, prompt))
        cache.offset += new
        x = self.decoder.final_layer_norm(x)
        if self.config.scale_outputs:
            x = x * self.config.d_model**-0.5
        return project(self.lm_head if "lm_head" in self else self.shared, x)[:new]

    def __call__(self, prompt, target):
        """Teacher forcing, for training: prompt (S,), target (T,) ids -> logits (T, vocab_size)."""
        cache, start = self.start(prompt)
        return self.decode(mx.concatenate([start, target[:-1].astype(mx.uint32)]), cache)

    def is_for_few_rows(self, path, _module):
        """Is the module at this path one for the few rows of a pass, rather than for a prompt's?"""
        if path == "shared":
            return not self.config.own_head
        return path == "lm_head" or (
            path.startswith("decoder.") and not path.endswith("EncDecAttention.kv")
        )

    def shard(self, group):
        """Keep this rank's part of the heads and of the feed-forward; all ranks of the group keep
        the embedding and the head. Lazy; before `cpu.prepare`, which lays matrices out anew."""
        size = group.size()
        if self.config.num_heads % size:
            raise ValueError(f"it has {self.config.num_heads} heads")
        for block in self.encoder.block + self.decoder.block:
            for sublayer in block.layer:
                sublayer.group, part = group, sublayer[sublayer.name]
                if isinstance(part, Attention):
                    part.heads //= size
                for name, module in part.children().items():
                    inward = name in ("o", "wo", "relative_attention_bias")
                    how = "sharded-to-all" if inward else "all-to-sharded"
                    pieces = {"qkv": 3, "kv": 2, "wi": 1 + self.config.is_gated}
                    shard_inplace(module, how, segments=pieces.get(name, 1), group=group)

    def check_rows(self, sample=range(1, WIDEST), group=None):
        """Finds the `fewest` and `most` rows of a block between which a row has the same bits.

        Products of matrices round in other ways for one, for a few and for many rows, at limits
        that depend on the device, its library and the shapes. So narrower blocks are filled up and
        wider ones are cut. Where there are no such limits, a block has one row. What is compared is
        the work of one layer and the head; sample: the numbers of rows and the places that are.
        """
        attention = self.decoder.block[0].layer[0].SelfAttention
        shape, qkv = (attention.heads, STEP - WIDEST - 1, self.config.d_kv), attention.qkv
        past = mx.random.normal(shape, key=mx.random.key(0))
        past = past.astype(project(qkv, mx.zeros((1, self.config.d_model))).dtype)
        tokens = mx.arange(WIDEST, dtype=mx.uint32) % self.vocab_size

        def rows(first, last):
            own, prompt = self.keys_and_values(), self.keys_and_values(past, past)
            own.update(past, past, 0)
            cache = Cache([(own, prompt)])
            cache.offset = shape[1]
            for part in (tokens[:first], tokens[first:last]) if first else (tokens[:last],):
                logits = self.decode_block(part, cache)
                mx.eval(logits)
            return logits

        for low, high in [(low, high) for high in (WIDEST, 16) for low in (1, 2, 4, 8, 16)]:
            self.fewest, self.most = low, high
            whole = rows(0, high)
            parts = [part for n in sample if n < high for part in ((0, n), (n, n + 1))]
            same = (mx.array_equal(rows(i, j), whole[i:j], equal_nan=True) for i, j in parts)
            if group:  # all ranks compute all rows, then what all of them found counts
                same = ranks.exchange(all([agree.item() for agree in same]), group)
            if all(same):
                return
        self.fewest = self.most = 1

    def sanitize(self, weights):
        """A checkpoint's tensors by Hugging Face's names -> those of this model's parameters."""
        weights = {name: checkpoint.to_mlx(tensor) for name, tensor in weights.items()}
        for part in ("weight", "scales", "biases"):
            names = [name.replace("weight", part) for name in checkpoint.EMBEDDINGS]
            for name in [n for n in names if n in weights][:1]:
                weights[names[0]] = weights[name]
            for name in names[1:]:
                weights.pop(name, None)
        for name in checkpoint.UNUSED - {checkpoint.EMBEDDINGS[0]}:
            weights.pop(name, None)
        for name in list(weights):
            for whole, parts in JOINED.items():
                head, found, tail = name.partition(f"{parts[0]}.")
                pieces = [f"{head}{part}.{tail}" for part in parts]
                if found and all(piece in weights for piece in pieces):
                    arrays = [weights.pop(piece) for piece in pieces]
                    weights[f"{head}{whole}.{tail}"] = mx.concatenate(arrays)
        for name, array in weights.items():
            is_packed = name.endswith(".weight") and f"{name[:-6]}scales" in weights
            if array.dtype not in ((mx.uint32,) if is_packed else checkpoint.FLOATS):
                raise ValueError(
                    f"{name} holds {array.dtype}, not numbers as in {checkpoint.FLOATS}"
                )
            # In float16 the product with wo overflows in many T5s.
            if array.dtype == mx.float16 and (".wo." in name or array.ndim == 1):
                weights[name] = array.astype(mx.float32)
        return weights


# Matrices that share their input, by the place of the first one's name
JOINED = {
    "SelfAttention.qkv": ["SelfAttention.q", "SelfAttention.k", "SelfAttention.v"],
    "EncDecAttention.kv": ["EncDecAttention.k", "EncDecAttention.v"],
    "DenseReluDense.wi": ["DenseReluDense.wi_0", "DenseReluDense.wi_1"],
}


def kind(path_or_id):
    """The model_type of a folder or an id; "t5" where config.json does not tell: load says why."""
    try:
        config = checkpoint.read_json(checkpoint.find_folder(path_or_id) / "config.json")
        return str(config.get("model_type", "t5"))
    except ValueError:
        return "t5"


def load(path_or_id, group=None):
    """A model and its tokenizer, from a local folder or a Hugging Face id.

    Returns (T5, transformers tokenizer). Raises ValueError with one line for whatever is not a T5
    that can write text. No code that a checkpoint brings along is run. With a group of
    `mx.distributed` each rank loads its part, and all ranks run the model together.
    """
    try:
        folder, model, tokenizer = ranks.agree(lambda: load_alone(path_or_id, group), group)
        if group:
            ranks.check_equal("checkpoints", ranks.fingerprint(folder), group)
            ranks.check_equal("kinds of processors or of BLAS", model.alpha, group)
        # On the CPU `prepare` has tried all widths of every product already.
        model.check_rows((1, 2, 5, 11) if cpu.in_use() else range(1, WIDEST), group)
        if group:
            cache, token = model.start([model.config.start_id])
            logits = model.decode(token, cache).astype(mx.float32)
            bits = mx.sum(logits.view(mx.uint32)).item()
            ranks.check_equal("ways of rounding: use machines of one kind", bits, group)
        return model, tokenizer
    except ValueError as error:
        raise ValueError(f"{path_or_id}: {error}") from None


def load_alone(path_or_id, group):
    """What of `load` a rank does by itself -> folder, model, tokenizer."""
    folder = checkpoint.find_folder(path_or_id)
    config, weights = checkpoint.read_config(folder), checkpoint.open_tensors(folder)
    checkpoint.check_depth(config, weights)
    model = T5(replace(config, own_head="lm_head.weight" in weights))
    weights = model.sanitize(weights)
    with checkpoint.one_line("config.json and the weights disagree"):
        if config.quantization:
            nn.quantize(
                model,
                **config.quantization,
                class_predicate=lambda path, _: f"{path}.scales" in weights,
            )
        model.load_weights(list(weights.items()))
        weights.clear()
    model.eval()
    if group:
        with checkpoint.one_line(f"the model cannot be divided by {group.size()} ranks"):
            model.shard(group)
    cpu.prepare(model, model.is_for_few_rows)
    for _, array in tree_flatten(model.parameters()):  # type: ignore
        mx.eval(array)  # one at a time, so that what it was made from can go
    return folder, model, checkpoint.load_tokenizer(folder, config.vocab_size)

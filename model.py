"""T5 in MLX: encoder, decoder, KV cache, and `load` for Hugging Face checkpoints.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (https://arxiv.org/abs/1910.10683), and its family: v1.1, FLAN, mT5, MADLAD-400,
ByT5, UL2, umT5, CodeT5.
There is no batch dimension: activations are (positions, features).
"""

import fast_blas  # noqa: F401  isort: skip  (a fast BLAS on Linux: before mlx.core)

import math

import mlx.core as mx
import numpy as np

import checkpoint
import cpu
from cpu import CHUNK, MAX_WIDTH, find_widths


def gelu_new(x):
    """The tanh approximation of GELU, written with the logistic function."""
    return x / (1 + cpu.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {
    "relu": lambda x: mx.maximum(x, 0),
    "gelu": lambda x: x * (1 + mx.erf(x / math.sqrt(2))) / 2,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "silu": lambda x: x / (1 + cpu.exp(-x)),
    "swish": lambda x: x / (1 + cpu.exp(-x)),
}


class Linear:
    """x (L, columns) -> (L, rows) in the precision of the matrix, quantized or not."""

    few_rows = None  # in float32 on the CPU a cpu.FewRows, and `weight` is None

    def __init__(self, matrix):
        self.weight, self.scales, self.quantization = matrix
        self.dtype = self.scales[0].dtype if self.scales else self.weight.dtype
        if not self.scales:
            self.weight = self.weight.T
            mx.eval(self.weight)  # what is lazy belongs to this thread

    def __call__(self, x):
        x = x.astype(self.dtype)
        if self.few_rows:
            return self.few_rows(x)
        if self.scales:
            return mx.quantized_matmul(x, self.weight, *self.scales, **self.quantization)
        return x @ self.weight


class RMSNorm:
    """x / sqrt(mean(x * x) + epsilon) * scale, in float32 in every precision."""

    def __init__(self, config, weights, name, factor=1.0):
        self.with_sum = cpu.in_use()  # where operations count: the sum instead of the mean
        n = config.d_model if self.with_sum else 1
        scale = weights.take(f"{name}.weight", config.d_model).astype(mx.float32)
        self.scale, self.epsilon = scale * (factor * n**0.5), config.layer_norm_epsilon * n
        mx.eval(self.scale)

    def __call__(self, x):
        if self.with_sum:
            return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + self.epsilon) * self.scale
        return mx.fast.rms_norm(x, self.scale, self.epsilon)


class Attention:
    """Multi-head attention without 1/sqrt(d): T5 folds that factor into its initialization.

    Keys are (heads, d_kv, S), values (heads, S, d_kv).
    """

    def __init__(self, config, weights, name):
        def linear(names):
            return Linear(weights.matrix([f"{name}.{n}" for n in names], inner, config.d_model))

        self.heads, inner = config.num_heads, config.num_heads * config.d_kv
        if name.endswith("SelfAttention"):
            self.qkv = linear("qkv")
        else:
            self.q, self.kv = linear("q"), linear("kv")
        self.o = Linear(weights.matrix([f"{name}.o"], config.d_model, inner))

    def split(self, x, parts=1):
        """(L, parts * heads * d_kv) -> parts arrays (heads, L, d_kv)"""
        x = x.reshape(x.shape[0], parts * self.heads, -1).swapaxes(0, 1)
        return mx.split(x, parts) if parts > 1 else [x]

    def attend(self, q, k, v, bias=None):
        """q (heads, L, d_kv), bias (heads, L, S) -> (L, d_model)"""
        bias = None if bias is None else bias.astype(q.dtype)
        if cpu.in_use():
            y = cpu.attend(q, k, v, bias)
        else:
            q, k, v, bias = (a if a is None else a[None] for a in (q, k.swapaxes(1, 2), v, bias))
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=bias)[0]
        return self.o(y.transpose(1, 0, 2).reshape(y.shape[1], -1))


class FeedForward:
    """wo(act(wi x)), or wo(act(wi_0 x) * (wi_1 x)) where the checkpoint is gated."""

    def __init__(self, config, weights, name):
        names = [f"{name}.wi_0", f"{name}.wi_1"] if config.is_gated else [f"{name}.wi"]
        self.wi = Linear(weights.matrix(names, config.d_ff, config.d_model))
        # In float16 the product with wo overflows in many T5s; that matrix is widened to float32.
        self.wo = Linear(weights.matrix([f"{name}.wo"], config.d_model, config.d_ff, widen=True))
        if config.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {config.activation!r}, not of {[*ACTIVATIONS]}")
        self.activation, self.is_gated = ACTIVATIONS[config.activation], config.is_gated

    def __call__(self, x):
        x = self.wi(x).astype(mx.float32)
        if not self.is_gated:
            return self.wo(self.activation(x))
        gate, x = mx.split(x, 2, axis=-1)
        return self.wo(self.activation(gate) * x)


class Layer:
    """Self-attention, in the decoder cross-attention, and the feed-forward, each x + f(norm(x))."""

    def __init__(self, config, weights, name, decoder):
        n = 3 if decoder else 2
        self.norms = [RMSNorm(config, weights, f"{name}.layer.{i}.layer_norm") for i in range(n)]
        self.self_attention = Attention(config, weights, f"{name}.layer.0.SelfAttention")
        if decoder:
            self.cross_attention = Attention(config, weights, f"{name}.layer.1.EncDecAttention")
        self.feed_forward = FeedForward(config, weights, f"{name}.layer.{n - 1}.DenseReluDense")

    def encode(self, x, bias):
        attention = self.self_attention
        q, k, v = attention.split(attention.qkv(self.norms[0](x)), 3)
        x = x + attention.attend(q, k.swapaxes(1, 2), v, bias)
        return x + self.feed_forward(self.norms[1](x))

    def decode(self, x, bias, cache, position, new):
        """x (width, d_model) at `position`, the first `new` rows real; bias (heads, width, keys)"""
        attention = self.self_attention
        q, k, v = attention.split(attention.qkv(self.norms[0](x)), 3)
        k, v = cache.update(k, v, position, new, bias.shape[-1])
        x = x + attention.attend(q, k, v, bias)
        attention = self.cross_attention
        (q,) = attention.split(attention.q(self.norms[1](x)))
        x = x + attention.attend(q, cache.cross_keys, cache.cross_values)
        return x + self.feed_forward(self.norms[2](x))


class LayerCache:
    """One decoder layer's keys (heads, d_kv, positions) and values (heads, positions, d_kv).

    The CPU wants the keys in memory as their shape says, the GPU like the values.
    """

    def __init__(self, keys, values):
        """keys, values: those of the prompt, both (heads, S, d_kv)."""
        self.axis = 2 if cpu.in_use() else 1  # along which keys are appended
        self.cross_keys, self.cross_values = keys.swapaxes(1, 2), values
        if cpu.in_use():
            self.cross_keys, self.cross_values = cpu.lay_out(self.cross_keys, values)
        self.keys = self.values = None

    def update(self, k, v, start, new, positions):
        """Write the first `new` of k, v (heads, L, d_kv) at `start`; return `positions` of all.

        The others, which the next ones overwrite, are cut off where they do not fit or might
        overflow: a masked infinity would not be masked.
        """
        if start + k.shape[1] > positions or k.dtype == mx.float16:
            k, v = k[:, :new], v[:, :new]
        self.keys = write(self.keys, k.swapaxes(1, self.axis), start, positions, self.axis)
        self.values = write(self.values, v, start, positions, 1)
        keys = self.keys if self.axis == 2 else self.keys.swapaxes(1, 2)
        return keys[:, :, :positions], self.values[:, :positions]


def write(array, new, start, positions, axis):
    """Write `new` into the array at `start`, where need be with room for that many positions."""
    shape = list(new.shape)
    shape[axis] = positions - (0 if array is None else array.shape[axis])
    if shape[axis] > 0:
        room = mx.zeros(shape, new.dtype)
        array = room if array is None else mx.concatenate([array, room], axis=axis)
    array[(slice(None),) * axis + (slice(start, start + new.shape[axis]),)] = new
    return array


class Cache:
    """What one generation has computed so far; the caller holds it."""

    def __init__(self, layers):
        self.layers, self.offset = layers, 0  # how many tokens have been fed

    def trim(self, n: int):
        """Forget the last n tokens: only a length moves. ValueError unless 0 <= n <= offset."""
        if not 0 <= n <= self.offset:
            raise ValueError(f"cannot trim {n} of the cache's {self.offset} tokens")
        self.offset -= n


class RelativeBias:
    """T5's bucketed relative-position bias, as tables that a pass only slices."""

    def __init__(self, config, weights, name, dtype):
        shape = (config.relative_attention_num_buckets, config.num_heads)
        name = f"{name}.layer.0.SelfAttention.relative_attention_bias.weight"
        self.weight = weights.take(name, *shape).astype(mx.float32)
        mx.eval(self.weight)
        self.bidirectional = name.startswith("encoder")
        self.max_distance = config.relative_attention_max_distance
        self.dtype, self.table = dtype, None

    def of(self, distance):
        """Bias at `distance` = key position - query position, numpy (N,) -> (heads, N)."""
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
        return self.weight[mx.array(base + np.where(distance < exact, distance, far))].T

    def encoder(self, length):
        """(heads, length, length), every query seeing every key."""
        return self._shifted(self.of(np.arange(1 - length, length)), length, length, length - 1)

    def decoder(self, position, width, keys):
        """(heads, width, keys) for queries from `position` on; -inf where a key is yet to come."""
        if self.table is None or self.table.shape[2] < 2 * keys:
            # table[h, r, i]: query r rows below one that stands `reach - 1 - i` after the key
            reach = 4 * max(keys, CHUNK)  # far more than is needed now, so that it is seldom built
            distance = np.arange(2 * reach + MAX_WIDTH) - (reach - 1) - MAX_WIDTH
            row = mx.where(mx.array(distance > 0), -mx.inf, self.of(distance))
            table = self._shifted(row, MAX_WIDTH, 2 * reach, MAX_WIDTH)
            mx.eval(table)
            self.table = table
        first = self.table.shape[2] // 2 - 1 - position
        return self.table[:, :width, first : first + keys]

    def _shifted(self, row, height, width, first):
        """row (heads, N) -> (heads, height, width), of which row r is row[:, first - r :]"""
        strides = (row.shape[1], -1, 1)
        rows = mx.as_strided(row, (row.shape[0], height, width), strides, first)
        return mx.contiguous(rows).astype(self.dtype)


class T5:
    """An encoder-decoder whose `start` and `decode` are all that the decoders ask of a model.

    eos_ids: the ids that end a text, from generation_config.json, else config.json (maybe none).
    vocab_size: the width of the logits, which may exceed the tokenizer's ids.
    """

    is_encoder_decoder = True

    def __init__(self, config, weights):
        self.config, self.eos_ids, self.vocab_size = config, config.eos_ids, config.vocab_size
        if not any(name.startswith("decoder.block") for name in weights.tensors):
            raise ValueError("encoder-only checkpoints are not supported: there is no decoder")
        shape = (config.vocab_size, config.d_model)
        names = [n for n in checkpoint.EMBEDDINGS if n in weights.tensors] or checkpoint.EMBEDDINGS
        self.embedding = weights.matrix([names[0].removesuffix(".weight")], *shape)
        own_head = "lm_head.weight" in weights.tensors
        self.head = Linear(weights.matrix(["lm_head"], *shape) if own_head else self.embedding)
        self.encoder = self._stack(weights, "encoder", config.num_layers)
        self.decoder = self._stack(weights, "decoder", config.num_decoder_layers)
        self.encoder_norm = RMSNorm(config, weights, "encoder.final_layer_norm")
        factor = config.d_model**-0.5 if config.scale_outputs else 1.0
        self.decoder_norm = RMSNorm(config, weights, "decoder.final_layer_norm", factor)
        weights.finish()
        linear = [self.head]  # all that a pass multiplies with
        for layer in self.decoder[0]:
            attention, cross, wide = layer.self_attention, layer.cross_attention, layer.feed_forward
            linear += [attention.qkv, attention.o, cross.q, cross.o, wide.wi, wide.wo]
        self.large_pages = cpu.LargePages(cpu.for_few_rows(linear))
        self.widths, self.step = self._find_widths()

    def _find_widths(self):
        """cpu.find_widths of what rounds: one decoder layer and the head, or a part of it."""
        layer, biases = self.decoder[0][0], self.decoder[1]
        c, most = self.config, CHUNK - MAX_WIDTH - 1
        x = mx.random.normal((MAX_WIDTH, c.d_model), key=mx.random.key(0))
        past = mx.random.normal((c.num_heads, most, c.d_kv), key=mx.random.key(1))
        past = past.astype(layer.self_attention.qkv.dtype)

        def rows(n, position=most, keys=CHUNK):
            cache = LayerCache(past, past)
            cache.update(past[:, :position], past[:, :position], 0, position, keys)
            y = layer.decode(x[:n], biases[0].decoder(position, n, keys), cache, position, n)
            few_rows = self.head.few_rows
            y = mx.concatenate([y, few_rows(y, part=True) if few_rows else self.head(y)], axis=1)
            mx.eval(y)  # one at a time: in half precision MLX's CPU backend copies the weights
            return y

        return find_widths(rows)

    def _stack(self, weights, name, depth):
        """The layers of one stack and their relative biases: one for all, or one each (umT5)."""
        c, blocks = self.config, [f"{name}.block.{i}" for i in range(depth)]
        own = blocks if c.bias_in_every_layer else blocks[:1]
        biases = [RelativeBias(c, weights, block, self.head.dtype) for block in own]
        return [Layer(c, weights, block, name == "decoder") for block in blocks], biases

    def embed(self, tokens):
        """The residual stream is float32 in every precision: in float16 many T5s overflow it."""
        tokens = mx.minimum(tokens, self.vocab_size - 1)  # out of range, MLX would read garbage
        weight, scales, quantization = self.embedding
        rows = weight[tokens]
        if scales:
            rows = mx.dequantize(rows, *(part[tokens] for part in scales), **quantization)
        return rows.astype(mx.float32)

    def encode(self, prompt):
        """prompt (S,) token ids -> (S, d_model)"""
        layers, biases = self.encoder
        biases = [b.encoder(prompt.size) for b in biases]
        x = self.embed(prompt)
        for i, layer in enumerate(layers):
            x = layer.encode(x, biases[i % len(biases)])
        return self.encoder_norm(x)

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
        memory = self.encode(prompt.astype(mx.uint32))
        cross = [layer.cross_attention for layer in self.decoder[0]]
        cache = Cache([LayerCache(*a.split(a.kv(memory), 2)) for a in cross])
        return cache, mx.array([self.config.start_id], mx.uint32)

    def decode(self, tokens, cache):
        """One pass: tokens (L,) integer ids -> logits (L, vocab_size); the cache grows by L.

        Lazy: nothing is evaluated. Row i is the prediction of the token that follows tokens[i].
        A row's bits do not depend on L, nor on how the tokens before it were fed.
        """
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"decode takes (L,) token ids, at least one, not {tokens.shape}")
        self.large_pages.count_pass()
        logits, done = [], 0
        while done < tokens.size:
            # How many keys a row sees, masked or not, is told by its position alone.
            width = min(tokens.size - done, CHUNK - cache.offset % CHUNK)
            width = math.ceil(width / math.ceil(width / self.widths[1]))  # in equal parts
            logits.append(self._block(tokens[done : done + width], cache))
            done += width
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _block(self, tokens, cache):
        new, position = tokens.size, cache.offset
        width = max(new, self.widths[0])
        if width > new:
            tokens = mx.pad(tokens, (0, width - new))  # rows that nobody reads
        layers, biases = self.decoder
        step = self.step if position < CHUNK else CHUNK
        keys = math.ceil((position + new) / step) * step
        biases = [b.decoder(position, width, keys) for b in biases]
        x = self.embed(tokens)
        for i, (layer, layer_cache) in enumerate(zip(layers, cache.layers, strict=True)):
            x = layer.decode(x, biases[i % len(biases)], layer_cache, position, new)
        cache.offset += new
        return self.head(self.decoder_norm(x))[:new]


def load(path_or_id):
    """A model and its tokenizer, from a local folder or a Hugging Face id.

    Returns (T5, transformers tokenizer). Raises ValueError with one line for whatever is not a T5
    that can write text. No code that a checkpoint brings along is run.
    """
    try:
        folder = checkpoint.find_folder(path_or_id)
        config = checkpoint.read_config(folder)
        # Nobody else holds the tensors, so that each can go when it has become part of the model.
        weights = checkpoint.Weights(checkpoint.open_tensors(folder), config.quantization)
        model = T5(config, weights)
        return model, checkpoint.load_tokenizer(folder, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path_or_id}: {error}") from None

"""T5 in MLX: encoder, decoder, KV cache, and `load` for Hugging Face checkpoints.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (https://arxiv.org/abs/1910.10683), and its family: v1.1, FLAN, mT5, ByT5, UL2, umT5.
There is no batch dimension: activations are (positions, features).
"""

import fast_blas  # isort: skip  (a fast BLAS on Linux: before mlx.core)

import functools
import math

import mlx.core as mx
import numpy as np

import checkpoint

CACHE_BYTES = 2**21  # about what one core's cache holds
CHUNK = 256  # positions: no block of tokens lies in two chunks, nor a sum over keys
STEP = 64  # keys: the first chunk is taken in such steps, where that does not change the bits
QUERIES = 1024  # whose scores are in memory at the same time
SETTLED = 64  # passes after which a model is taken to be used for long
MAX_WIDTH = 32  # a pass over more tokens is computed in blocks of this many rows


def exp(x):
    """e to the x; in MLX on the CPU a power costs a third of it."""
    return mx.power(math.e, x) if on_cpu() else mx.exp(x)


def gelu_new(x):
    """The tanh approximation of GELU, written with the logistic function."""
    return x / (1 + exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {
    "relu": lambda x: mx.maximum(x, 0),
    "gelu": lambda x: x * (1 + mx.erf(x / math.sqrt(2))) / 2,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "silu": lambda x: x / (1 + exp(-x)),
    "swish": lambda x: x / (1 + exp(-x)),
}


def on_cpu():
    return mx.default_device() == mx.Device(mx.cpu)


def for_few_rows(weight):
    """A matrix (N, K) as blocks (blocks, K, N / blocks), and into how few rows to split a product.

    MKL reads a matrix from memory once for every three rows, so it is given blocks that stay in the
    processor's cache; and it rounds 2 to 15 rows alike where the matrix lies along K, 2 to 32 where
    it lies along N, which is as fast for small matrices only.
    """
    rows, columns = weight.shape
    if columns < 512 or weight.nbytes <= CACHE_BYTES // 4:
        return mx.contiguous(weight.T)[None], math.inf
    fits = (n for n in range(1, rows // 64) if rows % n == 0 and weight.nbytes / n <= CACHE_BYTES)
    return weight.reshape(next(fits, 1), -1, columns).swapaxes(1, 2), 15


class Linear:
    """x (L, columns) -> (L, rows) in the precision of the matrix, quantized or not."""

    def __init__(self, matrix, few_rows=False):
        weight, self.scales, self.quantization = matrix
        self.weight, self.dtype = weight, self.scales[0].dtype if self.scales else weight.dtype
        self.few_rows = few_rows and on_cpu() and weight.dtype == mx.float32
        if not self.scales:
            self.weight, self.most_rows = weight.T[None], math.inf
            if self.few_rows:
                self.weight, self.most_rows = for_few_rows(weight)
            self.flat = self.weight.squeeze(0) if len(self.weight) == 1 else weight.T
            mx.eval(self.weight, self.flat)

    def __call__(self, x, part=False):
        """part: only some of the columns, enough to see how the product rounds."""
        x, rows = x.astype(self.dtype), x.shape[0]
        if self.scales:
            return mx.quantized_matmul(x, self.weight, *self.scales, **self.quantization)
        weight = self.weight[:1] if part else self.weight  # [0] would copy
        blocks, columns, width = weight.shape
        if rows <= 3 or (rows <= self.most_rows and blocks == 1):
            return x @ (weight.squeeze(0) if part else self.flat)
        batches = math.ceil(rows / self.most_rows)
        if batches == 1:
            return (x @ weight).swapaxes(0, 1).reshape(rows, -1)
        x = mx.pad(x, [(0, -rows % batches), (0, 0)]).reshape(batches, -1, columns)
        y = x @ weight[:, None]  # (blocks, batches, rows, width): a block serves all batches
        return y.transpose(1, 2, 0, 3).reshape(-1, blocks * width)[:rows]


class RMSNorm:
    """x / sqrt(mean(x * x) + epsilon) * scale, in float32 in every precision."""

    def __init__(self, config, weights, name, factor=1.0):
        self.with_sum = on_cpu()  # where operations count: the sum instead of the mean
        n = config.d_model if self.with_sum else 1
        scale = weights.take(f"{name}.weight", config.d_model).astype(mx.float32)
        self.scale, self.epsilon = scale * (factor * n**0.5), config.layer_norm_epsilon * n
        mx.eval(self.scale)  # what is lazy belongs to this thread

    def __call__(self, x):
        if self.with_sum:
            return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + self.epsilon) * self.scale
        return mx.fast.rms_norm(x, self.scale, self.epsilon)


class Attention:
    """Multi-head attention without 1/sqrt(d): T5 folds that factor into its initialization.

    Keys are (heads, d_kv, S), values (heads, S, d_kv).
    """

    def __init__(self, config, weights, name, few_rows):
        def linear(names, few_rows=few_rows):
            matrices = [f"{name}.{n}" for n in names]
            return Linear(weights.matrix(matrices, inner, config.d_model), few_rows)

        self.heads, inner = config.num_heads, config.num_heads * config.d_kv
        if name.endswith("SelfAttention"):
            self.qkv = linear("qkv")
        else:
            self.q, self.kv = linear("q"), linear("kv", few_rows=False)
        self.o = Linear(weights.matrix([f"{name}.o"], config.d_model, inner), few_rows)

    def split(self, x, parts=1):
        """(L, parts * heads * d_kv) -> parts arrays (heads, L, d_kv)"""
        x = x.reshape(x.shape[0], parts * self.heads, -1).swapaxes(0, 1)
        return mx.split(x, parts) if parts > 1 else [x]

    def attend(self, q, k, v, bias=None):
        """q (heads, L, d_kv), bias (heads, L, S) -> (L, d_model)"""
        bias = None if bias is None else bias.astype(q.dtype)
        if on_cpu():
            few = q.shape[1] <= MAX_WIDTH or bias is None
            y = attend_on_cpu(q, k, v, bias) if few else attend_in_turns(q, k, v, bias)
        else:
            q, k, v, bias = (a if a is None else a[None] for a in (q, k.swapaxes(1, 2), v, bias))
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=bias)[0]
        return self.o(y.transpose(1, 0, 2).reshape(y.shape[1], -1))


def attend_on_cpu(q, k, v, bias):
    """What mx.fast.scaled_dot_product_attention computes, so that a row's bits do not depend on L.

    BLAS may cut a long sum over keys into parts, how depends on L; so it gets CHUNK at most.
    """
    scores = q @ k if bias is None else q @ k + bias
    p = exp(scores - scores.max(axis=-1, keepdims=True))
    total = p.sum(axis=-1, keepdims=True)
    heads, width, keys = p.shape
    if v.shape[1] > keys:  # zeros fill the last chunk
        p = mx.pad(p, [(0, 0), (0, 0), (0, v.shape[1] - keys)])
    if v.shape[1] <= CHUNK or width > MAX_WIDTH:
        return p @ v / total
    p = p.reshape(heads, width, -1, CHUNK).swapaxes(1, 2)
    return (p @ v.reshape(heads, -1, CHUNK, v.shape[-1])).sum(axis=1) / total


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
            turns = [slice(i, i + QUERIES) for i in range(0, q.shape[1], QUERIES)]
            rows = [attend_on_cpu(q[h, turn], k[h], v[h], bias[h, turn]) for turn in turns]
            parts.append(rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1))
    return mx.concatenate(parts)


class FeedForward:
    """wo(act(wi x)), or wo(act(wi_0 x) * (wi_1 x)) where the checkpoint is gated."""

    def __init__(self, config, weights, name, few_rows):
        names = [f"{name}.wi_0", f"{name}.wi_1"] if config.is_gated else [f"{name}.wi"]
        self.wi = Linear(weights.matrix(names, config.d_ff, config.d_model), few_rows)
        # In float16 the product with wo overflows in many T5s; that matrix is widened to float32.
        wo = weights.matrix([f"{name}.wo"], config.d_model, config.d_ff, widen=True)
        self.wo = Linear(wo, few_rows)
        if config.activation not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {config.activation!r}; known are {', '.join(ACTIVATIONS)}"
            )
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
        last = 2 if decoder else 1
        norms = [f"{name}.layer.{i}.layer_norm" for i in range(last + 1)]
        self.norms = [RMSNorm(config, weights, norm) for norm in norms]
        self.self_attention = Attention(config, weights, f"{name}.layer.0.SelfAttention", decoder)
        if decoder:
            cross = f"{name}.layer.1.EncDecAttention"
            self.cross_attention = Attention(config, weights, cross, few_rows=True)
        name = f"{name}.layer.{last}.DenseReluDense"
        self.feed_forward = FeedForward(config, weights, name, few_rows=decoder)

    def encode(self, x, bias):
        attention = self.self_attention
        q, k, v = attention.split(attention.qkv(self.norms[0](x)), 3)
        x = x + attention.attend(q, k.swapaxes(1, 2), v, bias)
        return x + self.feed_forward(self.norms[1](x))

    def decode(self, x, bias, cache, new):
        """x (width, d_model), of which the first `new` rows are kept; bias (heads, width, keys)"""
        attention = self.self_attention
        q, k, v = attention.split(attention.qkv(self.norms[0](x)), 3)
        k, v = cache.update(k, v, new, bias.shape[-1])
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
        self.axis = 2 if on_cpu() else 1  # along which keys are appended
        self.cross_keys, self.cross_values = keys.swapaxes(1, 2), values
        if on_cpu():
            self.cross_keys = mx.contiguous(self.cross_keys)
            if values.shape[1] > CHUNK:
                self.cross_values = mx.pad(values, [(0, 0), (0, -values.shape[1] % CHUNK), (0, 0)])
        self.keys = self.values = None
        self.offset = 0

    def update(self, k, v, new, positions):
        """Append the first `new` of k, v (heads, L, d_kv); return `positions` keys and values.

        The others, which the next ones overwrite, are cut off where they do not fit or might
        overflow: a masked infinity would not be masked.
        """
        start = self.offset
        self.offset += new
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
        self.layers = layers

    @property
    def offset(self) -> int:
        """How many tokens have been fed."""
        return self.layers[0].offset

    def trim(self, n: int):
        """Forget the last n tokens: only a length moves. ValueError unless 0 <= n <= offset."""
        if not 0 <= n <= self.offset:
            raise ValueError(f"cannot trim {n} of the cache's {self.offset} tokens")
        for layer in self.layers:
            layer.offset -= n


class RelativeBias:
    """T5's bucketed relative-position bias, as tables that a pass only slices."""

    def __init__(self, config, weight, bidirectional, dtype):
        self.weight, self.dtype, self.bidirectional = weight, dtype, bidirectional  # (buckets, H)
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.table = None

    def of(self, distance):
        """Bias at `distance` = key position - query position, numpy (N,) -> (heads, N)."""
        buckets, base = self.buckets, np.zeros_like(distance)
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
        self.head = weights.matrix(["lm_head"], *shape) if own_head else self.embedding
        self.head = Linear(self.head, few_rows=True)
        self.encoder = self._stack(weights, "encoder", config.num_layers)
        self.decoder = self._stack(weights, "decoder", config.num_decoder_layers)
        self.encoder_norm = RMSNorm(config, weights, "encoder.final_layer_norm")
        factor = config.d_model**-0.5 if config.scale_outputs else 1.0
        self.decoder_norm = RMSNorm(config, weights, "decoder.final_layer_norm", factor)
        weights.finish()
        self.widths, self.step = self._find_widths()
        parts = [(x.self_attention, x.cross_attention, x.feed_forward) for x in self.decoder[0]]
        linear = [m for p in sum(parts, ()) for m in vars(p).values() if isinstance(m, Linear)]
        self.passes, self.small_pages = 0, [m.flat for m in [self.head, *linear] if m.few_rows]

    def _find_widths(self):
        """(lowest, highest) number of rows between which each row's bits are the same, and STEP
        where they do not depend on how many masked keys follow, else CHUNK.

        Matrix products round differently for 1, for a few and for many rows, at limits that depend
        on the library, the shapes and the threads; apart from that, not on a row's place or its
        neighbours. `decode` feeds every token in blocks of these widths, so that a text is the
        same whatever the draft lengths. One layer and a part of the head tell the limits.
        """
        layer, biases = self.decoder[0][0], self.decoder[1]
        c, most = self.config, CHUNK - MAX_WIDTH - 1
        x = mx.random.normal((MAX_WIDTH, c.d_model), key=mx.random.key(0))
        past = mx.random.normal((c.num_heads, most, c.d_kv), key=mx.random.key(1))
        past = past.astype(layer.self_attention.qkv.dtype)

        def rows(n, position=most, keys=CHUNK):
            cache = LayerCache(past, past)
            cache.update(past[:, :position], past[:, :position], position, keys)
            y = layer.decode(x[:n], biases[0].decoder(position, n, keys), cache, n)
            y = mx.concatenate([y, self.head(y, part=True)], axis=1)
            mx.eval(y)  # one at a time: in half precision MLX's CPU backend copies the weights
            return y

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

    def _stack(self, weights, name, depth):
        """The layers of one stack and their relative biases: one for all, or one each (umT5)."""
        c, biases = self.config, []
        shape = (c.relative_attention_num_buckets, c.num_heads)
        for i in range(depth if c.bias_in_every_layer else 1):
            key = f"{name}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
            weight = weights.take(key, *shape).astype(mx.float32)
            mx.eval(weight)
            biases.append(RelativeBias(c, weight, name == "encoder", self.head.dtype))
        blocks = (f"{name}.block.{i}" for i in range(depth))
        return [Layer(c, weights, b, name == "decoder") for b in blocks], biases

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
            raise ValueError(
                f"token id {wrong[0]} in the prompt; the model has {self.vocab_size} ids"
            )
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
        self.passes += 1
        if self.passes > SETTLED and self.passes % 4 == 0 and self.small_pages:  # it takes time
            weight = np.array(self.small_pages.pop(), copy=False)
            fast_blas.use_large_pages(weight.ctypes.data, weight.nbytes)
        logits, done = [], 0
        while done < tokens.size:
            # How many keys a row sees, masked or not, is told by its position alone.
            room = CHUNK - cache.offset % CHUNK
            width = min(tokens.size - done, room)
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
            x = layer.decode(x, biases[i % len(biases)], layer_cache, new)
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

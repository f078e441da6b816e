"""T5 in MLX: encoder, decoder, KV cache, and `load` for Hugging Face checkpoints.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (https://arxiv.org/abs/1910.10683), and its family: v1.1, FLAN, mT5, ByT5, UL2, umT5.
There is no batch dimension: activations are (positions, features).
"""

import fast_blas  # noqa: F401  isort: skip  (a fast BLAS on Linux: before mlx.core)

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import mlx.core as mx
import numpy as np

CHUNK = 256  # the cache grows by this many positions
MAX_WIDTH = 32  # a pass over more tokens is computed in blocks of this many rows


@dataclass(frozen=True)
class Config:
    """What the computation needs of a checkpoint's config.json; field names are Hugging Face's."""

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    activation: str = "relu"
    is_gated: bool = False
    scale_outputs: bool = True  # times d_model ** -0.5 before the head
    bias_in_every_layer: bool = False  # umT5
    start_id: int = 0
    eos_ids: tuple = (1,)
    quantization: dict | None = None  # {"group_size": 64, "bits": 4}, written by convert.py

    @staticmethod
    def from_files(config: dict, generation: dict) -> "Config":
        """From config.json and generation_config.json ({} where absent); raises ValueError."""
        kind = config.get("model_type")
        if kind not in ("t5", "mt5", "umt5"):
            raise ValueError(f"model_type is {kind!r}; supported are t5, mt5 and umt5")
        if config.get("is_encoder_decoder") is False:
            raise ValueError("an encoder-only T5 cannot write text; a decoder is needed")
        values = {}
        for field in fields(Config):
            value = config.get(field.name, field.default)
            if field.name == "num_decoder_layers" and config.get(field.name) is None:
                value = values["num_layers"]
            if field.type in (int, float):
                allowed = int if field.type is int else (int, float)
                if isinstance(value, bool) or not isinstance(value, allowed) or not value > 0:
                    if field.name != "start_id":
                        raise ValueError(f"config.json: {field.name} must be > 0, not {value!r}")
            values[field.name] = value
        buckets = values["relative_attention_num_buckets"]
        if buckets < 4 or values["relative_attention_max_distance"] <= buckets // 2:
            raise ValueError(
                "config.json: relative_attention_num_buckets must be at least 4, and"
                f" relative_attention_max_distance more than half of it, not {buckets} and"
                f" {values['relative_attention_max_distance']}"
            )
        feed_forward = config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
        gate, _, name = str(feed_forward).rpartition("-")
        values["activation"] = config.get(
            "dense_act_fn", "gelu_new" if feed_forward == "gated-gelu" else name
        )
        values["is_gated"] = config.get("is_gated_act", gate == "gated")
        if values["activation"] not in ACTIVATIONS or gate not in ("", "gated"):
            raise ValueError(
                f"config.json: unknown activation {values['activation']!r} (feed_forward_proj"
                f" {feed_forward!r}); known are {', '.join(ACTIVATIONS)}, alone or as gated-..."
            )
        # transformers 5 ties every T5, and tells v1.1 by what tie_word_embeddings said in the file.
        scale = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
        values["scale_outputs"] = kind != "mt5" and bool(scale)
        values["bias_in_every_layer"] = kind == "umt5"

        def ids(name, default):
            """A token id or list of ids: generation_config's, else config's, else the default."""
            found = generation.get(name)
            if found is None:
                found = config.get(name, default)
            listed = found if isinstance(found, list) else [] if found is None else [found]
            for i in listed:
                if isinstance(i, bool) or not isinstance(i, int) or i < 0:
                    raise ValueError(f"{name} must be a token id or a list of ids, not {found!r}")
            return tuple(listed)

        values["eos_ids"] = ids("eos_token_id", 1)
        start = config.get("decoder_start_token_id")
        start = (start,) if start is not None else ids("decoder_start_token_id", None)
        start = (*start, *ids("pad_token_id", 0), 0)[0]
        if isinstance(start, bool) or not isinstance(start, int):
            raise ValueError(f"decoder_start_token_id must be a token id, not {start!r}")
        if not 0 <= start < values["vocab_size"]:
            raise ValueError(f"decoder_start_token_id {start} is not below vocab_size")
        values["start_id"] = start
        return Config(**values)


ACTIVATIONS = {
    "relu": lambda x: mx.maximum(x, 0),
    "gelu": lambda x: x * (1 + mx.erf(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * mx.sigmoid(x),
}
ACTIVATIONS["swish"] = ACTIVATIONS["silu"]
ACTIVATIONS["gelu_pytorch_tanh"] = ACTIVATIONS["gelu_new"]


class Linear:
    """x (L, in) -> (L, out), in the weights' precision; weight (out, in), perhaps quantized."""

    def __init__(self, weight, scales=None, biases=None, quantization=None):
        self.weight, self.scales, self.biases = weight, scales, biases
        self.quantization = quantization
        self.dtype = weight.dtype if scales is None else scales.dtype

    def __call__(self, x):
        x = x.astype(self.dtype)
        if self.scales is None:
            return x @ self.weight.T
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, **self.quantization)

    def rows(self, ids):
        """Rows of the matrix as they are stored, for the embedding: ids (L,) -> (L, in)."""
        if self.scales is None:
            return self.weight[ids]
        parts = (self.weight[ids], self.scales[ids], self.biases[ids])
        return mx.dequantize(*parts, **self.quantization)


class Attention:
    """Multi-head attention without 1/sqrt(d): T5 folds that factor into its initialization."""

    def __init__(self, config, weights, name, cross):
        self.heads = config.num_heads
        inner, d = config.num_heads * config.d_kv, config.d_model
        if cross:
            self.q = weights.linear([f"{name}.q"], inner, d)
            self.kv = weights.linear([f"{name}.k", f"{name}.v"], inner, d)
        else:
            self.qkv = weights.linear([f"{name}.q", f"{name}.k", f"{name}.v"], inner, d)
        self.o = weights.linear([f"{name}.o"], d, inner)

    def split(self, x, parts):
        """(L, parts * heads * d_kv) -> parts arrays (heads, L, d_kv)"""
        return x.reshape(x.shape[0], parts, self.heads, -1).transpose(1, 2, 0, 3)

    def attend(self, q, k, v, bias=None):
        """q (heads, L, d_kv); k, v (heads, S, d_kv); bias (heads, L, S) -> (L, d_model)"""
        y = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0, mask=bias)
        return self.o(y[0].transpose(1, 0, 2).reshape(q.shape[1], -1))


class FeedForward:
    """wo(act(wi x)), or wo(act(wi_0 x) * (wi_1 x)) where the checkpoint is gated."""

    def __init__(self, config, weights, name):
        names = [f"{name}.wi_0", f"{name}.wi_1"] if config.is_gated else [f"{name}.wi"]
        self.wi = weights.linear(names, config.d_ff, config.d_model)
        self.wo = weights.linear([f"{name}.wo"], config.d_model, config.d_ff)
        self.activation, self.is_gated = ACTIVATIONS[config.activation], config.is_gated

    def __call__(self, x):
        x = self.wi(x)
        if not self.is_gated:
            return self.wo(self.activation(x))
        gate, x = mx.split(x.astype(self.wo.dtype), 2, axis=-1)  # float16: the product overflows
        return self.wo(self.activation(gate) * x)


class Layer:
    """Self-attention, in the decoder cross-attention, and the feed-forward, each x + f(norm(x))."""

    def __init__(self, config, weights, name, decoder):
        self.eps = config.layer_norm_epsilon
        last = 2 if decoder else 1
        self.norms = [
            weights.norm(f"{name}.layer.{i}.layer_norm", config.d_model) for i in range(last + 1)
        ]
        self.self_attention = Attention(config, weights, f"{name}.layer.0.SelfAttention", False)
        if decoder:
            self.cross_attention = Attention(
                config, weights, f"{name}.layer.1.EncDecAttention", True
            )
        self.feed_forward = FeedForward(config, weights, f"{name}.layer.{last}.DenseReluDense")

    def norm(self, i, x):
        return mx.fast.rms_norm(x, self.norms[i], self.eps)

    def encode(self, x, bias):
        attention = self.self_attention
        q, k, v = attention.split(attention.qkv(self.norm(0, x)), 3)
        x = x + attention.attend(q, k, v, bias)
        return x + self.feed_forward(self.norm(1, x))

    def decode(self, x, bias, cache, new):
        """x (width, d_model), of which the first `new` rows are kept; bias (heads, width, keys)"""
        attention = self.self_attention
        q, k, v = attention.split(attention.qkv(self.norm(0, x)), 3)
        k, v = cache.update(k[:, :new], v[:, :new], bias.shape[-1])
        x = x + attention.attend(q, k, v, bias)
        attention = self.cross_attention
        (q,) = attention.split(attention.q(self.norm(1, x)), 1)
        x = x + attention.attend(q, cache.cross_keys, cache.cross_values)
        return x + self.feed_forward(self.norm(2, x))


class LayerCache:
    """One decoder layer's keys and values, (heads, positions, d_kv): own ones and the prompt's."""

    def __init__(self, cross_keys, cross_values):
        self.cross_keys, self.cross_values = cross_keys, cross_values
        self.keys = self.values = mx.zeros((cross_keys.shape[0], 0, cross_keys.shape[2]))
        self.offset = 0

    def update(self, k, v, positions):
        """Append k, v (heads, L, d_kv); return the first `positions` keys and values."""
        end = self.offset + k.shape[1]
        missing = positions - self.keys.shape[1]
        if missing > 0:
            room = mx.zeros((k.shape[0], missing, k.shape[2]), k.dtype)
            self.keys = mx.concatenate([self.keys.astype(k.dtype), room], axis=1)
            self.values = mx.concatenate([self.values.astype(v.dtype), room], axis=1)
        self.keys[:, self.offset : end] = k
        self.values[:, self.offset : end] = v
        self.offset = end
        return self.keys[:, :positions], self.values[:, :positions]


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
        d = np.arange(2 * length)
        row = self.of(np.where(d < length, d, d - 2 * length))  # at index: key - query mod 2 length
        # Flattened copies of a row, read with a period one shorter, shift by one from row to row.
        rows = mx.broadcast_to(row[:, None], (row.shape[0], length, 2 * length))
        rows = rows.reshape(row.shape[0], -1)[:, : length * (2 * length - 1)]
        return rows.reshape(row.shape[0], length, -1)[:, :, :length].astype(self.dtype)

    def decoder(self, position, width, keys):
        """(heads, width, keys) for queries from `position` on; -inf where a key is yet to come."""
        if self.table is None or self.table.shape[2] < 2 * keys:
            # table[h, r, i]: query r rows below one that stands `keys - 1 - i` after the key
            distance = np.arange(2 * keys + MAX_WIDTH) - (keys - 1) - MAX_WIDTH
            row = mx.where(mx.array(distance > 0), -mx.inf, self.of(distance)).astype(self.dtype)
            starts = range(MAX_WIDTH, 0, -1)
            self.table = mx.stack([row[:, s : s + 2 * keys] for s in starts], axis=1)
            mx.eval(self.table)
        first = self.table.shape[2] // 2 - 1 - position
        return self.table[:, :width, first : first + keys]


class T5:
    """An encoder-decoder whose `start` and `decode` are all that the decoders ask of a model.

    eos_ids: the ids that end a text, from generation_config.json, else config.json (maybe none).
    vocab_size: the width of the logits, which may exceed the tokenizer's ids.
    """

    is_encoder_decoder = True

    def __init__(self, config, weights):
        self.config, self.eos_ids, self.vocab_size = config, config.eos_ids, config.vocab_size
        table = (config.vocab_size, config.d_model)
        names = [n for n in EMBEDDINGS if n + ".weight" in weights.tensors]
        self.embedding = weights.linear(names[:1] or EMBEDDINGS[:1], *table)
        has_head = "lm_head.weight" in weights.tensors
        self.head = weights.linear(["lm_head"], *table) if has_head else self.embedding
        self.encoder = self._stack(weights, "encoder", config.num_layers)
        self.decoder = self._stack(weights, "decoder", config.num_decoder_layers)
        self.encoder_norm = weights.norm("encoder.final_layer_norm", config.d_model)
        self.decoder_norm = weights.norm("decoder.final_layer_norm", config.d_model)
        if config.scale_outputs:
            self.decoder_norm = self.decoder_norm * config.d_model**-0.5
        # A row's rounding depends on how many rows a product has, but only through a few classes;
        # every pass is computed in blocks of self.widths rows, so that it never changes class.
        self.widths = (1, MAX_WIDTH)
        weights.finish()

    def _stack(self, weights, name, depth):
        """The layers of one stack and their relative biases: one for all, or one each (umT5)."""
        c, biases = self.config, []
        shape = (c.relative_attention_num_buckets, c.num_heads)
        for i in range(depth if c.bias_in_every_layer else 1):
            key = f"{name}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
            weight = weights.take(key, *shape).astype(mx.float32)
            biases.append(RelativeBias(c, weight, name == "encoder", self.embedding.dtype))
        blocks = (f"{name}.block.{i}" for i in range(depth))
        return [Layer(c, weights, b, name == "decoder") for b in blocks], biases

    def embed(self, tokens):
        """The residual stream is float32 in every precision: in float16 many T5s overflow it."""
        tokens = mx.minimum(tokens, self.vocab_size - 1)  # out of range, MLX would read garbage
        return self.embedding.rows(tokens).astype(mx.float32)

    def encode(self, prompt):
        """prompt (S,) token ids -> (S, d_model)"""
        layers, biases = self.encoder
        biases = [b.encoder(prompt.size) for b in biases]
        x = self.embed(prompt)
        for i, layer in enumerate(layers):
            x = layer.encode(x, biases[i % len(biases)])
        return mx.fast.rms_norm(x, self.encoder_norm, self.config.layer_norm_epsilon)

    def start(self, prompt):
        """Encode the prompt: (S,) integer ids -> an empty Cache, the first token to feed (1,).

        Raises ValueError for an empty prompt or an id beyond the embedding table.
        """
        prompt = mx.array(prompt)
        if prompt.ndim != 1 or prompt.size == 0:
            raise ValueError(f"the prompt must be (S,) token ids, at least one, not {prompt.shape}")
        if not mx.issubdtype(prompt.dtype, mx.integer):
            raise ValueError(f"the prompt must be integer token ids, not {prompt.dtype}")
        low, high = prompt.min().item(), prompt.max().item()
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} in the prompt; the model has {self.vocab_size} ids")
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
        logits, done = [], 0
        while done < tokens.size:
            # How many keys a row sees, masked or not, is told by its position alone.
            room = CHUNK - cache.offset % CHUNK
            width = min(tokens.size - done, self.widths[1], room)
            logits.append(self._block(tokens[done : done + width], cache))
            done += width
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _block(self, tokens, cache):
        new, position = tokens.size, cache.offset
        width = max(new, self.widths[0])
        if width > new:
            tokens = mx.pad(tokens, (0, width - new))  # rows that nobody reads
        layers, biases = self.decoder
        keys = (position // CHUNK + 1) * CHUNK
        biases = [b.decoder(position, width, keys) for b in biases]
        x = self.embed(tokens)
        for i, (layer, layer_cache) in enumerate(zip(layers, cache.layers, strict=True)):
            x = layer.decode(x, biases[i % len(biases)], layer_cache, new)
        x = mx.fast.rms_norm(x, self.decoder_norm, self.config.layer_norm_epsilon)
        return self.head(x)[:new]


EMBEDDINGS = ["shared", "encoder.embed_tokens", "decoder.embed_tokens"]
UNUSED = [f"{n}.weight" for n in EMBEDDINGS] + [
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
]


class Weights:
    """A checkpoint's tensors by Hugging Face name; each is checked, read and dropped in turn."""

    def __init__(self, tensors: dict, quantization=None):
        self.tensors, self.quantization = tensors, quantization
        self.unused = {name for name in tensors if name in UNUSED}

    def take(self, name, *shape):
        if name not in self.tensors:
            raise ValueError(f"the checkpoint has no tensor {name}")
        tensor = self.tensors.pop(name)
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tensor.shape}; config.json asks for {shape}")
        return tensor

    def norm(self, name, size):
        return self.take(f"{name}.weight", size).astype(mx.float32)

    def linear(self, names, rows, columns):
        """Matrices (rows, columns) of the same input, as one of len(names) * rows rows."""
        if names[0] + ".scales" in self.tensors:
            group, bits = self.quantization["group_size"], self.quantization["bits"]
            widths = {"weight": columns * bits // 32} | dict.fromkeys(
                ["scales", "biases"], columns // group
            )
        else:
            widths = {"weight": columns}
        parts = []
        for part, width in widths.items():
            pieces = [self.take(f"{name}.{part}", rows, width) for name in names]
            parts.append(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces))
            mx.eval(parts[-1])
        return Linear(*parts, quantization=self.quantization if len(parts) > 1 else None)

    def finish(self):
        left = sorted(set(self.tensors) - self.unused)
        if left:
            raise ValueError(f"{left[0]} and {len(left) - 1} other tensors belong to no T5")


def load(path_or_id: str):
    """A T5 and its tokenizer from a local folder or a Hugging Face id.

    Returns (T5, transformers tokenizer). Raises ValueError, in one line, for what is not a T5.
    """
    folder = Path(path_or_id)
    config = json.loads((folder / "config.json").read_text())
    generation = folder / "generation_config.json"
    generation = json.loads(generation.read_text()) if generation.exists() else {}
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= mx.load(str(file))
    config = Config.from_files(config, generation)
    model = T5(config, Weights(tensors, config.quantization))
    from transformers import AutoTokenizer

    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)

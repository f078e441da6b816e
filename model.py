"""T5 in MLX: the model that the decoders run, and `load` for Hugging Face checkpoints.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (https://arxiv.org/abs/1910.10683), and its family: v1.1, FLAN, mT5, MADLAD-400,
ByT5, UL2, umT5, CodeT5. Its layers are in layers.py.
"""

import math
import threading
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import checkpoint
import cpu
import ranks
from layers import QUERIES, STEP, Cache, KeysAndValues, Stack, linear, project

WIDEST = 32  # a pass over more tokens is computed in blocks of at most so many


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
        self._last: Any = None  # what read_once read

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
        # The CPU's leaves MLX's graph, so that it has no gradients.
        memory = KeysAndValues if self.training else self.keys_and_values
        for block, bias in zip(self.encoder.block, self.encoder.biases(prompt.size), strict=True):
            attention, feed_forward = block.layer
            x = feed_forward(attention(x, memory, None, None, bias))
        return self.encoder.final_layer_norm(x)

    def start(self, prompt):
        """Encode the prompt: (S,) integer ids -> an empty Cache, the first token to feed (1,).

        Equal prompts, one after another, are encoded once, but in training. A parameter that was
        given another array is noticed, an array that was changed in place is not: `forget`.
        Raises ValueError for an empty prompt or an id beyond the embedding table.
        """
        prompt = mx.array(prompt)
        if prompt.ndim != 1 or prompt.size == 0 or not mx.issubdtype(prompt.dtype, mx.integer):
            found = f"{prompt.dtype} of shape {prompt.shape}"
            raise ValueError(f"the prompt must be (S,) integer ids, at least one, not {found}")
        ids = prompt.tolist()
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} in the prompt; there are {self.vocab_size} ids")
        prompt = prompt.astype(mx.uint32)
        memories = self.read(prompt) if self.training else self.read_once(prompt, ids)
        layers = [(self.keys_and_values(), memory) for memory in memories]
        return Cache(layers), mx.array([self.config.start_id], mx.uint32)

    def read(self, prompt):
        """prompt (S,) -> what the cross-attention of each block of the decoder looks at."""
        heads = self.encoder.block[0].layer[0].SelfAttention.heads
        cpu.check_memory(heads, min(prompt.size, QUERIES), prompt.size)
        encoded, memories = self.encode(prompt), []
        for block in self.decoder.block:
            attention = block.layer[1].EncDecAttention
            k, v = attention.split(project(attention.kv, encoded), 2)
            memories.append(self.keys_and_values(k, v))
        return memories

    def read_once(self, prompt, ids):
        """`read`, but where the prompt was the last one, too, with the same weights."""
        weights = [array for _, array in tree_flatten(self.parameters())]  # type: ignore
        key = ids, [id(array) for array in weights], threading.current_thread()
        last = self._last
        if last is None or last[0] != key:
            self._last = last = None  # two of them may not fit
            self._last = last = key, self.read(prompt), weights  # held: their ids are not reused
        return last[1]

    def forget(self):
        """The next prompt is encoded, even if it is the last one again."""
        self._last = None

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
        if self.config.num_heads % group.size():
            raise ValueError(f"it has {self.config.num_heads} heads")
        for block in self.encoder.block + self.decoder.block:
            for sublayer in block.layer:
                sublayer.shard(group)

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
        folder = ranks.same_checkpoint(lambda: checkpoint.find_folder(path_or_id), group)
        model, tokenizer = ranks.agree(lambda: load_alone(folder, group), group)
        if group:
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


def load_alone(folder, group):
    """What of `load` a rank does by itself."""
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
    return model, checkpoint.load_tokenizer(folder, config.vocab_size)

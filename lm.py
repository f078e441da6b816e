"""Any model of mlx-lm as a target or a draft model: Llama, Qwen, Gemma, Mistral, Phi and others."""

from os.path import commonprefix

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import checkpoint
import cpu

PIECE = 512  # tokens of a prompt that are read at a time


class Cache(list):
    def trim(self, n):
        for layer in self:
            layer.trim(n)


class Window(KVCache):
    """A sliding window that keeps what has left it, so that it can be rewound."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def make_mask(self, n, window_size=None, **options):
        return super().make_mask(n, window_size=window_size or self.width, **options)


class Adapter:
    """An mlx-lm model with the calls that the decoders ask for."""

    def __init__(self, model):
        self.model, self.parameters = model, model.parameters
        self.alpha = getattr(model, "alpha", 0.05)

    def start(self, prompt):
        cache = self.make_cache()
        self.read(prompt[:-1], cache)
        return cache, prompt[-1:]

    def make_cache(self):
        layers = make_prompt_cache(self.model)
        kept = [Window(c.max_size) if type(c) is RotatingKVCache else c for c in layers]
        if all(isinstance(c, KVCache) for c in kept):
            return Cache(kept)
        return layers  # no trim(n): for plain decoding

    def read(self, tokens, cache):
        for i in range(0, tokens.size, PIECE):
            self.decode(tokens[i : i + PIECE], cache)
            mx.eval([layer.state for layer in cache])

    def decode(self, tokens, cache):
        return self.model(tokens[None], cache=cache)[0]


class Rereader(Adapter):
    """An Adapter that does not read again what a prompt has in common with the last one.

    It takes over whole pieces, which have the bits that reading them anew would give. The weights
    must stay as they are; a copy of it reads for itself.
    """

    last = [], []  # the last prompt's ids and its cache

    def make_cache(self):
        cache = super().make_cache()
        if cpu.in_use() and hasattr(cache, "trim"):
            cache[:] = [cpu.KVCache(getattr(layer, "width", None)) for layer in cache]
        return cache

    def read(self, tokens, cache):
        ids, (last_ids, last_cache) = tokens.tolist(), self.last
        n = len(commonprefix([ids, last_ids])) // PIECE * PIECE
        for layer, last in zip(cache, last_cache, strict=True) if n else ():
            layer.update_and_fetch(last.keys[..., :n, :], last.values[..., :n, :])
        super().read(tokens[n:], cache)
        self.last = (ids, cache) if hasattr(cache, "trim") else ([], [])


def load(path_or_id, adapter_path=None):
    """A folder or a Hugging Face id, LoRA adapters -> (Rereader, mlx-lm's tokenizer).

    The Rereader has eos_ids, as a T5 of model.py has them, and `fixed`: what of its cache cannot be
    rewound, so that it can neither verify nor write drafts; or "". ValueError with one line.
    """
    with checkpoint.one_line(str(path_or_id)):
        model, tokenizer = mlx_lm.load(str(path_or_id), adapter_path=adapter_path)[:2]
        cpu.prepare(model, lambda _, module: "weight" in module)
    adapter = Rereader(model)
    kinds = {type(layer).__name__ for layer in adapter.make_cache()}
    adapter.fixed = ", ".join(sorted(kinds - {"KVCache", "Window"}))
    adapter.eos_ids = tuple(sorted(tokenizer.eos_token_ids))
    return adapter, tokenizer

"""Any model of mlx-lm as a target or a draft model: Llama, Qwen, Gemma, Mistral, Phi and others."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache


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
        self.model, self.last = model, ([], [])
        self.alpha = getattr(model, "alpha", 0.05)
        self.parameters = model.parameters

    def start(self, prompt):
        ids, n, cache = prompt[:-1].tolist(), 0, Cache(make_prompt_cache(self.model))
        for i, layer in enumerate(cache):
            if type(layer) is RotatingKVCache and layer.keep == 0:
                cache[i] = Window(layer.max_size)
        if not all(isinstance(layer, KVCache) for layer in cache):
            cache = list(cache)  # it cannot be rewound
        elif self.last[1]:  # what the last prompt began with has been read
            while n < min(len(ids), len(self.last[0])) and ids[n] == self.last[0][n]:
                n += 1
            for layer, (keys, values) in zip(cache, self.last[1], strict=True):
                layer.keys, layer.values, layer.offset = keys[..., :n, :], values[..., :n, :], n
        for i in range(n, len(ids), 2048):
            self.model(prompt[None, i : min(i + 2048, len(ids))], cache=cache)
            mx.eval([layer.state for layer in cache])
        if ids and hasattr(cache, "trim"):
            self.last = ids, [[x[..., : len(ids), :] for x in (c.keys, c.values)] for c in cache]
        return cache, prompt[-1:]

    def decode(self, tokens, cache):
        return self.model(tokens[None], cache=cache)[0]


def load(path_or_id, adapter_path=None):
    """A folder or a Hugging Face id, LoRA adapters -> (Adapter, mlx-lm's tokenizer).

    The adapter has eos_ids, as a T5 of model.py has them. Raises ValueError with one line.
    """
    from typing import Any

    import mlx_lm
    from mlx.nn import Linear, QuantizedLinear

    import checkpoint
    import cpu

    with checkpoint.one_line(str(path_or_id)):
        model, tokenizer = mlx_lm.load(str(path_or_id), adapter_path=adapter_path)[:2]
        tied = not any(path.endswith("lm_head") for path, _ in model.named_modules())
        kinds = Linear, QuantizedLinear
        cpu.prepare(model, lambda path, m: isinstance(m, kinds) or tied and "embed_to" in path)
    adapter: Any = Adapter(model)
    cache, _ = adapter.start(mx.array([0]))
    names = ", ".join(sorted({type(c).__name__ for c in cache} - {"KVCache", "Window"}))
    advice = f"{path_or_id}: its cache ({names}) cannot be rewound: use --regular-decode"
    adapter.refusal = "" if hasattr(cache, "trim") else advice
    adapter.eos_ids = tuple(sorted(tokenizer.eos_token_ids))
    return adapter, tokenizer


def encode(tokenizer, where, text, system=None, chat=True):
    """Text -> its token ids, by the chat template where there is one; see text.encode."""
    if not text.strip():
        raise ValueError(f"{where}: the text is empty")
    text = text.encode(errors="replace").decode()
    if chat := chat and tokenizer.has_chat_template:
        messages = [{"role": "system", "content": system}] * (system is not None)
        messages += [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=not chat)

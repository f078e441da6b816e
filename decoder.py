"""Plain and speculative decoding: one loop that drafts, verifies and accepts.

A drafter proposes a few tokens, the target model verifies all of them in one pass, and what the
target would have written itself is accepted (Leviathan et al. 2023, Chen et al. 2023). This file
knows token ids only, and asks of a model no more than

    cache, token = model.start(prompt)      # (S,) uint32 -> fresh cache, first token to feed (1,)
    logits = model.decode(tokens, cache)    # (L,) uint32 -> (L, vocab); the cache grows by L
    cache.trim(n)                           # forget the last n tokens

and, where it has them, model.is_encoder_decoder (True: prompt and output are two texts, no n-gram
spans them), model.vocab_size (the width of its logits), model.alpha (what one more token adds to
the cost of a pass, in passes) and model.parameters() (what a draft token costs follows from it).
"""

import functools
import math
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten


class Token(NamedTuple):
    """A token of the output: its id, and whether it was drafted (and accepted)."""

    id: int
    drafted: bool


@dataclass
class Stats:
    """What a stream has done so far. Complete when the stream has ended."""

    prompt_tokens: int = 0
    tokens: int = 0  # yielded; an EOS is not
    passes: int = 0  # of the target model, up to the one that ended the text
    drafted: int = 0  # draft tokens verified, up to an accepted EOS
    accepted: int = 0  # drafted tokens that were yielded
    seconds: float = 0.0  # from the call of stream() to the last token, encoding included
    stop: str | None = None  # "eos" or "length"

    tokens_per_pass = property(lambda self: self.tokens / max(self.passes, 1))
    acceptance_rate = property(lambda self: self.accepted / max(self.drafted, 1))
    tokens_per_second = property(lambda self: self.seconds and self.tokens / self.seconds)


class Stream(Iterator[Token]):
    """An iterator over Token with the statistics beside it."""

    def __init__(self, tokens, stats):
        self._tokens, self.stats, self.close = tokens, stats, tokens.close

    def __next__(self) -> Token:
        return next(self._tokens)


def need(name, value, right, wanted):
    if not right:
        raise ValueError(f"{name} is {' '.join(repr(value).split()):.50}: it must be {wanted}")
    return value


def number(name, value, least=0, most=2**31 - 1, types=(int, float)):
    """A number of Python, NumPy or MLX as Python's, or a ValueError that names it."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    wanted = f"{'a number' if float in types else 'an integer'}, {least} to {most}"
    return need(name, plain, type(plain) in types and least <= plain <= most, wanted)


integer = functools.partial(number, types=(int,))


def as_ids(name, ids, most=2**32 - 1):
    """Token ids of any kind, or one, as (N,) uint32."""
    if type(ids) is mx.array and ids.dtype == mx.uint32 and ids.ndim == 1 and most == 2**32 - 1:
        return ids
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    ids = ids if isinstance(ids, (list, tuple, range)) else [ids]
    return mx.array([integer(f"a token id of {name}", i, 0, most) for i in ids], mx.uint32)


def read(*arrays):
    """The one place where a loop waits for the device."""
    mx.eval(*arrays)
    return arrays


class Sampler:
    """The choice of a token from logits: argmax (of equals the lowest id), at temp > 0 a sample.

    The sample at output position t is argmax(log p_t + g_t), the Gumbel-max trick. Its noise g_t
    depends on the seed and t only, whoever decides about t; so the text depends on the seed alone.
    """

    def __init__(self, temp=0.0, top_p=1.0, top_k=0, seed=0, logits_processors=None):
        asked = () if logits_processors is None else logits_processors
        right = isinstance(asked, (list, tuple)) and all(map(callable, asked))
        self.processors = need("logits_processors", asked, right, "a list of functions")
        self.temp = number("temp", temp) and max(float(temp), 1e-30)  # what float32 can divide by
        self.top_p = number("top_p", top_p, 1e-30, 1)
        self.top_k = integer("top_k", top_k)
        self.seed = integer("seed", seed, 0, 2**32 - 1)
        self.noise = functools.lru_cache(maxsize=64)(self._noise)

    def _noise(self, position, width):
        # Random values depend on the shape asked for: always one position at a time.
        return mx.random.gumbel((width,), key=mx.array([self.seed, position], mx.uint32))

    def scores(self, logits, ids=(), *drafts):
        """Logits (L, V) after ids and drafts, or one less for each row above the last one ->
        unnormalized log p (L, V) after processors, temperature, top-k and top-p."""
        for process in self.processors:
            ids, drafts = mx.concatenate([mx.array(ids, mx.uint32), *drafts]), ()
            rows = enumerate(mx.split(logits, len(logits)), ids.size - len(logits) + 1)
            logits = mx.concatenate([process(ids[:n], row) for n, row in rows])
        if self.temp == 0:
            return logits
        scores = logits.astype(mx.float32)
        scores = (scores - mx.max(scores, axis=-1, keepdims=True)) / self.temp
        if 0 < self.top_k < scores.shape[-1]:
            kth = mx.min(mx.topk(scores, self.top_k, axis=-1), axis=-1, keepdims=True)
            scores = mx.where(scores >= kth, scores, -math.inf)
        if self.top_p < 1:
            ordered = -mx.sort(-scores, axis=-1)
            p = mx.softmax(ordered, axis=-1, precise=True)
            before = mx.cumsum(p, axis=-1) - p  # the mass of what is more likely
            last = mx.maximum(mx.sum(before < self.top_p, axis=-1, keepdims=True) - 1, 0)
            least = mx.take_along_axis(ordered, last, axis=-1)
            scores = mx.where(scores >= least, scores, -math.inf)
        return scores

    def choose(self, scores, position, width=None):
        """Scores (L, V) of output positions position … -> tokens (L,) uint32, their values (L,).
        The noise is drawn at `width`, the target's, and cut or extended to V."""
        if self.temp > 0:
            (length, size), width = scores.shape, width or scores.shape[1]
            noise = mx.stack([self.noise(position + i, width) for i in range(length)])
            scores = scores + mx.pad(noise, [(0, 0), (0, max(size - width, 0))])[:, :size]
        tokens = mx.argmax(scores, axis=-1)
        return tokens, mx.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]


class Decoder:
    """Plain decoding: one token per pass. Its streams may take turns, in one thread.

    Args:
        model: The target model, with the three calls above.
        eos_id: Token id that ends the text, several of them, or None.
        temp, top_p, top_k, seed: See Sampler. At temp 0 the others do nothing.
        logits_processors: Functions (ids before a position (T,), its logits (1, V)) -> logits. The
            ids are of prompt and output; of an encoder-decoder, of start token and output.
    """

    def __init__(self, model, eos_id=1, **sampling):
        self.model = need("model", model, hasattr(model, "start"), "a model")
        ids = () if eos_id is None else [*eos_id] if isinstance(eos_id, Set) else eos_id
        self.eos_ids = {*as_ids("eos_id", ids, getattr(model, "vocab_size", 2**32) - 1).tolist()}
        self.sampler = Sampler(**sampling)

    def stream(self, prompt: mx.array, max_tokens: int = 200, *texts) -> Stream:
        """Starts writing at most max_tokens tokens after the prompt, (S,) uint32 token ids, S > 0.
        texts: what else a drafter may want. Returns an iterator over Token, with `stats`."""
        began = time.perf_counter()
        prompt = as_ids("the prompt", prompt)
        if prompt.size == 0:
            raise ValueError("the prompt is empty: it must be (S,) token ids with S > 0")
        max_tokens = integer("max_tokens", max_tokens)
        stats = Stats(prompt_tokens=prompt.size, stop=None if max_tokens else "length")
        cache, token = self.model.start(prompt)
        ids = token if getattr(self.model, "is_encoder_decoder", False) else prompt
        passes = self._passes(cache, token, max_tokens, ids, prompt, *texts)
        return Stream(self._tokens(passes, max_tokens, stats, began), stats)

    def _tokens(self, passes, max_tokens, stats, began):
        """Counts and yields the tokens of passes: (output ids, of them drafted, draft length)."""
        for output, accepted, drafted in passes:
            stats.passes += 1
            stats.drafted += drafted
            stats.seconds = time.perf_counter() - began
            for i, token in enumerate(output):
                if token in self.eos_ids:
                    stats.drafted -= drafted - i if i < accepted else 0
                    stats.stop = "eos"
                    return
                stats.tokens += 1
                stats.accepted += i < accepted
                stats.stop = "length" if stats.tokens == max_tokens else None
                yield Token(token, i < accepted)

    def _check(self, values, logits):
        if not all(map(math.isfinite, values)):
            if self.sampler.processors and mx.all(mx.isfinite(logits)).item():
                raise ValueError("the logits processors forbid every token")
            found = str(logits.dtype).removeprefix("mlx.core.")
            advice = ": convert it to bfloat16 or float32" * (found == "float16")
            raise ValueError(f"the model's logits are not finite in {found}{advice}")

    def _passes(self, cache, token, max_tokens, ids, *texts):
        """One token per pass; the next pass is under way while the caller has the last token."""
        ahead = None
        for position in range(max_tokens + 1):
            current = ahead
            if position < max_tokens:
                logits = self.model.decode(token, cache)
                token, value = self.sampler.choose(self.sampler.scores(logits, ids), position)
                ids = mx.concatenate([ids, token]) if self.sampler.processors else ids
                mx.async_eval(token, value, ids)
                ahead = token, value
            if current:
                output, values = read(*current)
                self._check(values.tolist(), logits)
                yield output.tolist(), 0, 0


class DraftingDecoder(Decoder):
    """The draft -> verify -> accept loop. What drafts is a drafter, a new one for each stream:

        length, doubt: what speaks for its next draft, see DraftLength
        limit, unfed: how many tokens it could draft, and those that it would have to read before
        draft(k, position, ids): k tokens for output positions position …, after ids, (k,) uint32
        follow(output, accepted, position): the arrays that it looks up in the graph of the pass
        settle(output, k, found): after the pass; how many of its tokens, drafted or not, were
            right, and whether the next one was wrong

    Args:
        num_draft: The most tokens to draft for a pass (None: 24; above 64 only where fixed, up to
            1024); 0: plain decoding. DraftLength decides how many, and learns while it does.
        fixed_draft: Always draft num_draft tokens (10 if None), or as many as there are.
        delta: Lenience: a draft token x is also accepted when p(x) >= (1 - delta) p(y), y being
            the target's choice. At 0 the text is what the target alone would write.
        alpha: What verifying a draft token costs, in plain passes. None: what the model says.
    """

    draft_cost = 0.0  # no draft model
    _drafter: Any  # (*texts) -> a drafter

    def __init__(
        self, model, eos_id=1, num_draft=None, fixed_draft=False, delta=0.0, alpha=None, **sampling
    ):
        super().__init__(model, eos_id, **sampling)
        self.num_draft = None if num_draft is None else integer("num_draft", num_draft)
        self.fixed_draft = integer("fixed_draft", fixed_draft, 0, 1, types=(bool, int))
        self.delta = number("delta", delta, 0, 1)
        self.alpha = number("alpha", getattr(model, "alpha", 0.05) if alpha is None else alpha)
        ceiling = 24 if self.num_draft is None else min(self.num_draft, 64)
        self._policy = functools.partial(DraftLength, ceiling, self.alpha, self.draft_cost)
        self.policy = self._policy()

    def _accept(self, scores, choice, draft):
        """How many draft tokens are accepted. scores (k+1, V), choice (k+1,), draft (k,) -> ()."""
        same = draft == choice[:-1]
        if self.delta > 0:
            scores, last = scores[:-1].astype(mx.float32), scores.shape[-1] - 1
            known = mx.minimum(draft, last)  # out of range, MLX would read garbage
            of_draft = mx.take_along_axis(scores, known[:, None], axis=-1)[:, 0]
            of_choice = mx.take_along_axis(scores, choice[:-1, None], axis=-1)[:, 0]
            floor = math.log1p(-self.delta) if self.delta < 1 else -math.inf
            same = same | ((of_draft >= of_choice + floor) & (draft == known))
        return mx.sum(mx.cumprod(same.astype(mx.int32)))

    def _passes(self, cache, token, max_tokens, ids, *texts):
        if self.num_draft == 0:
            return super()._passes(cache, token, max_tokens, ids)
        if not hasattr(cache, "trim"):
            raise ValueError("the model's cache has no trim(n): only plain decoding can use it")
        return self._draft(cache, max_tokens, ids.tolist(), self._drafter(*texts))

    def _draft(self, cache, max_tokens, ids, drafter):
        # Lenient text depends on the draft lengths, and must not depend on the texts before.
        policy = self.policy if self.delta == 0 else self._policy()
        fixed = self.fixed_draft and min(self.num_draft or 10, 1024)
        position = 0
        while position < max_tokens:
            limit = min(drafter.limit, max_tokens - position - 1)
            evidence = drafter.length, drafter.doubt
            k = min(limit, fixed or policy.choose(*evidence, limit, len(drafter.unfed)))
            draft = drafter.draft(k, position, ids)
            fed = mx.concatenate([mx.array(ids[-1:], mx.uint32), draft])
            logits = self.model.decode(fed, cache)
            scores, drafter.width = self.sampler.scores(logits, ids, draft), logits.shape[-1]
            output, values = self.sampler.choose(scores, position)
            accepted = self._accept(scores, output, draft)
            if self.delta > 0:
                output = mx.where(mx.arange(k + 1) < accepted, mx.pad(draft, (0, 1)), output)
            search = drafter.follow(output, accepted, position)
            output, accepted, values, *found = read(output, accepted, values, *search)
            n = accepted.item()
            output = output.tolist()[: n + 1]
            self._check(values.tolist()[: n + 1], logits)
            cache.trim(k - n)
            policy.update(*evidence, k, *drafter.settle(output, k, found))
            ids += output
            position += n + 1
            yield output, n, k


class SpeculativeDecoder(DraftingDecoder):
    """Speculative decoding: a smaller model with the same vocabulary drafts.

    Args: as for Decoder and DraftingDecoder, and
        draft_model: A model like the target.
        draft_cost: What drafting a token costs, in plain passes of the target. None: the bytes of
            the draft model's parameters relative to the target's, 0.2 where they are not known.
    """

    def __init__(self, model, draft_model, eos_id=1, draft_cost=None, **options):
        need("draft_model", draft_model, hasattr(draft_model, "start"), "a model")
        self.draft_model = draft_model
        if draft_cost is None:
            draft_cost = weight(draft_model) / (weight(model) or math.inf) or 0.2
        self.draft_cost = max(number("draft_cost", draft_cost), 1e-9)  # 0: no draft model
        super().__init__(model, eos_id, **options)

    def _drafter(self, prompt):
        width = getattr(self.model, "vocab_size", None)
        return ModelDrafter(self.draft_model, self.sampler, prompt, width)


def weight(model):
    """Bytes of a model's parameters; 0 where it has none to tell."""
    leaves: Any = tree_flatten(model.parameters()) if hasattr(model, "parameters") else []
    return sum(array.nbytes for _, array in leaves)


class ModelDrafter:
    """Drafts with a model whose cache holds prompt and output but for the tokens in `unfed`."""

    limit, doubt = math.inf, 0
    follow = staticmethod(lambda output, accepted, position: ())  # it looks nothing up
    TRUST = 4  # after a wrong draft: as for an n-gram so long; and the run of right ones since then

    def __init__(self, model, sampler, prompt, width):
        self.model, self.sampler, self.prompt = model, sampler, prompt
        self.width = width  # of the target's logits; None: not known before its first pass
        self.cache: Any = None  # the prompt is encoded when it is needed first
        self.unfed: list[int] = prompt.tolist()
        self.length = self.TRUST

    def draft(self, k, position, ids):
        draft, tokens = [mx.zeros((0,), mx.uint32)], mx.array(self.unfed, mx.uint32)
        if k and self.cache is None:
            self.cache, start = self.model.start(self.prompt)
            tokens = mx.concatenate([start, tokens[self.prompt.size :]])
        for i in range(k):
            logits = self.model.decode(tokens, self.cache)[-1:, : self.width]
            scores = self.sampler.scores(logits, ids, *draft)
            tokens, _ = self.sampler.choose(scores, position + i, self.width)
            draft.append(tokens)
        return mx.concatenate(draft)

    def settle(self, output, k, found):
        n = len(output) - 1
        if k == 0:
            self.unfed += output
            return 0, False
        self.length = self.length + n if n == k else self.TRUST
        self.cache.trim(max(k - 1 - n, 0))  # the last draft token was never fed
        self.unfed = output[n - 1 :] if n == k else output[n:]
        return n, n < k


class DraftLength:
    """How many tokens to draft for a pass: the number with the most expected tokens per cost.

    The chance that the next draft token is right is counted, old trials fading, by the length of
    the evidence, in tokens, which grows along a draft; for the first token by `doubt`, too: what
    else the drafter knows. Costs are in plain passes of the target: alpha to verify a draft token,
    draft_cost to draft it (0: without a draft model, so that it is known what was not drafted).

    A draft model may be wrong, so its drafts begin with one token. Where it is not worth asking,
    it is asked for one token now and then: so seldom that this costs 2 %.
    """

    CHANCES = (0.1, 0.3, 0.45, 0.6, 0.85, 0.95, 0.98)  # at first, at lengths 0, 1, 2, 4 … 32
    FADE, SELDOM, SHARED = 0.98, 50, 32  # passes that share the cost of reading what was missed

    def __init__(self, ceiling, alpha, draft_cost=0.0):
        self.ceiling, self.alpha, self.draft_cost = ceiling, alpha, draft_cost
        self.trials = {}  # (length's group, doubt): [right, tried]
        self.longest = 0  # right draft of the model, halved with every draft
        self.idle = 0  # passes since the draft model was wrong at once

    def _trial(self, length, doubt, i):
        group = min((length + i).bit_length(), 6)
        return self.trials.setdefault((group, None if i else doubt), [self.CHANCES[group], 1.0])

    def choose(self, length, doubt, limit, unread=0):
        """The evidence, how many tokens there are to draft or to use, and how many the draft model
        would have to read before -> 0 to limit."""
        most = min(limit, self.ceiling, 3 * self.longest + 1 if self.draft_cost else limit)
        token = self.alpha + self.draft_cost
        reading = self.draft_cost * self.alpha * unread
        best, speed, tokens, reach = 0, 1.0, 1.0, 1.0
        for k in range(1, most + 1):
            right, tried = self._trial(length, doubt, k - 1)
            reach *= right / tried  # the chance that all k tokens are right
            tokens += reach
            cost = 1 + token * k + reading / min(limit, self.SHARED)
            if tokens / cost > speed:
                best, speed = k, tokens / cost
        if self.draft_cost and token < 1 and self.idle >= self.SELDOM * (token + reading):
            return max(best, min(most, 1))
        return best

    def update(self, length, doubt, k, right, wrong):
        """After a pass with k draft tokens; right and wrong are what the drafter's settle told."""
        for i, trial in ((i, self._trial(length, doubt, i)) for i in range(right + wrong)):
            trial[:] = self.FADE * trial[0] + (i < right), self.FADE * trial[1] + 1
        if k > 0:
            self.longest = max(right, self.longest // 2)
        self.idle = 0 if k > 0 and right == 0 else self.idle + 1

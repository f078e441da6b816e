"""Plain and speculative decoding: one loop that drafts, verifies and accepts.

A drafter proposes a few tokens, the target model verifies all of them in one pass, and what the
target would have written itself is accepted (Leviathan et al. 2023, Chen et al. 2023). This file
knows token ids only, and asks of a model no more than

    cache, token = model.start(prompt)      # (S,) uint32 -> fresh cache, first token to feed (1,)
    logits = model.decode(tokens, cache)    # (L,) uint32 -> (L, vocab); the cache grows by L
    cache.trim(n)                           # forget the last n tokens

and, where it has them, model.is_encoder_decoder (True: prompt and output are two texts, no n-gram
spans them) and model.vocab_size (the width of its logits).
"""

import functools
import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

CALM = 8  # passes without a right draft after which plain passes begin early, see _draft
EARLY = -1  # in place of a draft length: such a pass


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

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Stream:
    """An iterator over Token with the statistics beside it."""

    def __init__(self, tokens, stats):
        self._tokens, self.stats = tokens, stats

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        self._tokens.close()


def check(right, name, value, wanted):
    """ValueError unless an argument is right."""
    if not right:
        raise ValueError(f"{name} is {value}: it must be {wanted}")


def as_ids(name, ids):
    """Token ids of any kind as (N,) uint32."""
    wanted = "(N,) integer token ids, 0 or more"
    try:
        ids = mx.array(ids)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"the {name} is no array: it must be {wanted}") from None
    found = f"{str(ids.dtype).split('.')[-1]} of shape {ids.shape}"
    integer = ids.size == 0 or mx.issubdtype(ids.dtype, mx.integer)
    check(ids.ndim == 1 and integer, f"the {name}", found, wanted)
    least: Any = mx.min(ids).item() if ids.size else 0
    check(least >= 0, f"a token id of the {name}", least, "0 or more")
    return ids.astype(mx.uint32)


def read(*arrays):
    """The one place where a loop waits for the device."""
    mx.eval(*arrays)
    return arrays


class Sampler:
    """The choice of a token from logits: argmax at temperature 0, else a sample.

    The sample at output position t is argmax(log p_t + g_t) with Gumbel noise g_t that depends on
    the seed and t only (the Gumbel-max trick). Whoever decides about position t, with drafts or
    without, draws the same g_t, so that the text depends on the seed alone. Of equal scores the
    lowest id wins.
    """

    def __init__(self, temp=0.0, top_p=1.0, top_k=0, seed=0):
        check(0 <= temp < math.inf, "temp", temp, "finite, 0 or more (0: likeliest token)")
        check(0 < top_p <= 1, "top_p", top_p, "in (0, 1] (1: all tokens)")
        check(top_k >= 0, "top_k", top_k, "0 or more (0: all tokens)")
        check(0 <= seed < 2**32, "seed", seed, "in [0, 2**32)")
        self.temp = max(temp, 1e-30) if temp else 0  # what float32 can divide by
        self.top_p, self.top_k, self.seed = top_p, top_k, seed
        self.noise = functools.lru_cache(maxsize=64)(self._noise)

    def _noise(self, position, width):
        # Random values depend on the shape asked for: always one position at a time.
        return mx.random.gumbel((width,), key=mx.array([self.seed, position], mx.uint32))

    def scores(self, logits):
        """Logits (L, V) -> unnormalized log p (L, V) after temperature, top-k and top-p."""
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
            last = mx.sum(before < self.top_p, axis=-1, keepdims=True) - 1
            least = mx.take_along_axis(ordered, mx.maximum(last, 0), axis=-1)
            scores = mx.where(scores >= least, scores, -math.inf)
        return scores

    def choose(self, scores, position, width=None):
        """Scores (L, V) of output positions position … -> tokens (L,) uint32, their values (L,).

        The noise is drawn at `width`, the target's, and cut or extended to V. A value that is
        not finite tells that the logits were not.
        """
        if self.temp > 0:
            length, size = scores.shape
            width = width or size
            noise = mx.stack([self.noise(position + i, width) for i in range(length)])
            scores = scores + mx.pad(noise, [(0, 0), (0, max(size - width, 0))])[:, :size]
        tokens = mx.argmax(scores, axis=-1)
        return tokens, mx.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]


class Decoder:
    """Plain decoding with the target model: one token per pass.

    Args:
        model: The target model, with the three calls above.
        eos_id: Token id that ends the text, several of them, or None.
        temp, top_p, top_k, seed: See Sampler. At temp 0 the others do nothing.

    Streams of a decoder may take turns, in one thread. Raises ValueError where an argument is out
    of its range.
    """

    def __init__(self, model, eos_id=1, temp=0.0, top_p=1.0, top_k=0, seed=0):
        self.model = model
        self.eos_ids = set(eos_id if hasattr(eos_id, "__iter__") else [eos_id])
        self.sampler = Sampler(temp, top_p, top_k, seed)

    def stream(self, prompt: mx.array, max_tokens: int = 200) -> Stream:
        """Starts writing.

        Args:
            prompt: Token ids, (S,) uint32, S > 0.
            max_tokens: Never more tokens than this.

        Returns an iterator over Token, with `stats`.
        """
        return self._stream(prompt, max_tokens)

    def _stream(self, prompt, max_tokens, *texts):
        began = time.perf_counter()
        prompt = as_ids("prompt", prompt)
        check(prompt.size > 0, "the prompt", "empty", "(S,) token ids with S > 0")
        check(max_tokens >= 0, "max_tokens", max_tokens, "0 or more")
        stats = Stats(prompt_tokens=prompt.size, stop=None if max_tokens else "length")
        cache, token = self.model.start(prompt)
        passes = self._passes(cache, token, max_tokens, prompt, *texts)
        return Stream(self._tokens(passes, max_tokens, stats, began), stats)

    def _tokens(self, passes, max_tokens, stats, began):
        """Counts and yields the tokens of passes: (output ids, of them drafted, draft length)."""
        for output, accepted, drafted in passes:
            stats.passes += 1
            stats.drafted += drafted
            stats.seconds = time.perf_counter() - began
            for i, token in enumerate(output):
                if token in self.eos_ids:
                    if i < accepted:
                        stats.drafted -= drafted - i
                    stats.stop = "eos"
                    return
                stats.tokens += 1
                stats.accepted += i < accepted
                if stats.tokens == max_tokens:
                    stats.stop = "length"
                yield Token(token, i < accepted)
            if stats.stop:
                return

    def _check(self, values, logits):
        if not all(map(math.isfinite, values)):
            dtype = str(logits.dtype).split(".")[-1]
            advice = ": convert it to bfloat16 or float32" if dtype == "float16" else ""
            raise ValueError(f"the model's logits are not finite in {dtype}{advice}")

    def _passes(self, cache, token, max_tokens, *texts):
        """One token per pass; the next pass is under way while the caller has the last token."""
        ahead = None
        for position in range(max_tokens + 1):
            current = ahead
            if position < max_tokens:
                logits = self.model.decode(token, cache)
                token, value = self.sampler.choose(self.sampler.scores(logits), position)
                mx.async_eval(token, value)
                ahead = token, value
            if current:
                output, values = read(*current)
                self._check(values.tolist(), logits)
                yield output.tolist(), 0, 0


class DraftingDecoder(Decoder):
    """The draft -> verify -> accept loop; what drafts is a drafter.

    Args:
        num_draft: The most tokens to draft for a pass (None: 24; above 64 only where fixed); 0:
            plain decoding. How many are drafted is decided by DraftLength, which goes on learning
            from stream to stream.
        fixed_draft: Always draft num_draft tokens (10 if None), or as many as there are.
        delta: Lenience: a draft token x is also accepted when p(x) >= (1 - delta) p(y), y being
            the target's choice. At 0 the text is what the target alone would write.
    """

    chances: tuple | None = None  # what DraftLength's table begins with

    def __init__(self, model, eos_id=1, num_draft=None, fixed_draft=False, delta=0.0, **sampling):
        super().__init__(model, eos_id, **sampling)
        check(num_draft is None or num_draft >= 0, "num_draft", num_draft, "0 or more, or None")
        check(0 <= delta <= 1, "delta", delta, "in [0, 1]")
        self.num_draft, self.fixed_draft, self.delta = num_draft, fixed_draft, delta
        self.policy = self._policy()

    def _drafter(self, *texts):
        raise NotImplementedError

    def _policy(self):
        # Lenient text depends on the draft lengths, and must not depend on the clock.
        learns = self.delta == 0 and not self.fixed_draft
        cost = None if learns else lambda k: 1 + 0.15 * k
        ceiling = 24 if self.num_draft is None else min(self.num_draft, 64)
        return DraftLength(ceiling, cost, self.chances)

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

    def _passes(self, cache, token, max_tokens, *texts):
        if self.num_draft == 0:
            return super()._passes(cache, token, max_tokens)
        if not hasattr(cache, "trim"):
            raise ValueError("the model's cache has no trim(n): only plain decoding can use it")
        return self._draft(cache, token, max_tokens, self._drafter(*texts))

    def _draft(self, cache, token, max_tokens, drafter):
        policy = self.policy if self.delta == 0 else self._policy()
        fixed = 10 if self.num_draft is None else self.num_draft
        position, ahead, now = 0, None, 0.0
        while position < max_tokens:
            began, early = (now, True) if ahead else (time.perf_counter(), False)
            limit = min(drafter.limit(policy.costs), max_tokens - position - 1)
            evidence = drafter.length, drafter.doubt
            wanted = min(limit, fixed) if self.fixed_draft else policy.choose(*evidence, limit)
            k = 0 if early else wanted  # wanted then tells whether the next pass begins early, too
            logits, arrays = ahead or self._begin(cache, token, k, position, drafter)
            ahead = None
            # Where drafts have not been right for long, the next plain pass begins before the last
            # one is read, as in plain decoding; a draft that does pay comes one pass later then.
            if wanted == 0 and policy.calm >= CALM and 0 < position < max_tokens - 1:
                ahead = self._begin(cache, arrays[0], 0, position + 1, drafter)
            output, accepted, values, *found = read(*arrays)
            now = time.perf_counter()
            if position or not policy.seconds:  # the first pass has the prompt's encoding in it
                policy.timed(EARLY if early else k, now - began, drafter.steady)
            n = accepted.item()
            output = output.tolist()[: n + 1]
            self._check(values.tolist()[: n + 1], logits)
            cache.trim(k - n)
            policy.update(*evidence, k, *drafter.settle(output, k, found))
            token = mx.array(output[-1:], mx.uint32)
            position += n + 1
            yield output, n, k

    def _begin(self, cache, token, k, position, drafter):
        """A pass over token (1,) and k draft tokens, under way -> its logits, and arrays to read:
        the tokens of output positions position … (k+1,), how many draft tokens are accepted (),
        the values of `choose`, what the drafter looks up.
        """
        draft = drafter.draft(k, position)
        logits = self.model.decode(mx.concatenate([token, draft]) if k else token, cache)
        scores, drafter.width = self.sampler.scores(logits), logits.shape[-1]
        output, values = self.sampler.choose(scores, position)
        accepted = self._accept(scores, output, draft) if k else mx.array(0)
        if self.delta > 0 and k:
            output = mx.where(mx.arange(k + 1) < accepted, mx.pad(draft, (0, 1)), output)
        arrays = output, accepted, values, *drafter.follow(output, accepted, position)
        mx.async_eval(*arrays)
        return logits, arrays


class SpeculativeDecoder(DraftingDecoder):
    """Speculative decoding: a smaller model with the same vocabulary drafts.

    Args: as for Decoder and DraftingDecoder, and draft_model, a model like the target.
    """

    chances = (0.8, 0.85, 0.9, 0.94, 0.97, 0.98, 0.99)

    def __init__(self, model, draft_model, eos_id=1, **options):
        super().__init__(model, eos_id, **options)
        self.draft_model = draft_model

    def _drafter(self, prompt):
        width = getattr(self.model, "vocab_size", None)
        return ModelDrafter(self.draft_model, self.sampler, prompt, width)


class ModelDrafter:
    """Drafts with a model whose cache holds the text so far but for the tokens in `unfed`."""

    doubt = 0

    def __init__(self, model, sampler, prompt, width):
        self.model, self.sampler, self.prompt = model, sampler, prompt
        self.width = width  # of the target's logits; None: not known before its first pass
        self.cache: Any = None
        self.unfed: list[int] = []
        self.length = 0  # of the run of right drafts since the last wrong one
        self.steady = True

    def limit(self, costs):
        """Where a draft token is dear, many tokens that it missed are not worth feeding: it drafts
        no more in this text."""
        return 0 if costs[1] > 1.5 and len(self.unfed) > 64 else math.inf

    def draft(self, k, position):
        """k tokens for output positions position …, (k,) uint32, not evaluated."""
        if k == 0:
            self.steady = True
            return mx.zeros((0,), mx.uint32)
        tokens = mx.array(self.unfed, mx.uint32)
        self.steady = self.cache is not None and len(self.unfed) <= 8
        if self.cache is None:  # the prompt is encoded when it is needed first
            self.cache, start = self.model.start(self.prompt)
            tokens = mx.concatenate([start, tokens])
        draft = []
        for i in range(k):
            logits = self.model.decode(tokens, self.cache)[-1:, : self.width]
            tokens, _ = self.sampler.choose(self.sampler.scores(logits), position + i, self.width)
            draft.append(tokens)
        return mx.concatenate(draft)

    def follow(self, output, accepted, position):
        return ()

    def settle(self, output, k, found):
        """After a pass that wrote output: n accepted draft tokens of k, and one more."""
        if k == 0:
            self.unfed += output
            return 0, 0
        n = len(output) - 1
        self.length = self.length + n if n == k else 0
        self.cache.trim(max(k - 1 - n, 0))  # the last draft token was never fed
        self.unfed = output[n - 1 :] if n == k else output[n:]
        return n, n < k


class DraftLength:
    """How many tokens to draft for the next pass, 0 included.

    Text that a drafter can foresee comes in runs. A run has as many tokens however it is written,
    so that length is best which writes the rest of the run at the least cost. The chance that the
    next draft token is right is counted in a table, old trials fading, by the length of the
    evidence: of the matching n-gram, or of the run of drafts that were right. It grows by one along
    a draft. The first token's chance also depends on `doubt`, for what else the drafter knows (0,
    1, 2: less and less sure; 3, 4, 5: the same in another situation). The cost of a width is the
    median of its last passes, in plain passes, drawn towards a line through all of them. Where
    nothing is drafted, one token is tried now and then: so seldom that it loses about 1 %.

    Args:
        ceiling: The most tokens to draft.
        cost: cost(k) of drafting k tokens and verifying them in one pass, in any unit, cost(0) > 0;
            None: learnt from `timed`.
        chances: What the table begins with; None: CHANCES.
    """

    CHANCES = (0.1, 0.45, 0.6, 0.75, 0.9, 0.96, 0.98)  # at lengths 0, 1, 2, 4, 8, 16, 32 and more
    DOUBTS = (1.0, 0.7, 0.4)
    FADE, AHEAD, SLOPE = 0.99, 8, 0.15

    def __init__(self, ceiling=24, cost=None, chances=None):
        self.ceiling, self.learns, self.chances = ceiling, cost is None, chances or self.CHANCES
        self.trials = {}  # (length's group, doubt): [right, tried]
        self.trying = False  # is the draft of this pass such a trial?
        self.steady, self.debt = (
            True,
            0.0,
        )  # had it nothing that comes once? What it lost, if it had
        self.calm = 0  # passes since a right draft
        self.seconds, self.passes = {}, 0  # of the last passes of each width; all that drafted
        self.costs = [cost(k) / cost(0) if cost else 1 + self.SLOPE * k for k in range(ceiling + 1)]
        least = 100 * (self.costs[min(1, ceiling)] - 2)  # what is dear is seldom tried
        self.idle, self.patience = 0, max(8, least)  # passes without a draft; until one is tried
        self.plain = None  # seconds of a plain pass
        self.spent = 1.0  # what the last pass took, in plain passes: as expected, or as timed

    def _trial(self, length, doubt, i):
        key = min((length + i).bit_length(), 6), doubt if i == 0 else None
        if key not in self.trials:
            chance = self.chances[key[0]] * (self.DOUBTS[doubt % 3] if i == 0 else 1)
            self.trials[key] = [chance, 1.0]
        return self.trials[key]

    def choose(self, length, doubt, limit):
        """The evidence, and how many tokens there are to draft or to use -> 0 to limit."""
        top, costs, limit = self.ceiling, self.costs, min(limit, self.ceiling)
        if self.learns:
            if len(self.seconds.get(0, ())) < 2:  # is it known what a plain pass takes?
                limit = 0
            limit = min(limit, 4 * max([1, *self.seconds]))  # of the widest so far
        self.calm += 1
        if limit <= 0:
            return 0
        trials = (self._trial(length, doubt, i) for i in range(self.AHEAD + 1))
        chances = [right / tried for right, tried in trials]
        last = min(chances[-1], 0.995)
        chances += [last] * top
        # rest[i]: the least cost of the rest of the run once its first i tokens are written
        steady = min(costs[k] / (1 - last ** (k + 1)) for k in range(top + 1))
        rest = [steady] * (self.AHEAD + top + 2)
        for i in range(self.AHEAD - 1, -1, -1):
            best, rest[i], reach = 0, math.inf, 1.0
            for k in range((top if i else limit) + 1):
                if costs[k] >= rest[i]:
                    break
                reach *= chances[i + k]
                if costs[k] + reach * rest[i + k + 1] < rest[i] - 1e-9:
                    best, rest[i] = k, costs[k] + reach * rest[i + k + 1]
        self.trying = best == 0 and self.idle >= self.patience  # the world may have changed
        best = 1 if self.trying else best
        self.spent, self.steady = costs[best], not self.learns  # unless it is timed
        return best

    def update(self, length, doubt, k, right, wrong):
        """After a pass that drafted k tokens, timed first: so many of the drafter's tokens,
        verified or not, were right; was the next one wrong?"""
        for i in range(right + wrong):
            trial = self._trial(length, doubt, i)
            trial[:] = self.FADE * trial[0] + (i < right), self.FADE * trial[1] + 1
        if min(right, k):
            self.calm = 0
        if k == 0:
            if self.learns or right + wrong == 0:  # else the chances are learnt without a draft
                self.idle += 1
        elif not self.trying:
            self.idle, self.patience = 0, 8
        else:
            loss = self.spent - min(right, k) - 1  # in plain passes
            self.patience = min(max(100 * (loss + self.debt), 2), 512)
            again = right > 0 and (loss < 0 or not self.steady)
            self.idle = self.patience if again else 0
            self.debt = 0.0 if self.steady else loss
        self.passes += k > 0
        if k and (self.trying or self.passes % 64 == 0):  # costs may have changed as well
            for j, last in [*self.seconds.items()]:
                if len(last) > 1 + (j <= 0):  # two plain ones stay
                    del last[0]
                elif j > 0 and not self.trying:
                    del self.seconds[j]

    def timed(self, k, seconds, steady=True):
        """A pass took so long, its drafting included; steady: nothing that comes once. k may be
        EARLY: the time since the last pass was read."""
        if not self.learns:
            return
        seconds = max(seconds, 1e-6)  # a coarse clock may stand still
        self.steady = steady
        if not steady:
            self.spent = seconds / (self.plain or seconds)
            return
        self.seconds.setdefault(k, []).append(seconds)
        del self.seconds[k][:-5]
        if 0 not in self.seconds:
            return
        # The lower median, since a disturbed pass is slow. One short EARLY tells little.
        typical = {j: sorted(last)[(len(last) - 1) // 2] for j, last in self.seconds.items()}
        ignored = EARLY if len(self.seconds.get(EARLY, ())) < 3 else None
        self.plain = min(t for j, t in typical.items() if j != ignored)  # wider is not cheaper
        ratios = [(j, t / self.plain, len(self.seconds[j])) for j, t in typical.items() if j > 0]
        # Least squares of relative errors for 1 + jump + slope * j, with a prior
        s0, s1, s2, t0, t1 = 1.0, 0.0, 0.5, 0.0, 0.5 * self.SLOPE
        for j, r, n in ratios:
            w = n / r**2
            s0, s1, s2 = s0 + w, s1 + w * j, s2 + w * j * j
            t0, t1 = t0 + w * (r - 1), t1 + w * j * (r - 1)
        slope = max((s0 * t1 - s1 * t0) / (s0 * s2 - s1 * s1), 0.0)
        jump = max((t0 - s1 * slope) / s0, 0.0)
        self.costs = [1.0] + [1 + jump + slope * j for j in range(1, self.ceiling + 1)]
        for j, r, n in ratios:
            self.costs[j] = (n + 1) / (1 / self.costs[j] + n / r)
        self.spent = min(seconds / self.plain, 2 * self.costs[max(k, 0)])

"""Prompt lookup decoding: an n-gram search finds the draft, no second model does (Saxena 2023).

Where else do the last n tokens stand, in the prompt and in what was written so far? The longest n
from ngram_max down to ngram_min that stands somewhere counts, and what followed it there is the
draft. The search is a few array operations, whatever the length of the text. `PromptLookupDecoder`
makes it inside the graph of a pass and then chooses among the places; `find_draft`, the same for a
loop of your own, takes the earliest one.
"""

import math

import mlx.core as mx

from decoder import DraftingDecoder, Stream, as_ids, integer, read

# Ids that no token has. NONE stands before the first token and after the last one, SEAM + i behind
# text i, each once: no n-gram reaches across one, and no draft goes on past one.
NONE, SEAM = 2**32 - 1, 2**32 - 4
ROOM = 1024  # the buffer grows by this many tokens


def mismatches(buffer, suffix):
    """How many of the last n tokens, suffix (n,), do not match at each place -> (B - n - 1,).

    Place j is the n ids that end at buffer[j + n]. All n and all places are compared at once.
    """
    n = suffix.size
    places = buffer.size - n - 1  # not the last tokens themselves
    windows = mx.as_strided(buffer, (n, places), (1, 1), 1)  # a column per place; nothing is copied
    rows = mx.arange(1, n + 1, dtype=mx.uint8 if n < 256 else mx.uint32)[:, None]
    return mx.max((windows != suffix[:, None]) * rows, axis=0)  # the last row that differs tells


def match_lengths(buffer, size, n):
    """The search inside a pass's graph, where only the device knows how long the text is.

    Args:
        buffer: (B,) uint32: n <= 255 times NONE, the texts with SEAM + i behind text i, NONE to
            the end, once or more.
        size: () integer array: how many entries come before those last NONE.

    Returns how many of the last n tokens stand at each place, (B - n - 1,) uint8, 0 where no token
    follows at buffer[j + n + 1], and the most of them, ().
    """
    wrong = mismatches(buffer, mx.slice(buffer, size - n, (0,), (n,)))
    lengths = (n - wrong) * (buffer[n + 1 :] < SEAM)
    return lengths, mx.max(lengths)


class PromptLookupDecoder(DraftingDecoder):
    """Prompt lookup decoding: an n-gram search in the prompt and in the output drafts.

    Args: as for Decoder and DraftingDecoder, and ngram_max <= 255, ngram_min: the n-grams looked
    up, and of the last 64 places where the longest stands, that with the likeliest next token: each
    has a vote, which counts more near the place last copied from. Unless fixed_draft: where no
    n-gram matches after a draft, the next one goes on where that one ended, one token on, since a
    copy goes on after a changed token; and a draft that reaches the end of the text goes on with
    its own beginning, since what repeats itself goes on repeating.
    """

    def __init__(self, model, eos_id=1, ngram_max=16, ngram_min=1, **options):
        super().__init__(model, eos_id, **options)
        self.ngram_max = integer("ngram_max", ngram_max, 1, 255)  # lengths are bytes
        self.ngram_min = integer("ngram_min", ngram_min, 1, self.ngram_max)

    def stream(self, prompt: mx.array, max_tokens: int = 200, reference=None) -> Stream:
        """See Decoder.stream. reference: token ids (R,) uint32 of another text to draft from (the
        expected answer, an earlier version, a template), which the model never reads."""
        reference = as_ids("the reference", [] if reference is None else reference)
        return super().stream(prompt, max_tokens, reference)

    def _drafter(self, prompt, reference):
        two = getattr(self.model, "is_encoder_decoder", False)  # prompt and output are two texts
        texts = [reference.tolist(), prompt.tolist(), *[[]] * two]
        most = max(64, min(self.num_draft or 0, 1024) * self.fixed_draft)
        return LookupDrafter(texts, self.ngram_max, self.ngram_min, most, self.fixed_draft)


class LookupDrafter:
    """Drafts what followed the last tokens where they stood before."""

    unfed = ()

    def __init__(self, texts, ngram_max, ngram_min, most=64, literal=False):
        """texts: lists of token ids; the last one is written on. most: tokens of a draft;
        literal: nothing but what find_draft could draft."""
        self.most, self.literal = most, literal
        self.n, self.least, self.text = ngram_max, ngram_min, [NONE] * ngram_max
        for i, text in enumerate(texts):
            self.text += text + [SEAM + i]
        self.text.pop()
        self.start = len(self.text)  # where the output begins
        self.buffer = mx.array(self.text, mx.uint32)
        self.copied = self.start  # where the text was last copied from
        self.length, self.doubt, self.place, self.found = 0, 0, 0, []
        if texts[-1]:  # a causal model may draft from the first pass on
            self._grow(self.start)
            self._choose(0, *read(*match_lengths(self.buffer, mx.array(self.start), self.n)))

    @property
    def limit(self):
        return len(self.found)

    def _grow(self, size):
        """Makes room for so many tokens and a NONE behind them."""
        if size >= self.buffer.size:
            room = mx.full((size - self.buffer.size + ROOM,), NONE, mx.uint32)
            self.buffer = mx.concatenate([self.buffer, room])

    def draft(self, k, position, ids):
        return mx.array(self.found[:k], mx.uint32)

    def follow(self, output, accepted, position):
        """Appends the accepted + 1 tokens of output (k+1,), and looks up the last tokens."""
        size = self.start + position
        self._grow(size + output.size)
        if output.size > 1:
            output = mx.where(mx.arange(output.size) <= accepted, output, NONE)
        self.buffer[size : size + output.size] = output
        return match_lengths(self.buffer, size + 1 + accepted, self.n)

    def settle(self, output, k, search):
        """After a pass that wrote output -> how many tokens of what was found, drafted or not,
        were right, and whether the next one was wrong."""
        pairs = list(zip(output, self.found, strict=False))
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        self.copied = (self.place if k else self.copied) + len(output)
        self.text += output
        self._choose(k, *search)
        return right, right < len(pairs)

    def _choose(self, k, lengths, longest):
        """Chooses among the places of the longest match; the host knows the text by now."""
        places: list[int] = []
        self.length, self.found = longest.item(), []
        if self.length >= self.least:
            lengths, end = bytes(memoryview(lengths)), lengths.size  # the last places come first
            while len(places) < 64 and (end := lengths.rfind(self.length, 0, end)) >= 0:
                places.append(end + self.n + 1)
        elif k and self.text[self.copied - 1] < SEAM and not self.literal:
            self.length, places = 0, [self.copied]  # a copy may go on after a changed token
        if not places:
            return
        near = {p: (1 + abs(p - self.copied)) ** -0.5 for p in places}
        votes: dict[int, float] = {}
        for p in places:
            votes[self.text[p]] = votes.get(self.text[p], 0) + near[p]
        winner = max(votes, key=lambda token: votes[token])
        agree = [p for p in places if self.text[p] == winner]
        self.place = max(agree, key=lambda p: near[p])
        # 0: all agree about the next token, 1: more than half, 2: fewer; and 3 more far from there
        self.doubt = (len(agree) < len(places)) + (2 * len(agree) <= len(places))
        self.doubt += 3 * (abs(self.place - self.copied) > 64)
        self.found = self.text[self.place : self.place + self.most]
        if self.place + len(self.found) == len(self.text) and not self.literal:
            times = math.ceil(self.most / len(self.found))
            self.found = (self.found * times)[: self.most]  # what repeats itself goes on so
        seam = next((i for i, t in enumerate(self.found) if t >= SEAM), len(self.found))
        del self.found[seam:]


def find_draft(
    context: mx.array, ngram_max: int, ngram_min: int, num_draft: int, seam: int = 0
) -> mx.array:
    """What followed the last tokens of the context where they stood before.

    Args:
        context: Token ids (N,) uint32: the prompt's, then the generated ones.
        ngram_max, ngram_min: The lengths looked up. The longest that matches wins, of several
            places the earliest. A match may overlap the last tokens.
        num_draft: The most tokens to draft.
        seam: Where the generated tokens begin, if prompt and output are two texts: the n-gram is
            of generated tokens, matches on one side of the seam only, and a draft from the prompt
            ends there.

    Returns the draft, (k,) uint32 with k <= num_draft; empty where nothing matches.
    Raises ValueError unless 1 <= ngram_min <= ngram_max, num_draft >= 0 and 0 <= seam <= N.
    """
    context = as_ids("the context", context)
    size = context.size
    ngram_max = integer("ngram_max", ngram_max, 1)
    ngram_min = integer("ngram_min", ngram_min, 1, ngram_max)
    num_draft = integer("num_draft", num_draft, 0)
    seam = integer("seam", seam, 0, size)
    n = min(ngram_max, size - seam, size - 1)
    if n < ngram_min or num_draft == 0:
        return context[:0]
    none = mx.full((n,), NONE, mx.uint32)
    texts = [context[:seam], none[:1], context[seam:]] if seam else [context]
    buffer = mx.concatenate([none, *texts])
    wrong = mismatches(buffer, buffer[-n:])
    if seam:  # what ends at the seam has nothing to draft
        wrong = mx.where(mx.arange(wrong.size) == seam - 1, n, wrong)
    place, fewest = read(mx.argmin(wrong), mx.min(wrong))  # argmin takes the earliest
    if n - fewest.item() < ngram_min:
        return context[:0]
    start, stop = place.item() + 1, seam
    if start > seam:  # in the generated text, behind the id at the seam
        start, stop = start - bool(seam), size
    return context[start : min(start + num_draft, stop)]

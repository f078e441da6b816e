"""Prompt lookup decoding: an n-gram search finds the draft, no second model does (Saxena 2023).

The last n tokens are looked up in the prompt and in what was written so far, from n = ngram_max
down to ngram_min; what followed them there is the draft. All n and all places are compared at
once: a few array operations, whatever the length of the text.
"""

import functools

import mlx.core as mx

from decoder import DraftingDecoder, read

# Two ids that no token has. NONE stands before the first token and after the last one, SEAM
# between two texts: no n-gram reaches across either, and no draft goes on past one.
NONE, SEAM = 2**32 - 1, 2**32 - 2
CHUNK = 1024  # the buffer grows by this many tokens


@functools.cache
def constants(n):
    """Row numbers (n, 1) and ids that match nothing (n,)."""
    rows = mx.arange(1, n + 1, dtype=mx.uint8 if n < 256 else mx.uint32)[:, None]
    none = mx.full((n,), NONE, mx.uint32)
    mx.eval(rows, none)
    return rows, none


def unmatched(buffer, places, suffix):
    """How many of the last n tokens do not match at each place: (places,).

    Place j is the n ids that end at buffer[j + n]; suffix (n, 1) is the last n tokens, the oldest
    first. The newest token that differs decides: its row number, 0 if none does.
    """
    n = suffix.shape[0]
    windows = mx.as_strided(buffer, (n, places), (1, 1), 1)  # a column per place; nothing is copied
    different = windows != suffix
    rows, _ = constants(n)
    return mx.max((different.view(mx.uint8) if n < 256 else different) * rows, axis=0)


def check_ngrams(ngram_max, ngram_min):
    if not 1 <= ngram_min <= ngram_max:
        raise ValueError(
            f"ngram_min is {ngram_min}, ngram_max {ngram_max}: 1 <= ngram_min <= ngram_max is right"
        )


def find_draft(context, ngram_max, ngram_min, num_draft, seam=0):
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
    check_ngrams(ngram_max, ngram_min)
    size = context.size
    if num_draft < 0:
        raise ValueError(f"num_draft is {num_draft}: it must be 0 or more")
    if not 0 <= seam <= size:
        raise ValueError(f"seam is {seam}: it must be in the context, 0 to {size}")
    context = context.astype(mx.uint32)
    n = min(ngram_max, size - seam, size - 1)
    if n < ngram_min or num_draft == 0:
        return mx.array([], mx.uint32)
    _, none = constants(n)
    parts = [none, context[:seam], none[:1], context[seam:]] if seam else [none, context]
    buffer = mx.concatenate(parts)
    end = buffer.size - n
    wrong = unmatched(buffer, end - 1, mx.as_strided(buffer, (n, 1), (1, 1), end))
    if seam:
        wrong[seam - 1] = n  # it ends at the seam: nothing to draft
    place, fewest = read(mx.argmin(wrong), mx.min(wrong))  # argmin takes the earliest
    if n - fewest.item() < ngram_min:
        return mx.array([], mx.uint32)
    start, stop = place.item() + 1, seam
    if start > seam:  # in the generated text, behind the id at the seam
        start, stop = start - bool(seam), size
    return context[start : min(start + num_draft, stop)]


def match_lengths(buffer, size, ngram_max):
    """The same inside a pass's graph, where only the device knows how long the text is.

    Args:
        buffer: (B,) uint32: ngram_max times NONE, the texts with SEAM between them, NONE to the
            end, once or more.
        size: () integer array: how many entries come before those last NONE.

    Returns (B - ngram_max - 1,) uint8: the length, up to ngram_max <= 127, of the match whose draft
    would begin at buffer[j + ngram_max + 1]; 0 where there is nothing to draft.
    """
    n = ngram_max
    suffix = mx.slice(buffer, size - n, (0,), (n,))[:, None]
    wrong = unmatched(buffer, buffer.size - n - 1, suffix)
    return (n - wrong) * (buffer[n + 1 :] < SEAM).view(mx.uint8)


class PromptLookupDecoder(DraftingDecoder):
    """Prompt lookup decoding: an n-gram search in the prompt and in the output drafts.

    Args: as for Decoder and DraftingDecoder, and ngram_max <= 127, ngram_min: the n-grams looked
    up. Of several places where the longest stands, the most frequent next token decides, then the
    last place.
    """

    def __init__(self, model, eos_id=1, ngram_max=16, ngram_min=1, **options):
        check_ngrams(ngram_max, ngram_min)
        if ngram_max > 127:
            raise ValueError(f"ngram_max is {ngram_max}: the longest n-gram looked up is 127")
        super().__init__(model, eos_id, **options)
        self.ngram_max, self.ngram_min = ngram_max, ngram_min

    def stream(self, prompt, max_tokens=200, reference=None):
        """Starts writing; see Decoder.stream.

        Args:
            reference: Token ids (R,) uint32 of another text to draft from: the expected answer,
                an earlier version, a template. Searched like the prompt, never read by the model.
        """
        if self.num_draft == 0:
            return super().stream(prompt, max_tokens)
        return self._stream(self._look_up, prompt, max_tokens, reference)

    def _look_up(self, cache, token, prompt, max_tokens, reference):
        prompt, reference = prompt.tolist(), [] if reference is None else list(map(int, reference))
        seam = getattr(self.model, "is_encoder_decoder", False)
        texts = [reference, prompt, []] if seam else [reference, prompt]
        return self._draft(cache, token, max_tokens, LookupDrafter(texts, self))


class LookupDrafter:
    """Drafts what followed the last tokens where they stood before."""

    def __init__(self, texts, decoder):
        """texts: lists of token ids; the last one is written on."""
        self.n, self.least = decoder.ngram_max, decoder.ngram_min
        self.text = [NONE] * self.n
        for text in texts:
            self.text += text + [SEAM]
        self.text.pop()
        self.buffer = mx.array(self.text, mx.uint32)
        self.evidence, self.found = None, []
        if texts[-1]:
            self._grow(0)
            self.settle([], 0, read(*self._search(mx.array(len(self.text)))))

    @property
    def limit(self):
        return len(self.found)

    def _grow(self, tokens):
        """Makes room for more tokens and a NONE behind them."""
        missing = len(self.text) + tokens + 1 - self.buffer.size
        if missing > 0:
            room = mx.full((missing + CHUNK,), NONE, mx.uint32)
            self.buffer = mx.concatenate([self.buffer, room])

    def _search(self, size):
        lengths = match_lengths(self.buffer, size, self.n)
        return lengths, mx.max(lengths)

    def draft(self, k, position):
        return mx.array(self.found[:k], mx.uint32)

    def follow(self, output, accepted):
        """Appends the accepted + 1 tokens of output (k+1,), and looks up the last tokens."""
        self._grow(output.size)
        kept = mx.where(mx.arange(output.size) <= accepted, output, NONE)
        size = len(self.text)
        self.buffer[size : size + output.size] = kept
        return self._search(size + accepted + 1)

    def settle(self, output, k, found):
        """Chooses among the places of the longest match; the host knows the text by now."""
        self.text += output
        lengths, longest = found
        longest = longest.item()
        self.evidence, self.found = longest, []
        if longest < self.least:
            return
        places, lengths = [], bytes(memoryview(lengths))
        end = len(lengths)
        while len(places) < 64 and (end := lengths.rfind(longest, 0, end)) >= 0:
            places.append(end + self.n + 1)
        votes = [self.text[p] for p in places]
        start = places[votes.index(max(votes, key=votes.count))]
        self.found = self.text[start : start + 64]
        if SEAM in self.found:
            del self.found[self.found.index(SEAM) :]

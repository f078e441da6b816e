"""Prompt lookup decoding: the draft is found by an n-gram search, no second model (Saxena 2023).

The last n tokens are looked up in the prompt and in what was written so far, from n = ngram_max
down to ngram_min; what followed them there is the draft.
"""

import mlx.core as mx

from decoder import DraftingDecoder, read

# Ids that no token has. They equal nothing that is searched for, so that no n-gram spans a seam,
# and nothing can be drafted from them, so that a draft ends at a seam and at the end of the text.
END, SEAM, REFERENCE_SEAM = 2**32 - 1, 2**32 - 2, 2**32 - 3


def match_lengths(context, suffix):
    """Length of the match that ends at each position: (N,) uint8.

    context (N,) uint32 begins with len(suffix) - 1 ids that match nothing; suffix (n,) uint32 is
    the last n tokens, the last first. The match at position j is the longest m <= n with
    context[j-m+1 … j] equal to the last m tokens. It is 0 where a special id follows.
    """
    n, size = suffix.size, context.size
    lengths = None
    for i in reversed(range(n)):
        same = (context[n - 1 - i : size - 1 - i] == suffix[i]).astype(mx.uint8)
        lengths = same if lengths is None else same * (lengths + 1)
    return mx.where(context[n:] < REFERENCE_SEAM, lengths, 0)


def find_draft(context, ngram_max, ngram_min, num_draft, seam=0):
    """The tokens that followed the last tokens of the context where they stood before.

    Args:
        context: Token ids (N,) uint32: the prompt's, then the generated ones.
        ngram_max, ngram_min: The n-grams looked up, the longest that matches wins, of several
            matches the earliest.
        num_draft: The most tokens to draft.
        seam: Where the generated tokens begin, if prompt and output are two texts: no n-gram
            spans it, and a draft from the prompt ends at it.

    Returns the draft, (k,) uint32, k <= num_draft; empty where nothing matches.
    Raises ValueError unless 1 <= ngram_min <= ngram_max, num_draft >= 0, 0 <= seam <= N.
    """
    check_ngrams(ngram_max, ngram_min)
    if num_draft < 0:
        raise ValueError(f"num_draft is {num_draft}: it must be 0 or more")
    if not 0 <= seam <= context.size:
        raise ValueError(f"seam is {seam}: it must be in [0, {context.size}], within the context")
    context = context.astype(mx.uint32)
    n = min(ngram_max, context.size - seam)
    if n < ngram_min or num_draft == 0:
        return mx.zeros((0,), mx.uint32)
    special = mx.full((n - 1,), END, mx.uint32), mx.array([SEAM, END], mx.uint32)
    parts = [special[0], context, special[1][1:]]
    if seam:
        parts[1:2] = [context[:seam], special[1][:1], context[seam:]]
    lengths = match_lengths(mx.concatenate(parts), context[context.size - n :][::-1])
    at = mx.argmax(lengths)
    start, length = read(at, lengths[at])
    if length < ngram_min:
        return mx.zeros((0,), mx.uint32)
    start, end = (start + 1, seam) if start < seam else (start + 1 - bool(seam), context.size)
    return context[start : min(start + num_draft, end)]


def check_ngrams(ngram_max, ngram_min):
    if not 1 <= ngram_min <= ngram_max:
        raise ValueError(
            f"ngram_min is {ngram_min} and ngram_max {ngram_max}: 1 <= ngram_min <= ngram_max"
        )


class PromptLookupDecoder(DraftingDecoder):
    """Prompt lookup decoding: an n-gram search in the prompt and in the output drafts.

    Args: as for Decoder and DraftingDecoder, and ngram_max, ngram_min, the n-grams looked up.
    """

    def __init__(self, model, eos_id=1, ngram_max=16, ngram_min=1, **options):
        check_ngrams(ngram_max, ngram_min)
        super().__init__(model, eos_id, **options)
        self.ngram_max, self.ngram_min = ngram_max, ngram_min

    def stream(self, prompt, max_tokens=200, reference=None):
        """Starts writing; see Decoder.stream.

        Args:
            reference: Token ids (R,) uint32 of another text to draft from: the expected answer,
                an earlier version, a template. Searched like the prompt.
        """
        if self.num_draft == 0:
            return super().stream(prompt, max_tokens)
        return self._stream(self._look_up, prompt, max_tokens, reference)

    def _look_up(self, cache, token, prompt, max_tokens, reference):
        seam = getattr(self.model, "is_encoder_decoder", False)
        drafter = LookupDrafter(self, prompt, reference, seam)
        return self._draft(cache, token, prompt, max_tokens, drafter)


class LookupDrafter:
    """Drafts what followed the last tokens where they stood before.

    The texts stand in one buffer: n - 1 special ids, the reference, the prompt, the output, each
    behind its seam, and END up to the capacity, which is always longer than a draft.
    """

    def __init__(self, decoder, prompt, reference, seam):
        self.n, self.least, self.ceiling = decoder.ngram_max, decoder.ngram_min, 24
        special = mx.array([END] * (self.n - 1) + [SEAM, REFERENCE_SEAM], mx.uint32)
        parts = [special[: self.n - 1], prompt.astype(mx.uint32)]
        if reference is not None and len(reference) > 0:
            parts[1:1] = [mx.array(reference, mx.uint32), special[-1:]]
        if seam:
            parts.append(special[-2:-1])
        self.size = sum(p.size for p in parts)
        self.context = mx.concatenate(parts)
        self._grow(0)
        if seam:
            self.evidence, self.found = None, []
        else:
            self._found(read(*self._search(self.size)))

    @property
    def limit(self):
        return len(self.found)

    def _grow(self, more):
        """Makes room for `more` tokens and for a draft beyond them, in chunks."""
        missing = self.size + more + self.ceiling - self.context.size
        if missing > 0:
            room = mx.full((missing + 1024,), END, mx.uint32)
            self.context = mx.concatenate([self.context, room])

    def _search(self, size):
        """Looks up the last tokens of the first `size`, an int or array: length (), draft (24,)."""
        suffix = self.context[mx.maximum(size - 1 - mx.arange(self.n), 0)]
        lengths = match_lengths(self.context, suffix)
        at = mx.argmax(lengths)
        return lengths[at], self.context[at + self.n + mx.arange(self.ceiling)]

    def _found(self, found):
        length, draft = found
        special = (i for i, t in enumerate(draft) if t >= REFERENCE_SEAM)
        self.evidence = length
        self.found = draft[: next(special, len(draft))] if length >= self.least else []

    def draft(self, k, position):
        return mx.array(self.found[:k], mx.uint32)

    def follow(self, output, accepted):
        k = output.size
        self._grow(k)
        kept = mx.where(mx.arange(k) <= accepted, output, END)
        self.context[self.size : self.size + k] = kept
        return self._search(self.size + accepted + 1)

    def settle(self, output, k, found):
        self.size += len(output)
        self._found(found)

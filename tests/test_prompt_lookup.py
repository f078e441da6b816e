"""Prompt lookup: the n-gram search against a plain reading of its rule, also in the decoder."""

import mlx.core as mx
import numpy as np
import pytest
from toys import HashModel, prompts, write

from decoder import read
from prompt_lookup import LookupDrafter, PromptLookupDecoder, find_draft


def matches(context, n, seam):
    """Where the tokens begin that followed the last n tokens elsewhere, and where drafts end."""
    size = len(context)
    if size - seam < n:  # the last n tokens are of one text
        return
    for start in range(size - n):
        end = start + n
        spans = start < seam < end
        if context[start:end] == context[size - n :] and not spans and end != seam:
            yield end, seam if end < seam else size


def reference_draft(context, ngram_max, ngram_min, num_draft, seam=0):
    """The rule: the longest n-gram, of equal matches the earliest, what follows is the draft."""
    for n in range(ngram_max, ngram_min - 1, -1):
        for start, end in matches(context, n, seam):
            return context[start : min(start + num_draft, end)]
    return []


def found(context, *args, **options):
    draft = find_draft(mx.array(context, mx.uint32), *args, **options)
    assert draft.dtype == mx.uint32 and draft.ndim == 1
    return draft.tolist()


def test_search_equals_reference_on_random_contexts():
    rng = np.random.default_rng(0)
    drafts = 0
    for i in range(1200):
        alphabet = int(rng.integers(1, 6))
        ngram_max = int(rng.integers(1, 9))
        ngram_min = int(rng.integers(1, ngram_max + 1))
        size = int(rng.choice([0, 1, ngram_max, ngram_max + 1, *rng.integers(2, 60, 8)]))
        seam = int(rng.integers(0, size + 1)) if i % 2 else 0
        num_draft = int(rng.choice([0, 1, 4, 10, 100]))
        context = rng.integers(0, alphabet, size).tolist()
        args = context, ngram_max, ngram_min, num_draft
        expected = reference_draft(*args, seam)
        assert found(*args, seam=seam) == expected, (*args, seam)
        drafts += bool(expected)
    assert drafts > 400  # matches abound


@pytest.mark.parametrize("n", [1, 2, 3, 16, 300])
def test_match_of_exactly_the_shortest_and_the_longest_ngram(n):
    ngram = list(range(10, 10 + n))
    context = [1, *ngram, 7, 8, 2, *ngram]  # the tokens before differ: not one token more matches
    assert found(context, n + 3, n, 2) == [7, 8]
    assert found(context, n, n, 2) == [7, 8]
    assert found(context, n + 3, n + 1, 2) == []


def test_longest_match_wins_and_of_equal_ones_the_earliest():
    assert found([5, 6, 1, 9, 6, 2, 6, 3, 5, 6], 4, 1, 1) == [1]
    assert found([9, 6, 1, 5, 6, 2, 6, 3, 5, 6], 4, 1, 1) == [2]
    assert found([9, 6, 1, 5, 6, 2, 6, 3, 5, 6], 1, 1, 1) == [1]


def test_match_may_overlap_the_suffix_but_is_not_the_suffix_itself():
    assert found([4, 4, 4, 4], 3, 1, 10) == [4]
    assert found([4, 5, 4, 5, 4], 3, 1, 10) == [5, 4]
    assert found([3, 4, 5], 3, 1, 10) == []


def test_no_ngram_spans_the_seam_and_drafts_end_at_it():
    context = [5, 6, 7, 8, 5, 6]
    assert found(context, 2, 1, 10, seam=0) == [7, 8, 5, 6]
    assert found(context, 2, 1, 10, seam=4) == [7, 8]
    assert found(context, 2, 2, 10, seam=5) == []  # only the 6 was generated
    assert found(context, 2, 1, 10, seam=5) == [7, 8, 5]
    assert found(context, 2, 1, 10, seam=6) == []  # nothing was
    assert found([5, 6, 7, 5, 6], 2, 2, 10, seam=1) == []  # 5 | 6 is no bigram
    assert found([7, 6, 6], 1, 1, 10, seam=2) == []  # at the seam there is nothing to draft
    assert found([7, 6, 6, 8, 6], 1, 1, 10, seam=2) == [8, 6]  # nor before the one that counts


def test_second_shorter_prompt():
    assert found([1, 2, 3, 9, 1, 2], 2, 1, 4) == [3, 9, 1, 2]
    assert found([1, 4, 1], 2, 1, 4) == [4, 1]
    assert found([1], 2, 1, 4) == []


def test_large_ids_and_other_integer_types():
    assert found([100_000, 7, 100_000], 2, 1, 1) == [7]
    for context in ([3, 7, 3], np.array([3, 7, 3]), mx.array([3, 7, 3], mx.int32)):
        draft = find_draft(context, np.int64(2), mx.array(1), 1)
        assert draft.dtype == mx.uint32 and draft.tolist() == [7]


@pytest.mark.parametrize(
    "args, options, wrong",
    [
        ((2, 3, 4), {}, "ngram_min is 3"),
        ((2.0, 1, 4), {}, "ngram_max is 2.0"),
        ((2, True, 4), {}, "ngram_min is True"),
        ((2, 1, 1.5), {}, "num_draft is 1.5"),
        ((2, 0, 4), {}, "ngram_min is 0"),
        ((2, 1, -1), {}, "num_draft is -1"),
        ((2, 1, 4), {"seam": 4}, "seam is 4"),
        ((2, 1, 4), {"seam": -1}, "seam is -1"),
    ],
)
def test_search_refuses_what_it_cannot_do(args, options, wrong):
    with pytest.raises(ValueError, match=wrong):
        find_draft(mx.array([1, 2, 3], mx.uint32), *args, **options)


@pytest.mark.parametrize("context", [[1, -1, 1], [1.0], [True], [2**32], [[1, 2]], "1", None])
def test_search_refuses_a_context_that_is_no_token_ids(context):
    for kind in (list, np.array) if isinstance(context, list) else (lambda same: same,):
        with pytest.raises(ValueError, match="the context"):
            find_draft(kind(context), 2, 1, 4)


@pytest.mark.parametrize("name, value", [("max", 0), ("max", 256), ("max", 2.0), ("min", 17)])
def test_decoder_refuses_ngrams_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"ngram_{name} is {value}"):
        PromptLookupDecoder(HashModel(), **{f"ngram_{name}": value})


def passes(model, ids):
    """(tokens written before the pass, its draft) of every pass that `model` recorded."""
    written = 0
    for fed in model.fed:
        last, *draft = fed.tolist()
        assert last == (ids[written - 1] if written else last)
        yield written, draft
        while draft and written < len(ids) and draft[0] == ids[written]:
            written, draft = written + 1, draft[1:]
        written += 1


def follows(context, start, end, most, literal):
    """What followed: a text that reaches its own end repeats itself, unless taken literally."""
    what = context[start:end]
    if end == len(context) and not literal:
        what = [what[i % len(what)] for i in range(most)]
    return what[:most]


@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("ngram_max, ngram_min", [(16, 1), (3, 2), (1, 1)])
def test_drafts_of_the_decoder_obey_the_rule(encoder, ngram_max, ngram_min, literal):
    """Of the longest n-gram's matches any may be taken; all else is exact."""
    drafted = none = others = 0
    for seed, prompt in enumerate(prompts(30, vocab=12)):
        model = HashModel(vocab=12, seed=seed, encoder=encoder)
        ngrams = {"ngram_max": ngram_max, "ngram_min": ngram_min}
        decoder = PromptLookupDecoder(model, num_draft=4, fixed_draft=literal, **ngrams)
        decoder.policy.choose = lambda length, doubt, limit, unread: min(limit, 4)
        ids, _, stats = write(decoder, prompt, 30)
        assert len(model.fed) == stats.passes
        before, copied = 0, []  # where the pass before may have copied from
        for written, draft in passes(model, ids):
            context = prompt.tolist() + ids[:written]
            seam = len(prompt) if encoder else 0
            choices = []
            for n in range(ngram_max, ngram_min - 1, -1):
                choices = choices or list(matches(context, n, seam))
            none += not choices
            if not choices and not literal:  # a copy may go on after a changed token
                ends = ((start + written - before, end) for start, end in copied)
                choices = [
                    (s, len(context) if e > seam else e) for s, e in ends if s < e or e > seam
                ]
                others += bool(choices)
            most = min(4, 30 - written - 1)  # no longer than the budget can use
            allowed = [follows(context, *place, most, literal) for place in choices]
            assert draft in (allowed or [[]]), (context, seam)
            copied = [p for p, a in zip(choices, allowed, strict=True) if a == draft != []]
            before, drafted = written, drafted + bool(draft)
    assert drafted > 50 and none > 50 and (others > 5) == (not literal)


def test_a_seam_is_not_taken_for_a_replaced_token():
    text = [9, 8, 7, 10, 11, 5, 6, 12, 13]  # 5 6 ends the prompt, 12 is new
    model = HashModel(vocab=16, habit=0, whim=0)
    model.decode, right = lambda tokens, cache: script(right(tokens, cache), cache), model.decode

    def script(logits, cache):
        rows = mx.array([*text, *[1] * 50])[cache.offset - logits.shape[0] : cache.offset]
        return mx.eye(16)[rows]

    decoder = PromptLookupDecoder(model, num_draft=4)
    decoder.policy.choose = lambda length, doubt, limit, unread: min(limit, 4)
    ids, *_ = write(decoder, mx.array([3, 4, 5, 6], mx.uint32))
    assert ids == text
    drafts = {written: draft for written, draft in passes(model, ids)}
    assert drafts[8] == []


@pytest.mark.parametrize("encoder", [True, False])
def test_reference_is_searched_with_a_seam_of_its_own(encoder):
    for seed, prompt in enumerate(prompts(10, vocab=24)):
        model = HashModel(seed=seed, encoder=encoder)
        decoder = PromptLookupDecoder(model, num_draft=8, fixed_draft=True)
        plain, _, without = write(decoder, prompt, 30)
        model.fed.clear()
        ids, _, stats = write(decoder, prompt, 30, reference=mx.array(plain, mx.uint32))
        assert ids == plain
        assert stats.prompt_tokens == len(prompt)
        assert stats.passes < without.passes or without.passes <= 5
        context = prompt.tolist() + plain
        for written, draft in passes(model, ids):
            texts = [plain, *([prompt.tolist(), ids] if encoder else [context])]
            assert not draft or any(is_part(draft, text) for text in texts)
            assert written or not encoder or not draft


def is_part(draft, text):
    return any(text[i : i + len(draft)] == draft for i in range(len(text)))


def test_the_answer_as_reference_is_accepted_whole():
    answer = list(range(2, 64))
    model = HashModel(vocab=64, habit=0, whim=0)  # writes token 0 but for the habits below
    model.habits = mx.eye(64)[mx.array([2, 2, *range(3, 64), 1])]
    decoder = PromptLookupDecoder(model, num_draft=8, fixed_draft=True)
    ids, _, stats = write(decoder, mx.array([0], mx.uint32), 100, reference=answer)
    assert ids == answer and stats.passes == 1 + -(-62 // 9)


def test_reference_with_ids_that_the_model_does_not_have():
    model = HashModel(vocab=16)
    for delta in (0.0, 0.5, 1.0):
        decoder = PromptLookupDecoder(model, num_draft=4, fixed_draft=True, delta=delta)
        reference = [i for j in range(2, 16) for i in (j, 16 + j, 2**32 - 2)]
        ids, *_ = write(decoder, mx.array([5, 6], mx.uint32), 20, reference=reference)
        assert max(ids) < 16


@pytest.mark.parametrize("kind", [list, np.array, mx.array])
def test_a_reference_may_be_a_list_or_any_array_of_integers(kind):
    model, prompt = HashModel(), mx.array([5, 6, 5], mx.uint32)
    decoder = PromptLookupDecoder(model, num_draft=4, fixed_draft=True)
    plain, _, without = write(decoder, prompt)
    ids, _, stats = write(decoder, prompt, reference=kind(plain))
    assert ids == plain and stats.passes < without.passes


def test_empty_reference_is_none():
    model, prompt = HashModel(), mx.array([5, 6, 5], mx.uint32)
    decoder = PromptLookupDecoder(model)
    assert write(decoder, prompt, reference=[])[0] == write(decoder, prompt)[0]


def test_no_match_of_a_long_ngram_is_none():
    assert found(list(range(700)), 300, 1, 4) == []


def test_the_longest_ngram_of_the_decoder():
    text = list(range(3, 303))
    drafter = LookupDrafter([[*text, *text[:255]]], 255, 1)
    assert drafter.length == 255 and drafter.found[:9] == text[255:264]


def settle(drafter, output, k, position=0):
    """After a pass: what `follow` finds for the output, of which all but the last were drafted."""
    found = drafter.follow(mx.array(output, mx.uint32), mx.array(len(output) - 1), position)
    return drafter.settle(output, k, read(*found))


def test_all_of_the_last_places_vote():
    assert LookupDrafter([[5, 7, 5, 7, 5, 7, 5, 7, 5, 9, 5]], 1, 1).found[0] == 7


def test_behind_a_changed_token_there_is_no_evidence():
    drafter = LookupDrafter([[5, 6, 7, 8, 9, 4, 3, 5, 6]], 3, 2)
    assert drafter.found[:3] == [7, 8, 9] and drafter.length == 2
    assert settle(drafter, [7, 4], 3) == (1, True)
    assert drafter.found[:2] == [9, 4] and drafter.length == 0  # a match of one is too short


def test_where_nothing_was_drafted_a_copy_goes_on_from_where_the_last_one_was():
    drafter = LookupDrafter([[5, 6, 7, 8, 9, 10, 11, 5, 6]], 3, 1)
    settle(drafter, [20], 0)
    assert drafter.copied == drafter.start + 1 and drafter.found == []

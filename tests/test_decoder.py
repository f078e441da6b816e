"""The decoders: the target's own words whatever is drafted, and exact counts."""

import json
import math
from contextlib import suppress

import mlx.core as mx
import numpy as np
import pytest
from toys import HashModel, ScriptModel, drafting, prompts, write

import decoder as decoding
import prompt_lookup
from decoder import Decoder, SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder

PROMPT = mx.array([5, 6, 7], mx.uint32)


# Lossless


@pytest.mark.parametrize("ceiling", [1, 4, 10, 24, None])
@pytest.mark.parametrize("levels", [None, 1], ids=["", "ties"])
def test_text_is_the_same_with_and_without_drafts(ceiling, levels):
    accepted = rejected = 0
    for seed, prompt in enumerate(prompts(24)):
        encoder, eos = seed % 2 == 0, (1, None, 4)[seed % 3]
        model = HashModel(seed=seed, levels=levels, encoder=encoder)
        draft_model = HashModel(seed=seed + 1, levels=levels, encoder=encoder)
        plain = write(Decoder(model, eos), prompt, 30)
        options = {"eos_id": eos, "num_draft": ceiling, "fixed_draft": seed % 4 > 1}
        for decoder in drafting(model, draft_model, **options):
            ids, drafted, stats = write(decoder, prompt, 30)
            assert ids == plain[0] and stats.stop == plain[2].stop
            assert stats.tokens == len(ids) and stats.accepted == sum(drafted)
            accepted += stats.accepted
            rejected += stats.drafted - stats.accepted
    assert accepted > 60 and rejected > 50


def test_ties_are_broken_alike_by_the_lowest_id():
    class Tied(ScriptModel):
        def decode(self, tokens, cache):
            return mx.ones_like(super().decode(tokens, cache))

    model = Tied([3] * 9)
    for decoder in (Decoder(model), *drafting(model, model)):
        assert write(decoder, PROMPT, 9)[0] == [0] * 9


# Stop


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 20])
def test_never_more_tokens_than_the_budget(budget):
    for prompt in prompts(5):
        model, draft_model = HashModel(), HashModel(seed=1)
        plain, _, stats = write(Decoder(model, None), prompt, budget)
        assert len(plain) == stats.passes == stats.tokens == budget and stats.stop == "length"
        for decoder in drafting(model, draft_model, eos_id=None, num_draft=8, fixed_draft=True):
            model.fed.clear()
            ids, _, stats = write(decoder, prompt, budget)
            assert ids == plain and stats.tokens == budget and stats.stop == "length"
            written = 0  # no draft is longer than the budget can use
            for fed in model.fed:
                assert written + fed.size <= budget
                written += 1


def test_no_budget_no_pass():
    model = HashModel()
    for decoder in (Decoder(model), *drafting(model, model)):
        stream = decoder.stream(PROMPT, 0)
        assert list(stream) == [] and stream.stats.passes == 0 and stream.stats.seconds == 0
        assert stream.stats.prompt_tokens == 3 and stream.stats.tokens_per_pass == 0.0
    assert model.fed == []


A, B, C, EOS = 3, 4, 5, 1


@pytest.mark.parametrize(
    "text, draft, k, counts",
    [  # the target's text, the draft model's, draft length -> passes, drafted, accepted, drafted?
        ([A, B, C, EOS], [A, B, C, EOS], 4, (1, 3, 3, [True] * 3)),  # EOS ends the draft
        ([A, EOS, C, A], [A, EOS, C, A], 3, (1, 1, 1, [True])),  # inside: the rest is not counted
        ([A, B, C, EOS], [A, B, C, EOS], 3, (1, 3, 3, [True] * 3)),  # the extra token
        ([A, B, EOS, A], [A, B, C, A], 4, (1, 4, 2, [True] * 2)),  # instead of a rejected one
        ([EOS, A, B, C], [A, B, C, A], 3, (1, 3, 0, [])),  # an empty text, nothing accepted
        ([EOS, A, B, C], [EOS, A, B, C], 3, (1, 0, 0, [])),  # an empty text, accepted
        ([A, B, C, EOS], [A, C, C, EOS], 2, (2, 3, 2, [True, False, True])),
        ([A, B, C, EOS], [A, EOS, C, EOS], 2, (2, 3, 2, [True, False, True])),  # EOS rejected
    ],
)
def test_statistics_of_texts_made_by_hand(text, draft, k, counts):
    options = {"num_draft": k, "fixed_draft": True}
    decoder = SpeculativeDecoder(ScriptModel(text), ScriptModel(draft), **options)
    ids, drafted, stats = write(decoder, PROMPT)
    assert ids == text[: text.index(EOS)]
    assert (stats.passes, stats.drafted, stats.accepted, drafted) == counts
    assert stats.tokens == len(ids) and stats.stop == "eos" and stats.prompt_tokens == 3
    assert stats.passes == decoder.model.calls
    assert stats.acceptance_rate == (counts[2] / counts[1] if counts[1] else 0.0)
    assert stats.tokens_per_pass == len(ids) / counts[0]


def test_statistics_at_the_budget():
    text = [A, B, C, A, B, C]
    decoder = SpeculativeDecoder(
        ScriptModel(text), ScriptModel(text), num_draft=3, fixed_draft=True
    )
    ids, drafted, stats = write(decoder, PROMPT, 6)
    assert ids == text and drafted == [True, True, True, False, True, False]
    assert (stats.passes, stats.drafted, stats.accepted, stats.stop) == (2, 4, 4, "length")


@pytest.mark.parametrize(
    "eos, ends",
    [
        (1, {1}),
        (np.int64(1), {1}),
        (mx.array(1), {1}),
        (mx.array([1]), {1}),
        ({1, 4}, {1, 4}),
        ([4, 9], {4, 9}),
        (np.array([4, 9]), {4, 9}),
        (None, set()),
        ((), set()),
    ],
)
def test_eos_ids(eos, ends):
    text = [A, C, B, A, EOS, C, C, C, C, C]
    for decoder in (
        Decoder(ScriptModel(text), eos),
        *drafting(ScriptModel(text), ScriptModel(text), eos_id=eos, num_draft=4),
    ):
        ids, _, stats = write(decoder, PROMPT, 10)
        end = next((i for i, t in enumerate(text) if t in ends), 10)
        assert ids == text[:end] and stats.stop == ("length" if end == 10 else "eos")


def test_eos_when_the_budget_is_spent():
    for decoder in (Decoder(ScriptModel([A, EOS])), PromptLookupDecoder(ScriptModel([A, EOS]))):
        _, _, stats = write(decoder, PROMPT, 1)
        assert (stats.tokens, stats.stop) == (1, "length")
        _, _, stats = write(decoder, PROMPT, 2)
        assert (stats.tokens, stats.stop) == (1, "eos")


def test_seconds_run_from_the_call_to_the_last_token():
    for decoder in (Decoder(HashModel(), None), PromptLookupDecoder(HashModel(), None)):
        stream = decoder.stream(PROMPT, 5)
        seconds = [stream.stats.seconds for _ in stream]
        assert 0 < seconds[0] <= seconds[-1] == stream.stats.seconds
        assert stream.stats.tokens_per_second == pytest.approx(5 / seconds[-1])


# One evaluation per pass


@pytest.fixture
def evaluations(monkeypatch):
    """Counts what makes the host wait: read(), mx.eval, and reading an array by other means."""
    counts = {"read": 0, "eval": 0, "async_eval": 0, "other": 0}
    evaluated = {}

    def counted(name, function):
        def wrapper(*args):
            counts[name] += 1
            return function(*args)

        return wrapper

    def read(*arrays, original=decoding.read):
        counts["read"] += 1
        evaluated.update({id(a): a for a in arrays})
        return original(*arrays)

    def other(function):
        def wrapper(array, *args):
            counts["other"] += id(array) not in evaluated
            return function(array, *args)

        return wrapper

    monkeypatch.setattr(decoding, "read", read)
    monkeypatch.setattr(prompt_lookup, "read", read)
    monkeypatch.setattr(mx, "eval", counted("eval", mx.eval))
    monkeypatch.setattr(mx, "async_eval", counted("async_eval", mx.async_eval))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        with suppress(TypeError):  # from Python 3.15 on the class cannot be changed
            monkeypatch.setattr(mx.array, name, other(getattr(mx.array, name)))
    return counts


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("kind", ["plain", "lookup", "speculative"])
def test_one_evaluation_per_pass(evaluations, kind, encoder, temp):
    model, draft_model = HashModel(encoder=encoder), HashModel(seed=1, encoder=encoder)
    decoder = {
        "plain": Decoder(model, None, temp=temp),
        "lookup": PromptLookupDecoder(model, None, temp=temp),
        "speculative": SpeculativeDecoder(model, draft_model, None, temp=temp),
    }[kind]
    stream = decoder.stream(PROMPT, 40)
    evaluations["other"] = 0  # the arguments were read
    stats = [*stream] and stream.stats
    first = kind == "lookup" and not encoder  # the first draft is searched before the first pass
    assert evaluations["read"] == evaluations["eval"] == stats.passes + first
    assert evaluations["other"] == 0
    assert evaluations["async_eval"] == (stats.passes if kind == "plain" else 0)


def test_passes_are_the_decode_calls():
    for seed, prompt in enumerate(prompts(20)):
        model, draft_model = HashModel(seed=seed), HashModel(seed=seed + 1)
        for decoder in (Decoder(model), *drafting(model, draft_model)):
            model.fed.clear()
            _, _, stats = write(decoder, prompt, 40)
            # Plain decoding has one under way when EOS comes, unless the budget ends as well.
            under_way = stats.stop == "eos" and stats.passes < 40 and type(decoder) is Decoder
            assert len(model.fed) - stats.passes == under_way


def test_plain_decoding_is_a_pass_ahead():
    model = HashModel()
    stream = Decoder(model, None).stream(PROMPT, 5)
    passes = [len(model.fed) for _ in stream]
    assert passes == [2, 3, 4, 5, 5]


# The draft model's cache


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("encoder", [True, False])
def test_the_target_as_its_own_draft_model_is_always_right(k, encoder):
    model = HashModel(encoder=encoder)
    decoder = SpeculativeDecoder(model, model, None, num_draft=k, fixed_draft=True)
    _, drafted, stats = write(decoder, PROMPT, 220)
    assert stats.acceptance_rate == 1.0 and stats.passes == math.ceil(220 / (k + 1))
    assert drafted == [(i + 1) % (k + 1) != 0 and i < 219 for i in range(220)]


@pytest.mark.parametrize("fixed", [3, 5, None])
@pytest.mark.parametrize("encoder", [True, False])
def test_drafts_are_those_of_a_fresh_cache(fixed, encoder):
    rejections = 0
    for seed, prompt in enumerate(prompts(8)):
        model = HashModel(seed=seed, encoder=encoder)
        draft_model = HashModel(seed=seed + 1, encoder=encoder)
        decoder = SpeculativeDecoder(
            model, draft_model, None, num_draft=fixed, fixed_draft=bool(fixed)
        )
        ids, drafted, stats = write(decoder, prompt, 40)
        position = 0
        draft_model.record = False
        for fed in model.fed:
            _, *draft = fed.tolist()
            cache, token = draft_model.start(prompt)
            text = mx.concatenate([token, mx.array(ids[:position], mx.uint32)])
            for proposed in draft:
                text = draft_model.decode(text, cache)[-1:].argmax(-1)
                assert proposed == text.item()
            same = [t for t, own in zip(draft, ids[position:], strict=False) if t == own]
            rejections += len(same) < len(draft)
            position += next((i for i, t in enumerate(draft) if t != ids[position + i]), len(draft))
            position += 1
        assert position == 40
    assert rejections > 20


def test_after_plain_passes_the_draft_model_is_fed_what_it_missed(monkeypatch):
    lengths = iter([0, 0, 3, 0, 2, 0, 0, 1] + [4] * 50)

    def choose(policy, length, doubt, limit, unread):
        return min(next(lengths), limit)

    monkeypatch.setattr(decoding.DraftLength, "choose", choose)
    model = HashModel()
    decoder = SpeculativeDecoder(model, model, None)
    _, drafted, stats = write(decoder, PROMPT, 60)
    assert "".join("-x"[d] for d in drafted[:13]) == "--xxx--xx---x"
    assert stats.accepted == stats.drafted > 40


@pytest.mark.parametrize("delta", [0.0, 1.0])
@pytest.mark.parametrize("known", [True, False], ids=["vocab_size", ""])
def test_a_wider_draft_model_has_the_noise_of_the_target(known, delta):
    """From the first draft on, where the width of the target is known; in every text alike."""
    target, draft_model = HashModel(), HashModel()
    draft_model.decode = lambda tokens, cache: mx.pad(
        HashModel.decode(draft_model, tokens, cache), [(0, 0), (0, 8)], constant_values=-50
    )
    if known:
        target.vocab_size = 24
    options = {"num_draft": 4, "fixed_draft": True, "temp": 1.0, "delta": delta}
    decoder = SpeculativeDecoder(target, draft_model, None, **options)
    runs = [write(decoder, PROMPT, 20) for _ in range(3)]
    assert all(run[:2] == runs[0][:2] for run in runs)
    assert not known or runs[0][2].accepted == runs[0][2].drafted > 10


@pytest.mark.parametrize(
    "ids", [[5, -1], [2**32], [2**70], [5.0], [True], [[5]], [None], "text", None, 1.5, []]
)
def test_what_is_no_prompt_is_one_line(ids):
    for kind in (list, np.array) if isinstance(ids, list) else (lambda same: same,):
        with pytest.raises(ValueError, match="^[^\n]*the prompt[^\n]*$"):
            Decoder(HashModel()).stream(kind(ids))
    for ids in (mx.array([5, -1]), mx.array([1.0]), mx.array([True]), PROMPT[None]):
        with pytest.raises(ValueError, match="the prompt"):
            Decoder(HashModel()).stream(ids)


@pytest.mark.parametrize("eos", [-1, 2**32, 1.0, True, "1", [1, -1], [[1]], mx.array([1.0])])
def test_what_is_no_eos_id(eos):
    with pytest.raises(ValueError, match="eos_id"):
        Decoder(HashModel(), eos)


@pytest.mark.parametrize("vocab", [20, 31])
@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("says", [True, False], ids=["vocab_size", ""])
def test_draft_model_with_a_narrower_or_wider_table(vocab, temp, says):
    accepted = drafts = 0
    for seed, prompt in enumerate(prompts(10, vocab=20)):
        model, draft_model = HashModel(vocab=24, seed=seed), HashModel(vocab=vocab, seed=seed)
        n = min(vocab, 24)
        draft_model.habits[:, :n] = model.habits[:, :n]
        draft_model.whims[:, :n] = model.whims[:, :n]
        if says:
            model.vocab_size, draft_model.vocab_size = 24, vocab
        options = {"temp": temp, "seed": seed}
        plain, *_ = write(Decoder(model, None, **options), prompt, 30)
        decoder = SpeculativeDecoder(model, draft_model, None, num_draft=3, **options)
        ids, _, stats = write(decoder, prompt, 30)
        assert ids == plain
        accepted, drafts = accepted + stats.accepted, drafts + stats.drafted
        lenient = SpeculativeDecoder(model, draft_model, None, num_draft=3, delta=1.0, **options)
        assert max(write(lenient, prompt, 30)[0]) < 24
    assert accepted > 0.6 * drafts  # the noise of the ids that both have is the same


# Lenience


def probabilities(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("delta", [0.0, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_lenience_accepts_what_is_nearly_as_likely(delta, dtype):
    """Pass by pass against p(x) >= (1 - delta) p(y) computed from the softmax."""
    lenient = 0

    class Typed(HashModel):
        def decode(self, tokens, cache):  # 30 more: bfloat16 has steps of 1/8 there
            return (super().decode(tokens, cache) + 30).astype(dtype)

    for seed, prompt in enumerate(prompts(12)):
        model, draft_model = Typed(seed=seed), Typed(seed=seed + 1)
        decoder = SpeculativeDecoder(
            model, draft_model, None, num_draft=5, fixed_draft=True, delta=delta
        )
        ids, drafted, stats = write(decoder, prompt, 40)
        fed, model.record, position = model.fed, False, 0
        for _, *draft in (f.tolist() for f in fed):
            cache, token = model.start(prompt)
            text = mx.concatenate([token, mx.array(ids[:position] + draft, mx.uint32)])
            logits = model.decode(text, cache)[position:].astype(mx.float32)
            p, y = probabilities(np.array(logits, np.float64)), np.array(logits).argmax(-1)
            for i, token in enumerate(draft):
                likely = p[i, token] >= (1 - delta) * p[i, y[i]] * (1 - 1e-6)
                if token != y[i] and not (delta and likely):
                    break
                lenient += token != y[i]
                assert ids[position] == token and drafted[position]
                position += 1
            else:
                i = len(draft)
            assert ids[position] == y[i] and not drafted[position]
            position += 1
        assert position == 40
        if delta == 1:
            assert stats.accepted == stats.drafted
        if delta == 0:
            assert ids == write(Decoder(model, None), prompt, 40)[0]
    assert lenient > 0 or delta == 0


def test_lenience_knows_the_distribution_after_top_k():
    """Outside of the top k a token has probability 0 and is not accepted below delta 1."""
    text, wrong = [A] * 10, [B] * 10
    options = {"temp": 1.0, "num_draft": 3, "fixed_draft": True, "eos_id": None}
    for top_k, delta, accepted in ((1, 0.9999, 0), (0, 0.9999, 8), (1, 1.0, 8)):
        models = ScriptModel(text), ScriptModel(wrong, vocab=16)
        models[1].rows = models[1].rows * 100  # whatever the noise, the draft is B
        decoder = SpeculativeDecoder(*models, top_k=top_k, delta=delta, **options)
        assert write(decoder, PROMPT, 10)[2].accepted == pytest.approx(accepted, abs=1)


# Streams


def test_two_streams_interleaved_are_as_if_alone():
    model, draft_model = HashModel(), HashModel(seed=1)
    one, two = prompts(2, seed=3)
    for decoder in (Decoder(model, None), *drafting(model, draft_model, eos_id=None)):
        alone = [write(decoder, p, 40)[0] for p in (one, two)]
        streams = decoder.stream(one, 40), decoder.stream(two, 40)
        together = [[t.id for t in pair] for pair in zip(*streams, strict=True)]
        assert [list(ids) for ids in zip(*together, strict=True)] == alone


def test_an_abandoned_stream_leaves_nothing_behind():
    model, draft_model = HashModel(), HashModel(seed=1)
    for decoder in (Decoder(model, None), *drafting(model, draft_model, eos_id=None)):
        ids, *_ = write(decoder, PROMPT, 40)
        stream = decoder.stream(PROMPT, 40)
        first = [next(stream).id for _ in range(7)]
        passes = stream.stats.passes
        stream.close()
        assert first == ids[:7] and stream.stats.passes == passes and list(stream) == []
        assert write(decoder, PROMPT, 40)[0] == ids


@pytest.mark.parametrize("kind", [list, np.array, mx.array])
def test_a_prompt_may_be_a_list_or_any_array_of_integers(kind):
    for encoder in (True, False):
        model = HashModel(encoder=encoder)
        for decoder in (Decoder(model), *drafting(model, model)):
            prompt = kind(PROMPT.tolist())
            assert write(decoder, prompt)[0] == write(decoder, PROMPT)[0]


# Errors


def test_errors_come_at_the_call():
    model = HashModel()
    for decoder in (Decoder(model), *drafting(model, model)):
        with pytest.raises(ValueError, match="the prompt is empty"):
            decoder.stream(mx.zeros((0,), mx.uint32))
        for value in (-1, 1.5, True, "9", None):
            with pytest.raises(ValueError, match=f"max_tokens is '?{value}"):
                decoder.stream(PROMPT, max_tokens=value)
        for value in (np.int32(3), mx.array(3)):
            assert len(write(decoder, PROMPT, value)[0]) == 3

    class Refusing(HashModel):
        def start(self, prompt):
            raise ValueError("not this prompt")

    for decoder in (Decoder(Refusing()), *drafting(Refusing(), model)):
        with pytest.raises(ValueError, match="not this prompt"):
            decoder.stream(PROMPT)


@pytest.mark.parametrize(
    "options, wrong",
    [
        ({"num_draft": -1}, "num_draft is -1"),
        ({"num_draft": True}, "num_draft is True"),
        ({"num_draft": 2.0}, "num_draft is 2.0"),
        ({"alpha": -0.1}, "alpha is -0.1"),
        ({"alpha": math.inf}, "alpha is inf"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": "1"}, "alpha is '1'"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"delta": -0.1}, "delta is -0.1"),
        ({"delta": math.nan}, "delta is nan"),
        ({"temp": -1.0}, "temp is -1.0"),
        ({"temp": math.nan}, "temp is nan"),
        ({"temp": math.inf}, "temp is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
    ],
)
def test_options_out_of_range(options, wrong):
    model = HashModel()
    with pytest.raises(ValueError, match=wrong):
        PromptLookupDecoder(model, **options)
    with pytest.raises(ValueError, match=wrong):
        SpeculativeDecoder(model, model, **options)
    if not {"num_draft", "delta", "alpha"} & set(options):
        with pytest.raises(ValueError, match=wrong):
            Decoder(model, **options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("sampling", [{}, {"temp": 1.0}, {"temp": 1.0, "top_p": 0.9, "top_k": 4}])
def test_logits_that_are_not_finite_are_an_error(value, dtype, sampling):
    text = [A, B, C, A, B, C]
    good, bad = ScriptModel(text), ScriptModel(text, poison={3: value}, dtype=dtype)
    name = str(dtype).split(".")[-1]
    for decoder in (Decoder(bad, **sampling), *drafting(bad, good, num_draft=2, **sampling)):
        stream, written = decoder.stream(PROMPT, 6), 0
        with pytest.raises(ValueError, match=f"not finite in {name}"):
            for _ in stream:
                written += 1
        assert written <= 3
    # Where no text comes of it, it does not matter: after the end, behind a rejected draft.
    for decoder in (Decoder(bad), *drafting(bad, good, num_draft=2)):
        assert write(decoder, PROMPT, 3)[0] == text[:3]
    for decoder in drafting(good, bad, num_draft=2):  # a draft model's are not text
        assert write(decoder, PROMPT, 6)[0] == text


def test_masked_logits_are_fine():
    model = ScriptModel([A, B, C, A, B, C], poison={2: -math.inf})
    for options in ({}, {"temp": 0.1, "top_k": 3}, {"temp": 0.1, "top_p": 0.9}):
        for decoder in (Decoder(model, **options), *drafting(model, model, **options)):
            assert len(write(decoder, PROMPT, 6)[0]) == 6


def test_a_cache_that_cannot_be_trimmed_is_refused_where_drafts_are_taken_back():
    class Recurrent(HashModel):
        def start(self, prompt):
            cache, token = super().start(prompt)

            class State:
                offset, state = 0, cache.state

            return State(), token

    assert len(write(Decoder(Recurrent(), None), PROMPT, 5)[0]) == 5
    for decoder in drafting(Recurrent(), HashModel(), num_draft=2):
        with pytest.raises(ValueError, match="trim"):
            decoder.stream(PROMPT)
    for decoder in drafting(Recurrent(), HashModel(), num_draft=0, eos_id=None):
        assert len(write(decoder, PROMPT, 5)[0]) == 5


# What is no argument: one line that names it, alike in all decoders


BAD_INTEGERS = [-1, 1.5, True, "9", b"9", math.nan, math.inf, 10**400, [3], {}, np.float32(3)]


def one_line(name, call):
    with pytest.raises(ValueError, match=f"^[^\n]*{name} is [^\n]*$") as error:
        call()
    assert len(str(error.value)) < 200


def makers(*, eos_id=1, **options):
    """The three decoders with options, each as a function."""
    model = HashModel()
    yield lambda: Decoder(model, eos_id, **options)
    yield lambda: PromptLookupDecoder(model, eos_id, **options)
    yield lambda: SpeculativeDecoder(model, model, eos_id, **options)


@pytest.mark.parametrize("name", ["max_tokens", "seed", "top_k"])
def test_what_is_no_integer(name):
    for value in [*BAD_INTEGERS, None]:
        for make in makers(**{} if name == "max_tokens" else {name: value}):
            one_line(name, lambda: make().stream(PROMPT, value))  # noqa: B023


@pytest.mark.parametrize("name", ["temp", "top_p"])
def test_what_is_no_number(name):
    for value in [-1, True, "1", b"1", math.nan, -math.inf, 1e300, 10**400, [1.0], None, 1 + 0j]:
        for make in makers(**{name: value}):
            one_line(name, make)


def test_what_is_no_option_of_drafting():
    wrong = {
        "num_draft": [value for value in BAD_INTEGERS if value is not None],
        "fixed_draft": ["no", None, 2, -1, 0.5, [], b""],
        "delta": [1.1, -0.1, "0", True, None, math.nan],
        "alpha": [-1, "0", True, math.inf, 10**400, [0.1]],
    }
    for name, values in wrong.items():
        for value in values:
            _, *drafters = makers(**{name: value})
            for make in drafters:
                one_line(name, make)
    for value in (-1, "1", math.nan, True, 1e300):
        one_line("draft_cost", lambda: SpeculativeDecoder(*[HashModel()] * 2, draft_cost=value))  # noqa: B023


@pytest.mark.parametrize("processors", [5, "text", [None], [print, 3], print, np.zeros(3), {}])
def test_what_is_no_list_of_processors(processors):
    for make in makers(logits_processors=processors):
        one_line("logits_processors", make)


@pytest.mark.parametrize("model", [None, "t5-base", 5, HashModel().decode, object()])
def test_what_is_no_model(model):
    for make in (Decoder, PromptLookupDecoder, lambda m: SpeculativeDecoder(m, HashModel())):
        one_line("model", lambda: make(model))  # noqa: B023
    one_line("draft_model", lambda: SpeculativeDecoder(HashModel(), model))


@pytest.mark.parametrize("ids", [b"ab", bytearray(b"ab"), {5: 1}, {5, 6}, [np.float32(5)], [b"5"]])
def test_what_is_no_text(ids):
    for make in makers():
        one_line("the prompt", lambda: make().stream(ids))  # noqa: B023
    for number in (0, 4):
        decoder = PromptLookupDecoder(HashModel(), num_draft=number)
        one_line("the reference", lambda: decoder.stream(PROMPT, reference=ids))  # noqa: B023
    one_line("the context", lambda: prompt_lookup.find_draft(ids, 2, 1, 4))


def test_ids_beyond_32_bits_do_not_wrap():
    for wrap in (2**32, -(2**32), 2**64):
        for kind in (list, np.array, tuple):
            ids = kind([wrap + i for i in (5, 6, 7)])
            for make in makers():
                one_line("the prompt", lambda: make().stream(ids))  # noqa: B023
            lookup = PromptLookupDecoder(HashModel())
            one_line("the reference", lambda: lookup.stream(PROMPT, reference=ids))  # noqa: B023
            one_line("the context", lambda: prompt_lookup.find_draft(ids, 2, 1, 4))  # noqa: B023


@pytest.mark.parametrize("eos", [16, 99999, 2**31, 10**400, [1, 16], math.inf, b"\1", {1: 1}, "1"])
def test_an_eos_id_that_the_model_does_not_have(eos):
    model = ScriptModel([A])
    for make in (Decoder, PromptLookupDecoder, lambda m, e: SpeculativeDecoder(m, m, e)):
        one_line("eos_id", lambda: make(model, eos))  # noqa: B023
        assert make(model, 15).eos_ids == {15}


def test_numbers_of_numpy_and_mlx_are_numbers():
    expected = write(Decoder(HashModel(), temp=0.5, top_k=3, top_p=0.9, seed=7), PROMPT, 9)[0]
    for whole, real in ((np.int64, np.float64), (np.uint8, np.float32), (mx.array, mx.array)):
        sampling = {"temp": real(0.5), "top_k": whole(3), "top_p": 0.9, "seed": whole(7)}
        for make in makers(eos_id=whole(1), **sampling):
            assert write(make(), PROMPT, whole(9))[0] == expected


def test_the_largest_number_of_draft_tokens_costs_nothing():
    """The list that the policy chooses from has 64 at most; a fixed draft has up to 1024."""
    model = HashModel(vocab=64, habit=0, whim=0)
    model.habits = mx.eye(64)[mx.array([2, 2, *range(3, 64), 2])]  # 2 … 63, for ever
    prompt = mx.array(list(range(2, 64)) * 40, mx.uint32)
    for fixed, most in ((False, 64), (True, 1024)):
        for decoder in drafting(model, model, num_draft=2**31 - 1, fixed_draft=fixed, eos_id=None):
            model.fed.clear()
            write(decoder, prompt, 1500)
            assert max(fed.size for fed in model.fed) <= most + 1


# Draft lengths


def test_a_ceiling_of_0_is_plain_decoding():
    model = HashModel()
    plain, _, expected = write(Decoder(model), PROMPT, 30)
    for decoder in drafting(model, HashModel(seed=1), num_draft=0):
        model.fed.clear()
        ids, drafted, stats = write(decoder, PROMPT, 30)
        assert ids == plain and not any(drafted) and stats.drafted == 0
        assert stats.passes == expected.passes and all(fed.size == 1 for fed in model.fed)
        assert stats.acceptance_rate == 0.0
        assert decoder.model is model and getattr(decoder, "draft_model", model).fed is not None


@pytest.mark.parametrize("ceiling", [1, 3, 30, None])
def test_fixed_draft_drafts_as_many_as_it_may(ceiling):
    model, same = HashModel(), HashModel()
    decoder = SpeculativeDecoder(model, same, None, num_draft=ceiling, fixed_draft=True)
    write(decoder, PROMPT, 100)
    k = 10 if ceiling is None else ceiling
    assert [fed.size for fed in model.fed[:3]] == [k + 1] * 3


@pytest.mark.parametrize("ceiling", [3, 30])
def test_fixed_draft_of_prompt_lookup(ceiling):
    model = HashModel(vocab=64, habit=0, whim=0)
    model.habits = mx.eye(64)[mx.array([2, 2, *range(3, 64), 2])]  # 2 … 63, for ever
    decoder = PromptLookupDecoder(model, None, num_draft=ceiling, fixed_draft=True)
    _, _, stats = write(decoder, mx.array(list(range(2, 64)) * 2, mx.uint32), 100)
    assert max(fed.size for fed in model.fed) == ceiling + 1
    assert stats.accepted == stats.drafted


@pytest.mark.parametrize("ceiling", [1, 3, 10])
def test_no_draft_is_longer_than_the_ceiling(ceiling):
    model, draft_model = HashModel(), HashModel()
    for decoder in drafting(model, draft_model, num_draft=ceiling):
        model.fed.clear()
        for prompt in prompts(5):
            write(decoder, prompt, 40)
        assert max(fed.size for fed in model.fed) <= ceiling + 1


# The demo


@pytest.fixture(scope="module")
def demo():
    from model import load

    root = __file__.rpartition("/tests/")[0] + "/demo/"
    model, tokenizer = load(root + "t5-demo")
    with open(root + "edits.jsonl") as file:
        edits = [json.loads(line)["prompt"] for line in file]
    texts = [mx.array(tokenizer(edit).input_ids, mx.uint32) for edit in edits[:: len(edits) // 10]]
    return model, load(root + "t5-demo-draft")[0], texts


@pytest.mark.parametrize("ceiling, temp", [(4, 0.0), (24, 0.0), (10, 0.7)])
def test_demo_writes_the_same_with_and_without_drafts(demo, ceiling, temp):
    model, draft_model, texts = demo
    tokens = passes = 0
    for seed, prompt in enumerate(texts[:4]):
        sampling = {"temp": temp, "seed": seed}
        plain, *_ = write(Decoder(model, **sampling), prompt, 40)
        for decoder in drafting(model, draft_model, num_draft=ceiling, **sampling):
            ids, _, stats = write(decoder, prompt, 40)
            assert ids == plain
            tokens, passes = tokens + stats.tokens, passes + stats.passes
    assert tokens > 1.2 * passes


def test_demo_writes_the_same_beyond_the_first_chunk_of_its_cache(demo):
    model, draft_model, texts = demo
    plain, *_ = write(Decoder(model, None), texts[1], 290)
    for decoder in drafting(model, draft_model, eos_id=None, num_draft=10):
        assert write(decoder, texts[1], 290)[0] == plain


def test_demo_as_its_own_draft_model_is_always_right(demo):
    model, _, texts = demo
    decoder = SpeculativeDecoder(model, model, None, num_draft=4, fixed_draft=True)
    _, _, stats = write(decoder, texts[0], 100)
    assert stats.acceptance_rate == 1.0

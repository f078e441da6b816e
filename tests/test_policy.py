"""Draft lengths: the best for given chances and costs, and never much slower than plain decoding.

Costs are counted, in plain passes of the target: no clock decides anything.
"""

import random
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from toys import HashModel, ScriptModel, drafting, prompts, write

import decoder as decoding
from decoder import Decoder, DraftLength, SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder

SIZE = 160
TEXT = random.Random(1).choices(range(3, 16), k=SIZE)
WRONG = [t - 1 if t > 3 else 15 for t in TEXT]
PROMPT = mx.array([5, 6, 7], mx.uint32)


# The best length


def tokens_per_cost(chance, cost, k):
    """Of k draft tokens, by enumerating what may happen."""
    expected = 0.0
    for right in range(k + 1):  # the first `right` draft tokens are right, the next is not
        p = 1.0 if right == k else 1 - chance(right)
        for i in range(right):
            p *= chance(i)
        expected += p * (right + 1)
    return expected / cost(k)


def test_the_length_is_the_best_of_all_lengths():
    rng, chosen = random.Random(0), set()
    for _ in range(300):
        ceiling, limit = rng.randint(1, 30), rng.randint(0, 30)
        alpha, draft_cost = rng.choice([0, 0.02, 0.1, 0.5, 3]), rng.choice([0, 0, 0.05, 0.3])
        policy = DraftLength(ceiling, alpha, draft_cost)
        policy.longest = 99
        table = {g: [rng.uniform(0.02, 0.98) for _ in range(4)] for g in range(7)}
        for group, chances in table.items():
            for doubt, chance in zip([0, 1, 5, None], chances, strict=True):
                policy.trials[group, doubt] = [7 * chance, 7.0]
        length, doubt, unread = (
            rng.choice([0, 1, 2, 5, 9, 40]),
            rng.randrange(2),
            rng.choice([0, 9]),
        )

        def chance(i, length=length, doubt=doubt, table=table):
            return table[min((length + i).bit_length(), 6)][3 if i else doubt]

        def cost(k, alpha=alpha, draft_cost=draft_cost, unread=unread, limit=limit):
            reading = draft_cost * alpha * unread / min(limit, 32) if k else 0
            return 1 + k * (alpha + draft_cost) + reading

        k = policy.choose(length, doubt, limit, unread)
        speeds = [tokens_per_cost(chance, cost, k) for k in range(min(limit, ceiling) + 1)]
        assert speeds[k] == pytest.approx(max(speeds))
        chosen.add(k)
    assert len(chosen) > 8


def after(results, alpha=0.15, length=4, doubt=0):
    """The length after passes in which so many of 24 tokens were right."""
    policy = DraftLength(24, alpha)
    for right in results:
        policy.update(length, doubt, 24, right, right < 24)
    return policy.choose(length, doubt, 24)


def test_more_is_drafted_the_more_was_right_and_the_less_it_costs():
    by_chance = [after([n] * 20) for n in (0, 1, 2, 4, 12, 24)]
    assert by_chance == sorted(by_chance) and by_chance[0] == 0 and by_chance[-1] == 24
    by_cost = [after([4] * 20, alpha) for alpha in (0.01, 0.05, 0.2, 0.5, 3)]
    assert by_cost == sorted(by_cost, reverse=True) and by_cost[-1] == 0 and by_cost[0] >= 4


def test_old_trials_fade():
    good, bad = [12] * 100, [0] * 100
    assert after(good + bad) == 0 < 5 <= after(bad + good)
    assert after(bad + good) == after(good + bad + good)


def test_doubts_and_lengths_are_told_apart():
    policy = DraftLength(24, 0.15)
    for _ in range(30):
        policy.update(2, 0, 4, 1, True)
        policy.update(2, 5, 4, 0, True)
        policy.update(16, 0, 4, 4, False)
    assert policy.choose(2, 5, 24) == 0 < policy.choose(2, 0, 24) < policy.choose(16, 0, 24)


def test_what_was_not_drafted_teaches_as_well():
    """Prompt lookup knows what it would have drafted."""
    policy = DraftLength(24, 0.15)
    for _ in range(60):
        policy.update(1, 0, 0, 0, True)
    assert policy.choose(1, 0, 24) == 0
    for _ in range(60):
        policy.update(1, 0, 0, 10, True)
    assert policy.choose(1, 0, 24) >= 4


def test_drafts_of_a_model_begin_short_and_grow():
    policy, lengths = DraftLength(24, 0.01, 0.01), []
    for right in (1, 4, 13, 24, 24, 0, 0, 0, 0, 0, 0):
        lengths.append(policy.choose(40, 0, 99))
        policy.trials = {}  # nothing that was counted makes them shorter
        policy.update(40, 0, lengths[-1], right, right < 24)
        policy.trials = {}
    assert lengths == [1, 4, 13, 24, 24, 24, 24, 19, 10, 4, 1]


# What alpha and the cost of a draft token are


def weighing(size, **more):
    model = ScriptModel(TEXT)
    model.parameters = lambda: {"layers": [{"w": mx.zeros((size,))}, {"b": mx.zeros((2,))}]}
    vars(model).update(more)
    return model


def test_alpha_is_the_callers_or_the_models_or_5_percent():
    plain, telling = ScriptModel(TEXT), weighing(8, alpha=0.3)
    for alpha, of_plain, of_telling in ((None, 0.05, 0.3), (0.0, 0.0, 0.0), (2, 2, 2)):
        for decoder in drafting(plain, plain, alpha=alpha):
            assert decoder.policy.alpha == of_plain
        for decoder in drafting(telling, plain, alpha=alpha):
            assert decoder.policy.alpha == of_telling
    with pytest.raises(ValueError, match="alpha is nan"):
        PromptLookupDecoder(weighing(8, alpha=float("nan")))


def test_a_draft_token_costs_what_the_weights_say_or_the_caller():
    big, small, unknown = weighing(98), weighing(8), ScriptModel(TEXT)
    for models, cost in (((big, small), 0.1), ((big, unknown), 0.2), ((unknown, small), 0.2)):
        assert SpeculativeDecoder(*models).policy.draft_cost == pytest.approx(cost)
        assert SpeculativeDecoder(*models, draft_cost=0.4).policy.draft_cost == 0.4
    for value in (-1, float("inf"), "1", True):
        with pytest.raises(ValueError, match="draft_cost"):
            SpeculativeDecoder(big, small, draft_cost=value)


def drafted(model, **options):
    prompt = list(range(3, 60))
    text = ScriptModel(prompt, vocab=64)
    vars(text).update(model)
    decoder = PromptLookupDecoder(text, None, **options)
    return write(decoder, mx.array(prompt, mx.uint32), 57)[2].drafted


def test_the_dearer_a_draft_token_the_fewer_are_drafted():
    assert drafted({}) == drafted({}, alpha=0.05) == drafted({"alpha": 3.0}, alpha=0.05) > 40
    assert drafted({"alpha": 3.0}) == drafted({}, alpha=3.0) == 0


# Costs, counted


def counted(model, alpha, unit=1.0):
    """The same model, adding up what its passes cost; encoding a prompt is one, too."""
    start, decode = model.start, model.decode
    model.spent = 0.0

    def counted_start(prompt):
        model.spent += unit * (1 + alpha * prompt.size)
        return start(prompt)

    def counted_decode(tokens, cache):
        model.spent += unit * (1 + alpha * (tokens.size - 1))
        return decode(tokens, cache)

    model.start, model.decode = counted_start, counted_decode
    return model


def speed(draft, alpha, draft_cost, size=SIZE, texts=6, prompt=PROMPT, **options):
    """Of some texts of one decoder, plain decoding being 1. The target's encoding is not counted:
    it would hide what the draft model's costs."""
    target = counted(ScriptModel(TEXT), alpha)
    draft_model = counted(ScriptModel(draft), alpha, draft_cost)
    decoder = SpeculativeDecoder(
        target, draft_model, None, alpha=alpha, draft_cost=draft_cost, **options
    )
    for _ in range(texts):
        assert write(decoder, prompt, size)[0] == TEXT[:size]
    encoding = texts * (1 + alpha * prompt.size)
    return texts * size / (target.spent + draft_model.spent - encoding)


@pytest.mark.parametrize("size, texts", [(20, 1), (20, 20), (SIZE, 6)])
def test_a_draft_model_that_is_always_wrong_loses_little(size, texts):
    for alpha in (0.0, 0.05, 0.2):
        for draft_cost in (0.02, 0.2, 0.3):
            assert speed(WRONG, alpha, draft_cost, size, texts) >= 0.95, (alpha, draft_cost)


def test_a_wrong_draft_model_loses_little_with_a_long_prompt():
    prompt = mx.array([5] * 200, mx.uint32)
    for alpha, draft_cost in ((0.0, 0.3), (0.05, 0.05), (0.05, 0.3), (0.2, 0.05)):
        assert speed(WRONG, alpha, draft_cost, 20, 20, prompt) >= 0.95, (alpha, draft_cost)


def test_a_draft_model_as_large_as_the_target_is_never_asked():
    for alpha in (0.0, 0.2):
        assert speed(TEXT, alpha, 1.0) == speed(WRONG, alpha, 1.0) == pytest.approx(1)
    assert speed(TEXT, 0.05, 0.9) >= 0.95


def test_a_draft_model_that_is_right_and_small_drafts_near_the_ceiling():
    best = speed(TEXT, 0.02, 0.02, num_draft=24, fixed_draft=True)
    assert speed(TEXT, 0.02, 0.02) > 0.95 * best > 8


def test_a_draft_model_that_is_often_right_drafts_about_as_many_as_the_best_fixed_length():
    rng = random.Random(3)
    draft = [t if rng.random() < 0.8 else w for t, w in zip(TEXT, WRONG, strict=True)]
    best = max(speed(draft, 0.05, 0.1, num_draft=k, fixed_draft=True) for k in (1, 2, 3, 4, 6, 9))
    assert speed(draft, 0.05, 0.1) > 0.92 * best > 1.5


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.2])
def test_a_draft_model_that_turns_right_is_found_again(alpha):
    draft_model = ScriptModel(WRONG)
    decoder = SpeculativeDecoder(ScriptModel(TEXT), draft_model, None, alpha=alpha, draft_cost=0.1)
    for _ in range(3):
        stats = write(decoder, PROMPT, SIZE)[2]
    assert stats.passes == SIZE and stats.drafted < 0.2 * SIZE
    draft_model.rows = ScriptModel(TEXT).rows
    for _ in range(4):
        stats = write(decoder, PROMPT, SIZE)[2]
    assert stats.passes < SIZE / 4
    draft_model.rows = ScriptModel(WRONG).rows  # and once wrong again, it is soon let alone
    for _ in range(2):
        stats = write(decoder, PROMPT, SIZE)[2]
    assert stats.drafted < 0.2 * SIZE


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 1.5])
def test_prompt_lookup_with_nothing_to_copy_loses_little(alpha):
    model = counted(ScriptModel(TEXT), alpha)
    decoder = PromptLookupDecoder(model, None, alpha=alpha)
    prompt = mx.array(random.Random(2).choices(range(3, 16), k=200), mx.uint32)
    for _ in range(6):
        assert write(decoder, prompt, SIZE)[0] == TEXT
    assert 6 * SIZE / (model.spent - 6 * (1 + alpha * 200)) >= 0.97


@pytest.mark.parametrize("alpha, loss", [(0.05, 0.06), (0.3, 0.2)])
def test_copies_are_written_about_as_fast_as_by_the_best_fixed_length(alpha, loss):
    prompt = list(range(3, 250))
    text = prompt[:60] + [251] + prompt[61:130] + [252] + prompt[130:180]

    def spent(**options):
        model = counted(ScriptModel(text, vocab=256), alpha)
        decoder = PromptLookupDecoder(model, None, alpha=alpha, **options)
        for _ in range(4):
            model.spent = 0.0
            assert write(decoder, mx.array(prompt, mx.uint32), len(text))[0] == text
        return model.spent - (1 + alpha * len(prompt))

    best = min(spent(num_draft=k, fixed_draft=True) for k in (2, 4, 8, 16, 24))
    assert spent() < (1 + loss) * best


# The same in every run


def runs():
    """What every pass of some texts wrote, drafted and accepted."""
    model, draft_model = HashModel(), HashModel(seed=1)
    for delta in (0.0, 0.9):
        for decoder in drafting(model, draft_model, eos_id=None, delta=delta):
            for prompt in prompts(6):
                ids, _, stats = write(decoder, prompt, 60)
                yield ids, stats.passes, stats.drafted, stats.accepted


def test_two_runs_and_two_processes_draft_the_same():
    here = str(list(runs()))
    assert here == str(list(runs()))
    script = "import conftest, test_policy; print(list(test_policy.runs()))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [here], done.stderr


def test_no_clock_decides(monkeypatch):
    expected = list(runs())
    rng = random.Random(0)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: rng.lognormvariate(0, 9))
    assert list(runs()) == expected


def test_what_was_learnt_goes_on_from_stream_to_stream():
    model = ScriptModel(TEXT)
    for decoder in (
        PromptLookupDecoder(model, None, alpha=0.3),
        SpeculativeDecoder(model, model, None, draft_cost=0.1),
    ):
        table = decoder.policy.trials
        passes = [write(decoder, PROMPT, 40)[2].passes for _ in range(3)]
        assert decoder.policy.trials is table != {} and passes[-1] <= passes[0]


def test_lenient_text_does_not_depend_on_texts_before():
    model, draft_model = HashModel(), HashModel(seed=1)
    alone = [
        [write(decoder, prompt, 60)[:2] for prompt in prompts(1)]
        for decoder in drafting(model, draft_model, eos_id=None, delta=0.9)
    ]
    for decoder, expected in zip(
        drafting(model, draft_model, eos_id=None, delta=0.9), alone, strict=True
    ):
        for prompt in prompts(4, seed=5):
            write(decoder, prompt, 60)
        assert [write(decoder, prompt, 60)[:2] for prompt in prompts(1)] == expected
        assert expected[0][0] != write(Decoder(model, None), *prompts(1), 60)[0]

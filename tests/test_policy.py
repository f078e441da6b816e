"""Draft lengths: the best for given chances and costs, costs learnt, and never much slower.

No test reads a clock: costs are injected, or a clock that the models move as passes would.
"""

import math
import random
from types import SimpleNamespace

import mlx.core as mx
import pytest
from toys import HashModel, ScriptModel, drafting, prompts, write

import decoder as decoding
from decoder import EARLY, Decoder, DraftLength, SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder


def line(alpha):
    return lambda k: 1 + alpha * k


def stairs(k):
    return 1.0 if k <= 2 else 1.2 if k <= 14 else 2.0


def jump(k):
    return 1.5 + 0.02 * k if k else 1.0


# The best length


def exhaustive(chance, costs, limit, longest=400):
    """What every first length costs if all that follows is written at the least cost."""

    def cost_of(i, k, rest):
        reach = math.prod(chance(j) for j in range(i, i + k + 1))
        return costs[k] + reach * rest[min(i + k + 1, longest - 1)]

    rest = [0.0] * longest
    for _ in range(60):
        before = rest
        rest = [min(cost_of(i, k, before) for k in range(len(costs))) for i in range(longest)]
        if max(abs(a - b) for a, b in zip(rest, before, strict=True)) < 1e-12:
            break
    return [cost_of(0, k, rest) for k in range(limit + 1)]


@pytest.mark.parametrize("seed", range(60))
def test_the_length_is_the_best_of_all_lengths(seed):
    rng = random.Random(seed)
    chances = [rng.uniform(0.02, 0.9) for _ in range(7)]
    if seed % 2:
        chances.sort()
    alpha = rng.choice([0.02, 0.15, 0.3, 0.8])
    cost = rng.choice([line(alpha), stairs, jump])
    ceiling, length, doubt = rng.randint(1, 6), rng.choice([0, 1, 2, 5, 9, 40]), rng.randrange(6)
    limit = rng.randint(1, ceiling)
    policy = DraftLength(ceiling, cost, chances)

    def chance(i):
        first = (1.0, 0.7, 0.4)[doubt % 3] if i == 0 else 1
        return chances[min((length + min(i, 8)).bit_length(), 6)] * first

    costs = [cost(k) for k in range(ceiling + 1)]
    expected = exhaustive(chance, costs, limit, longest=60)
    k = policy.choose(length, doubt, limit)
    assert 0 <= k <= limit
    assert expected[k] == pytest.approx(min(expected), rel=1e-6)


@pytest.mark.parametrize("cost", [None, line(0), line(0.2), line(4)])
def test_never_longer_than_the_limit_or_the_ceiling(cost):
    rng = random.Random(0)
    for ceiling in (1, 5, 24, 100):
        policy = DraftLength(ceiling, cost)
        for _ in range(400):
            length, doubt, limit = (
                rng.choice([0, 1, 3, 16, 500]),
                rng.randrange(6),
                rng.randrange(40),
            )
            k = policy.choose(length, doubt, limit)
            assert isinstance(k, int) and 0 <= k <= min(limit, ceiling)
            policy.timed(k, rng.lognormvariate(-5, 3), rng.random() < 0.9)
            policy.update(length, doubt, k, rng.randrange(60), rng.random() < 0.5)
        assert policy.choose(5, 0, 0) == policy.choose(5, 0, -1) == 0


def after(results, cost, length=4, doubt=0):
    """The length after drafts of which so many tokens were right."""
    policy = DraftLength(24, cost)
    for right in results:
        policy.update(length, doubt, 24, right, right < 24)
    return policy.choose(length, doubt, 24)


def test_more_is_drafted_the_more_was_right_and_the_less_it_costs():
    by_chance = [after([n] * 20, line(0.15)) for n in (0, 1, 2, 4, 12, 24)]
    assert by_chance == sorted(by_chance) and by_chance[0] == 0 and by_chance[-1] >= 20
    by_cost = [after([4] * 20, line(alpha)) for alpha in (0.01, 0.05, 0.2, 0.5, 3)]
    assert by_cost == sorted(by_cost, reverse=True) and by_cost[-1] == 0 and by_cost[0] >= 4


def test_only_costs_relative_to_a_plain_pass_count():
    for n in range(8):
        assert after([n] * 9, line(0.2)) == after([n] * 9, lambda k: 0.007 * (1 + 0.2 * k))


def test_old_trials_fade():
    good, bad = [12] * 60, [0] * 60
    assert after(good + bad, line(0.15)) < 2 < 5 <= after(bad + good + good, line(0.15))


def test_doubts_are_told_apart():
    policy = DraftLength(24, line(0.15))
    for _ in range(30):
        policy.update(2, 0, 4, 4, True)
        policy.update(2, 5, 4, 0, True)
    assert policy.choose(2, 5, 24) == 0 < 3 <= policy.choose(2, 0, 24)


def test_what_was_not_drafted_teaches_as_well():
    """Prompt lookup knows what it would have drafted."""
    policy = DraftLength(24, line(0.15))
    for _ in range(60):
        policy.update(1, 0, 0, 0, True)
    assert policy.choose(1, 0, 24) == 0
    for _ in range(60):
        policy.update(1, 0, 0, 10, True)
    assert policy.choose(1, 0, 24) >= 4


# Costs


def learnt(cost, widths, seed, answers=1):
    rng = random.Random(seed)
    policy = DraftLength(24)
    for k in [0, *widths] * answers:
        seconds = 0.02 * cost(k) * rng.lognormvariate(0, 0.05)
        policy.timed(k, seconds * 10 if rng.random() < 0.02 else seconds)
    return policy.costs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "cost",
    [line(0), line(0.05), line(0.3), line(1.5), stairs, jump],
    ids="0 .05 .3 1.5 s j".split(),
)
def test_costs_are_learnt_in_a_few_passes(cost, seed):
    widths = [1, 2, 4, 8, 16, 24]
    costs = learnt(cost, widths, seed, answers=5)
    for k in widths:
        assert costs[k] / costs[0] == pytest.approx(cost(k), rel=0.15)
    if cost is not stairs:
        costs = learnt(cost, [4, 16], seed, answers=4)
        for k in range(25):
            assert costs[k] / costs[0] == pytest.approx(cost(k), rel=0.3)


def test_a_disturbed_pass_is_no_measure():
    for when in range(12):
        policy = DraftLength(24)
        for i, k in enumerate([0, 4, 0, 4, 12, 0, 12, 4, 12, 0, 4, 12]):
            policy.timed(k, line(0.2)(k) * (10 if i == when else 1))
        assert policy.costs[4] / policy.costs[0] == pytest.approx(1.8, rel=0.25)


def test_a_pass_with_something_that_comes_once_is_no_measure():
    policy = DraftLength(24)
    for k in (0, 1, 2, 3, 8) * 3:
        policy.timed(k, line(0.2)(k))
    before = list(policy.costs)
    for k in (0, 1, 3, 24):
        policy.timed(k, 99.0, steady=False)
    assert policy.costs == before


def test_costs_that_are_given_are_not_learnt():
    policy = DraftLength(24, line(0.2))
    for k in (0, 3, 24):
        policy.timed(k, 7.0)
    assert policy.costs == pytest.approx([1 + 0.2 * k for k in range(25)])


def trial(policy):
    """A policy that does not draft is made to try."""
    for _ in range(60):
        policy.update(0, 0, 1, 0, True)
    policy.idle = 1000
    assert policy.choose(0, 0, 24) == 1 and policy.trying


def test_after_a_trial_as_many_passes_without_as_make_its_loss_one_percent():
    policy = DraftLength(24, lambda k: 1 + 0.5 * k)
    trial(policy)
    policy.update(0, 0, 1, 0, True)
    assert policy.patience == 50
    policy = DraftLength(24)
    for k, seconds in [(0, 1.0), (0, 1.0), *[(1, 1.5)] * 3]:
        policy.timed(k, seconds)
    trial(policy)
    for _ in range(3):
        policy.timed(1, 4.0)
    policy.update(0, 0, 1, 0, True)
    assert policy.patience > 150


def test_a_trial_goes_on_while_it_pays_or_has_not_been_measured():
    policy = DraftLength(24)
    for k, seconds in [(0, 1.0), (0, 1.0), *[(1, 9.0)] * 5]:
        policy.timed(k, seconds)
    trial(policy)
    policy.timed(1, 30.0, steady=False)  # catching up
    policy.update(0, 0, 1, 1, False)
    for _ in range(3):
        assert policy.choose(0, 0, 24) == 1 and policy.trying
        policy.timed(1, 1.2)
        policy.update(0, 0, 1, 1, False)
    assert policy.costs[1] < 2
    trial(policy)
    policy.timed(1, 30.0, steady=False)
    policy.update(0, 0, 1, 0, True)
    assert policy.patience == 512 and policy.choose(0, 0, 24) == 0


def test_drafts_grow_at_most_fourfold_at_once():
    policy, widths = DraftLength(24), []
    policy.timed(0, 1.0)
    policy.timed(0, 1.0)
    for _ in range(60):
        policy.update(16, 0, 24, 24, False)
    for _ in range(3):
        widths.append(policy.choose(16, 0, 24))
        policy.timed(widths[-1], 1 + 0.02 * widths[-1])
    assert widths == [4, 16, 24]


# In the loop, by a clock that the models move


class Clock:
    """A device that computes one pass after the other, while the host goes on until it reads.

    A pass over w tokens takes unit * cost(w - 1), with noise if there is a seed, and the host takes
    `host` units to start it.
    """

    def __init__(self, monkeypatch, seed=None, host=0.0):
        self.now, self.host, self.free, self.done = 0.0, host, 0.0, []
        self.rng = random.Random(seed) if seed is not None else None
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(decoding, "time", clock)

        def read(*arrays, original=decoding.read):
            if self.done:
                self.now = max(self.now, self.done.pop(0))
            return original(*arrays)

        monkeypatch.setattr(decoding, "read", read)

    def pass_of(self, seconds):
        if self.rng:
            seconds *= self.rng.lognormvariate(0, 0.05) * (10 if self.rng.random() < 0.01 else 1)
        self.now += self.host
        self.free = max(self.now, self.free) + seconds
        return self.free


def timed(model, clock, cost, unit=1.0, encoding=1.0, target=True):
    """The same model, moving the clock; spent: by undisturbed passes."""
    start, decode = model.start, model.decode
    model.spent = 0.0

    def timed_start(prompt):
        clock.done.clear()
        model.spent += encoding * unit
        clock.pass_of(encoding * unit)
        return start(prompt)

    def timed_decode(tokens, cache):
        model.spent += unit * cost(tokens.size - 1)
        done = clock.pass_of(unit * cost(tokens.size - 1))
        if target:
            clock.done.append(done)
        return decode(tokens, cache)

    model.start, model.decode = timed_start, timed_decode
    return model


SIZE, TEXTS = 160, 6
TEXT = random.Random(1).choices(range(3, 16), k=SIZE)
WRONG = [t - 1 if t > 3 else 15 for t in TEXT]
PROMPT = mx.array([5, 6, 7], mx.uint32)


def drafted_by(draft, cost, slow, clock, texts=TEXTS, **options):
    """Speed against plain decoding, and the statistics of each text."""
    target = timed(ScriptModel(TEXT), clock, cost, encoding=0)
    draft_model = timed(ScriptModel(draft), clock, cost, slow, target=False)
    decoder = SpeculativeDecoder(target, draft_model, None, **options)
    runs = []
    for _ in range(texts):
        ids, _, stats = write(decoder, PROMPT, SIZE)
        assert ids == TEXT
        runs.append(stats)
    return texts * SIZE / (target.spent + draft_model.spent), runs


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("slow", [0.1, 0.3])
@pytest.mark.parametrize("cost", [line(0), line(0.15), line(1), jump], ids="0 .15 1 jump".split())
def test_a_draft_model_that_is_always_wrong_is_hardly_asked(monkeypatch, cost, slow, seed):
    speed, runs = drafted_by(WRONG, cost, slow, Clock(monkeypatch, seed))
    assert speed >= 0.97
    assert sum(r.drafted for r in runs) < 0.1 * TEXTS * SIZE


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("cost", [line(0), line(0.15), line(1), jump], ids="0 .15 1 jump".split())
def test_a_draft_model_as_slow_as_the_target_is_hardly_asked(monkeypatch, cost, seed):
    speed, _ = drafted_by(TEXT, cost, 1.0, Clock(monkeypatch, seed))
    assert speed >= 0.95


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_draft_model_that_is_right_and_quick_drafts_near_the_ceiling(monkeypatch, seed):
    clock = Clock(monkeypatch, seed)
    speed, runs = drafted_by(TEXT, line(0.02), 0.02, clock)
    best, _ = drafted_by(TEXT, line(0.02), 0.02, clock, num_draft=24, fixed_draft=True)
    assert speed > 0.9 * best
    assert all(SIZE / r.passes > 15 for r in runs[1:])


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_a_draft_model_that_turns_right_is_found_again(monkeypatch, seed):
    clock = Clock(monkeypatch, seed)
    target = timed(ScriptModel(TEXT), clock, line(0.15), encoding=0)
    draft_model = timed(ScriptModel(WRONG), clock, line(0.15), 0.05, target=False)
    decoder = SpeculativeDecoder(target, draft_model, None)
    for _ in range(3):
        passes = write(decoder, PROMPT, SIZE)[2].passes
    assert passes == SIZE
    draft_model.rows = ScriptModel(TEXT).rows
    for _ in range(6):
        passes = write(decoder, PROMPT, SIZE)[2].passes
    assert passes < SIZE / 4


@pytest.mark.parametrize("first, last, times", [(3, 6, 8), (3, 20, 3), (30, 45, 6)])
@pytest.mark.parametrize("cost", [line(0.1), line(0.2), line(0.3), jump], ids=".1 .2 .3 j".split())
def test_a_disturbance_is_got_over(monkeypatch, cost, first, last, times):
    """Drafts that seem dear while something else has the machine are found to be cheap again."""
    clock, passes = Clock(monkeypatch, host=0.01), 0

    def disturbed(k):
        return cost(k) * (times if first <= passes < last and k else 1)

    text = random.Random(1).choices(range(3, 16), k=800)
    target = timed(ScriptModel(text), clock, disturbed, encoding=0)
    draft_model = timed(ScriptModel(text), clock, line(0), 0.02, target=False)
    decoder = SpeculativeDecoder(target, draft_model, None)
    for _ in range(3):
        began = clock.free
        for _ in decoder.stream(PROMPT, 800):
            passes = target.calls
    taken, began = clock.free - began, clock.free
    fixed = SpeculativeDecoder(target, draft_model, None, num_draft=24, fixed_draft=True)
    write(fixed, PROMPT, 800)
    assert taken < 1.15 * (clock.free - began)


def test_nothing_is_drafted_by_a_model_before_a_plain_pass_was_timed(monkeypatch):
    _, runs = drafted_by(TEXT, line(0.1), 0.1, Clock(monkeypatch), texts=1)
    clock = Clock(monkeypatch)
    target = timed(ScriptModel(TEXT), clock, line(0.1))
    stream = SpeculativeDecoder(target, ScriptModel(TEXT), None).stream(PROMPT, SIZE)
    tokens = list(stream)
    assert [t.drafted for t in tokens[:3]] == [False, False, True]


@pytest.mark.parametrize(
    "cost", [line(0.05), line(0.3), line(1.5), jump], ids=".05 .3 1.5 j".split()
)
@pytest.mark.parametrize("seed", [None, 0])
def test_prompt_lookup_with_nothing_to_copy_loses_nothing(monkeypatch, cost, seed):
    model = timed(ScriptModel(TEXT), Clock(monkeypatch, seed), cost, encoding=0)
    decoder = PromptLookupDecoder(model, None)
    prompt = mx.array(random.Random(2).choices(range(3, 16), k=200), mx.uint32)
    for _ in range(TEXTS):
        assert write(decoder, prompt, SIZE)[0] == TEXT
    assert TEXTS * SIZE / model.spent >= 0.97


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("alpha", [0.05, 0.15, 0.3])
def test_copies_are_soon_written_as_fast_as_by_the_best_fixed_length(monkeypatch, alpha, seed):
    prompt = list(range(3, 250))
    text = prompt[:60] + [251] + prompt[61:130] + [252] + prompt[130:180]
    clock = Clock(monkeypatch, seed)

    def speed(**options):
        model = timed(ScriptModel(text, vocab=256), clock, line(alpha), encoding=0)
        decoder = PromptLookupDecoder(model, None, **options)
        for i in range(12):
            model.spent = model.spent if i > 8 else 0.0
            assert write(decoder, mx.array(prompt, mx.uint32), len(text))[0] == text
        return 1 / model.spent

    fixed = max(speed(num_draft=k, fixed_draft=True) for k in (2, 4, 8, 16, 24))
    assert speed() > 0.94 * fixed


# The next plain pass begins before the last one is read


@pytest.mark.parametrize("host", [0.3, 0.8])
@pytest.mark.parametrize("kind", ["lookup", "wrong draft model"])
def test_where_starting_a_pass_takes_time_nothing_is_lost_either(monkeypatch, kind, host):
    """Plain decoding starts a pass while the device computes the last one: 1 unit a token."""
    clock = Clock(monkeypatch, host=host)
    target = timed(ScriptModel(TEXT), clock, line(0.15), encoding=0)
    if kind == "lookup":
        decoder = PromptLookupDecoder(target, None)
    else:
        draft_model = timed(ScriptModel(WRONG), clock, line(0.15), 0.2, target=False)
        decoder = SpeculativeDecoder(target, draft_model, None)
    began = clock.now
    for _ in range(TEXTS):
        ids, _, stats = write(decoder, PROMPT, SIZE)
        assert ids == TEXT and stats.passes <= SIZE
    taken = clock.now - began
    clock.now = clock.free
    began = clock.now
    for _ in range(TEXTS):
        write(Decoder(target, None), PROMPT, SIZE)
    assert taken * 0.95 <= clock.now - began


def test_it_begins_early_after_some_passes_without_a_right_draft(monkeypatch):
    """As the order of starting (S) and reading (R) passes tells; a draft comes one pass late."""
    steps, read = [], decoding.read
    start = ScriptModel.decode

    def decode(self, tokens, cache):
        steps.append("S" if tokens.size == 1 else str(tokens.size - 1))
        return start(self, tokens, cache)

    monkeypatch.setattr(ScriptModel, "decode", decode)
    monkeypatch.setattr(decoding, "read", lambda *arrays: (steps.append("R"), read(*arrays))[1])
    lengths = iter([2] + [0] * 12 + [2] * 3 + [0] * 9)

    def choose(self, length, doubt, limit):
        self.calm += 1
        return min(next(lengths), limit)

    monkeypatch.setattr(DraftLength, "choose", choose)
    monkeypatch.setattr(decoding, "CALM", 5)
    text = [5, 6, *range(7, 15), 9, 10, 11, 5, 6, 7, 8, 9, 10, 3, 4, 7]
    draft_model = ScriptModel(text[:19] + [2] * 30)  # right until there
    draft_model.decode = lambda tokens, cache: start(draft_model, tokens, cache)
    ids, _, _ = write(SpeculativeDecoder(ScriptModel(text), draft_model, None), PROMPT, 22)
    assert ids == text
    assert "".join(steps) == "2R" + 4 * "SR" + "SSR" + 7 * "SR" + "R" + "2R2R" + "SRSR"


def test_one_short_interval_does_not_make_drafts_look_dear():
    policy = DraftLength(24)
    for k, seconds in [(0, 1.0), (0, 1.0), (8, 1.3), (EARLY, 0.01), (EARLY, 0.01)]:
        policy.timed(k, seconds)
    assert policy.costs[8] < 2


def test_a_trial_lets_wider_drafts_be_tried_again():
    policy = DraftLength(24)
    for k, seconds in [(0, 1.0), (0, 1.0), (1, 1.1), *[(8, 9.0)] * 3, (8, 1.5)]:
        policy.timed(k, seconds)
    assert policy.costs[8] > 4
    for _ in range(4):
        policy.trying = True
        policy.update(0, 0, 1, 0, True)
    policy.timed(0, 1.0)
    assert policy.costs[8] < 2


def test_the_encoding_is_timed_once_at_most(monkeypatch):
    target = timed(ScriptModel(TEXT), Clock(monkeypatch), line(0.1), encoding=50)
    decoder = PromptLookupDecoder(target, None)
    for _ in range(4):
        write(decoder, PROMPT, 1)
    assert len(decoder.policy.seconds[0]) == 1


def test_the_first_token_waits_for_one_pass_only():
    model = ScriptModel(TEXT)
    decoder = PromptLookupDecoder(model, None)
    decoder.policy.calm = 99
    next(decoder.stream(PROMPT, 20))
    assert model.calls == 1


@pytest.mark.parametrize("before", [[], [1], [1, 1], [1, 1, 1], [2, 1], [0, 3, 1]])
def test_short_texts_do_not_stop_drafts(monkeypatch, before):
    clock = Clock(monkeypatch, host=0.1)
    text = list(range(3, 103))
    target = timed(ScriptModel(text, vocab=256), clock, line(0.1), encoding=5)
    decoder = PromptLookupDecoder(target, None)
    for budget in before:
        write(decoder, mx.array(text, mx.uint32), budget)
    assert write(decoder, mx.array(text, mx.uint32), 100)[2].passes < 20


def test_a_slow_reader_does_not_make_drafts_look_dear(monkeypatch):
    """While it holds a token the device goes on, so that the next pass seems to take no time."""
    clock = Clock(monkeypatch)
    target = timed(ScriptModel(TEXT), clock, line(0.15), encoding=0)
    decoder = PromptLookupDecoder(target, None)
    for _ in decoder.stream(PROMPT, SIZE):
        clock.now += 5
    assert EARLY in decoder.policy.seconds
    assert max(decoder.policy.costs) < 6


def test_drafts_are_still_tried_where_passes_begin_early(monkeypatch):
    clock = Clock(monkeypatch, host=0.05)
    text = random.Random(1).choices(range(3, 16), k=600)
    wrong = [t - 1 if t > 3 else 15 for t in text[:200]]
    target = timed(ScriptModel(text), clock, line(0.02), encoding=0)
    draft_model = timed(ScriptModel(wrong + text[200:]), clock, line(0), 0.02, target=False)
    _, drafted, stats = write(SpeculativeDecoder(target, draft_model, None), PROMPT, 600)
    assert sum(drafted[:200]) == 0 and sum(drafted[300:]) > 200
    assert stats.passes < 400


def test_what_was_written_by_passes_that_began_early_is_found(monkeypatch):
    new = random.Random(1).sample(range(3, 90), 60)
    target = timed(ScriptModel(new + new, vocab=90), Clock(monkeypatch, host=0.3), line(0.1))
    decoder = PromptLookupDecoder(target, None)
    ids, drafted, _ = write(decoder, PROMPT, 120)
    assert ids == new + new and EARLY in decoder.policy.seconds
    assert sum(drafted[:60]) == 0 and sum(drafted[60:]) > 40


@pytest.mark.parametrize("eos_at", [20, 39, 40, 41])
def test_a_text_that_ends_early_is_counted_right(eos_at):
    model = ScriptModel([*TEXT[:eos_at], 1])
    for decoder in drafting(model, ScriptModel(WRONG)):
        model.calls = 0
        ids, _, stats = write(decoder, PROMPT, 40)
        assert ids == TEXT[: min(eos_at, 40)]
        assert stats.stop == ("eos" if eos_at < 40 else "length")
        assert stats.passes <= len(ids) + (stats.stop == "eos")
        assert model.calls - stats.passes in (0, 1) and model.calls <= 40


# The text


class Erratic:
    """A clock that tells nothing."""

    def __init__(self, seed):
        self.rng, self.now = random.Random(seed), 0.0

    def perf_counter(self):
        self.now += self.rng.lognormvariate(-6, 2)
        return self.now


def with_clocks(monkeypatch, make, seeds=6):
    """(ids, drafted) of texts one after the other, by each of some clocks."""
    for seed in range(seeds):
        monkeypatch.setattr(decoding, "time", Erratic(seed))
        decoder = make()
        yield [write(decoder, prompt, 60)[:2] for prompt in prompts(4)]


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("lookup", [True, False])
def test_the_text_does_not_depend_on_the_clock(monkeypatch, lookup, temp):
    model, draft_model = HashModel(), HashModel(seed=1)
    sampling = {"temp": temp, "eos_id": None}

    def make():
        if lookup:
            return PromptLookupDecoder(model, **sampling)
        return SpeculativeDecoder(model, draft_model, **sampling)

    plain = [write(Decoder(model, **sampling), prompt, 60)[0] for prompt in prompts(4)]
    runs = list(with_clocks(monkeypatch, make))
    assert all([ids for ids, _ in run] == plain for run in runs)
    assert any(run != runs[0] for run in runs)  # the clock does decide about lengths


@pytest.mark.parametrize("lookup", [True, False])
def test_lenient_text_does_not_depend_on_the_clock_or_on_texts_before(monkeypatch, lookup):
    model, draft_model = HashModel(), HashModel(seed=1)

    def make():
        options = {"eos_id": None, "delta": 0.9}
        if lookup:
            return PromptLookupDecoder(model, **options)
        return SpeculativeDecoder(model, draft_model, **options)

    runs = list(with_clocks(monkeypatch, make))
    assert all(run == runs[0] for run in runs)
    assert [write(make(), prompt, 60)[:2] for prompt in prompts(4)] == runs[0]
    plain = [write(Decoder(model, None), prompt, 60)[0] for prompt in prompts(4)]
    assert [ids for ids, _ in runs[0]] != plain


@pytest.mark.parametrize("step", [0.0, 1e-3])
def test_a_clock_may_be_coarse(monkeypatch, step):
    clock = SimpleNamespace(perf_counter=lambda: step * (random.random() < 0.2))
    monkeypatch.setattr(decoding, "time", clock)
    plain = write(Decoder(HashModel(), None), PROMPT, 90)[0]
    for decoder in drafting(HashModel(), HashModel(seed=1), eos_id=None):
        assert write(decoder, PROMPT, 90)[0] == plain


def test_a_plain_pass_that_was_disturbed_makes_no_width_look_cheaper_than_it():
    policy = DraftLength(24)
    for k, seconds in [(0, 0.004), (0, 0.003), (1, 0.001), (1, 0.001)]:
        policy.timed(k, seconds)
    assert min(policy.costs) >= 1
    assert policy.choose(16, 0, 24) > 1

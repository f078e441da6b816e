"""Sampling: the seed decides the text, drafts do not, and texts are as frequent as they should be.

The chi-square tests are sharp: with these fixed seeds they pass or fail for ever, and of correct
samplers one in 10,000 would fail one of them (ERROR_RATE, shared among the settings).
"""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from toys import HashModel, prompts, write

import decoder as decoding
from decoder import Decoder, Sampler, SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder

ERROR_RATE = 1e-4
PROMPT = mx.array([5, 6, 7], mx.uint32)


# One seed, one text

SETTINGS = [
    {"temp": 0.3},
    {"temp": 1.0},
    {"temp": 2.5},
    {"temp": 1.0, "top_p": 0.8},
    {"temp": 1.2, "top_k": 3},
    {"temp": 0.9, "top_p": 0.9, "top_k": 8},
]


@pytest.mark.parametrize("part", range(4))
def test_same_seed_same_text_with_any_drafts(part):
    """1,000 prompts, each with settings, draft lengths and models of its own."""
    rng = np.random.default_rng(part)
    accepted = drafted = length = different = 0
    for seed, prompt in enumerate(prompts(250, seed=part)):
        encoder = bool(seed % 2)
        model = HashModel(seed=seed, table=part, encoder=encoder)
        draft_model = HashModel(seed=seed + 1, table=part, encoder=encoder)
        sampling = SETTINGS[seed % 6] | {"seed": seed}
        k, fixed = int(rng.choice([1, 2, 4, 7, 10, 24])), bool(rng.integers(2))
        options = sampling | {"num_draft": k, "fixed_draft": fixed}
        plain, *_ = write(Decoder(model, **sampling), prompt, 9)
        look_up = PromptLookupDecoder(model, **options)
        speculate = SpeculativeDecoder(model, draft_model, **options)
        for decoder in (look_up, speculate):
            ids, _, stats = write(decoder, prompt, 9)
            assert ids == plain, (options, prompt)
            accepted, drafted = accepted + stats.accepted, drafted + stats.drafted
        if seed % 5 == 0 and plain:
            other, *_ = write(Decoder(model, **sampling | {"seed": seed + 10_000}), prompt, 9)
            length, different = length + 1, different + (other != plain)
    assert accepted > 200 and drafted - accepted > 200  # the drafts do disagree
    assert different > 0.8 * length


def test_noise_depends_on_seed_and_position_alone():
    sampler = Sampler(temp=1.0, seed=7)
    flat = mx.zeros((24, 50))
    whole, _ = sampler.choose(flat, 0)
    for first, count in ((0, 1), (5, 3), (23, 1), (1, 20)):
        part, _ = Sampler(temp=1.0, seed=7).choose(flat[:count], first)
        assert part.tolist() == whole[first : first + count].tolist()
    mx.random.seed(3)
    assert Sampler(temp=1.0, seed=7).choose(flat, 0)[0].tolist() == whole.tolist()
    assert sampler.choose(flat, 0)[0].tolist() == whole.tolist()
    assert Sampler(temp=1.0, seed=8).choose(flat, 0)[0].tolist() != whole.tolist()
    assert len(set(whole.tolist())) > 12


def test_noise_leaves_the_global_state_alone():
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(5)
    write(PromptLookupDecoder(HashModel(), temp=1.0), PROMPT)
    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_noise_of_a_differently_wide_table_is_cut_or_extended():
    sampler = Sampler(temp=1.0, seed=1)
    narrow, wide = mx.zeros((40, 20)), mx.zeros((40, 30))
    of_narrow = sampler.choose(narrow, 0, 24)[0].tolist()
    of_own = sampler.choose(mx.zeros((40, 24)), 0)[0].tolist()
    assert [a == b for a, b in zip(of_narrow, of_own, strict=True)] == [b < 20 for b in of_own]
    of_wide = sampler.choose(wide, 0, 24)[0].tolist()
    assert sum(a == b for a, b in zip(of_wide, of_own, strict=True)) > 30


def test_a_low_temperature_is_nearly_greedy_and_0_is():
    for prompt in prompts(10):
        model = HashModel()
        greedy, *_ = write(Decoder(model), prompt)
        assert write(Decoder(model, temp=1e-4), prompt)[0] == greedy
        assert write(Decoder(model, temp=5.0, top_k=1), prompt)[0] == greedy
        assert write(Decoder(model, temp=5.0, top_p=1e-6), prompt)[0] == greedy
        assert write(Decoder(model, temp=0, top_k=3, top_p=0.1, seed=3), prompt)[0] == greedy


# Temperature, top-k, top-p


def reference_p(logits, temp, top_k, top_p):
    """The distribution as the papers have it: one row (V,) float64 -> (V,)."""
    p = np.exp((logits - logits.max()) / temp)
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    nucleus = order[before < top_p]  # the fewest of the most likely that have the mass top_p
    if top_p < 1:
        p[p < p[nucleus].min()] = 0
    return p / p.sum()


@pytest.mark.parametrize("temp", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 49, 50, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.99, 0.7, 0.2])
def test_filters_equal_the_reference(temp, top_k, top_p):
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(0, 2, (6, 50)), np.round(rng.normal(0, 2, (6, 50)))])
    scores = Sampler(temp, top_p, top_k).scores(mx.array(logits, mx.float32))
    for row, got in zip(logits, np.array(mx.softmax(scores, axis=-1)), strict=True):
        expected = reference_p(row, temp, top_k, top_p)
        assert ((got > 0) == (expected > 0)).all()
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_filters_in_half_precision_are_computed_in_float32(dtype):
    logits = mx.random.normal((4, 5000), key=mx.random.key(0)).astype(dtype)
    scores = Sampler(0.7, 0.9, 3000).scores(logits)
    assert scores.dtype == mx.float32
    exact = Sampler(0.7, 0.9, 3000).scores(logits.astype(mx.float32))
    assert mx.array_equal(scores, exact)


# The distribution of whole texts

CHECKED = [
    {"temp": 1.0},
    {"temp": 0.6},
    {"temp": 2.0, "top_p": 0.8},
    {"temp": 1.0, "top_k": 2},
    {"temp": 1.5, "top_k": 3, "top_p": 0.9},
]
LENGTH, SEEDS = 3, 1500


def distribution(model, sampling):
    """{text: probability} of all texts of up to three tokens, by enumeration."""
    options = {"top_k": 0, "top_p": 1.0} | sampling
    texts = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, p in texts.items():
            if text[-1:] == (1,):
                longer[text] = p
                continue
            cache, token = model.start(PROMPT)
            tokens = mx.concatenate([token, mx.array(text, mx.uint32)])
            logits = np.array(model.decode(tokens, cache)[-1], np.float64)
            for i, more in enumerate(reference_p(logits, **options)):
                if more > 0:
                    longer[(*text, i)] = p * more
        texts = longer
    assert sum(texts.values()) == pytest.approx(1)
    return texts


def chi_square_p(x, degrees):
    """P(chi-square >= x): the regularized incomplete gamma function's series."""
    a, x = degrees / 2, x / 2
    if x > 2 * a + 100:
        return 0.0  # below 1e-30
    term = total = 1 / a
    for i in itertools.count(1):
        term *= x / (a + i)
        total += term
        if term < total * 1e-15:
            return max(0.0, 1 - total * math.exp(a * math.log(x) - x - math.lgamma(a)))


def test_chi_square_against_known_values():
    for x, degrees, p in ((3.841459, 1, 0.05), (18.307038, 10, 0.05), (149.449, 100, 0.001)):
        assert chi_square_p(x, degrees) == pytest.approx(p, rel=1e-3)


def fit(sampling, make=Decoder, seeds=SEEDS):
    """The p-value of the texts of many seeds against their distribution; rare texts pooled."""
    model = HashModel(vocab=4, habit=1.5, whim=1.5)
    model.record = False
    expected = distribution(model, sampling)
    counts = dict.fromkeys(expected, 0)
    for seed in range(seeds):
        ids, _, stats = write(make(model, **sampling, seed=seed), PROMPT, LENGTH)
        text = (*ids, 1) if stats.stop == "eos" else tuple(ids)
        if text not in counts:
            return 0.0  # a text that cannot be
        counts[text] += 1
    x, cells, rare, seen = 0.0, 0, 0.0, 0
    for text, p in expected.items():
        if p * seeds < 5:
            rare, seen = rare + p * seeds, seen + counts[text]
        else:
            x, cells = x + (counts[text] - p * seeds) ** 2 / (p * seeds), cells + 1
    if rare:
        x, cells = x + (seen - rare) ** 2 / rare, cells + 1
    return chi_square_p(x, cells - 1)


@pytest.mark.parametrize("sampling", CHECKED)
def test_plain_texts_are_as_frequent_as_they_should_be(sampling):
    assert fit(sampling) > ERROR_RATE / len(CHECKED)


def test_a_sampler_that_ignores_the_temperature_fails(monkeypatch):
    right = Sampler.scores

    def scores(self, logits, *ids):
        return right(Sampler(1.0, self.top_p, self.top_k, self.seed), logits)

    monkeypatch.setattr(decoding.Sampler, "scores", scores)
    assert fit({"temp": 0.6}) < ERROR_RATE / len(CHECKED)


def test_a_sampler_that_shares_noise_between_positions_fails(monkeypatch):
    right = Sampler._noise
    monkeypatch.setattr(decoding.Sampler, "_noise", lambda self, _, width: right(self, 0, width))
    assert fit({"temp": 1.0}) < ERROR_RATE / len(CHECKED)


def test_a_sampler_with_too_few_seeds_fails(monkeypatch):
    right = Sampler._noise

    def noise(self, position, width):
        few = Sampler(self.temp, seed=self.seed % 200)  # right for one text, wrong over many
        return right(few, position, width)

    monkeypatch.setattr(decoding.Sampler, "_noise", noise)
    assert fit({"temp": 1.0}) < ERROR_RATE / len(CHECKED)


def test_classic_mistake_of_accepting_drafts_as_they_come_fails():
    def make(model, **options):
        draft_model = HashModel(vocab=4, habit=1.5, whim=1.5, seed=9)
        return SpeculativeDecoder(model, draft_model, delta=1.0, num_draft=2, **options)

    assert fit({"temp": 1.0}, make) < ERROR_RATE / len(CHECKED)

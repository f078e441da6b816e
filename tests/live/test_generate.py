"""Greedy ids with each processor are those of transformers' generate, drafted or not.

python -m pytest -q tests/live/test_generate.py --whole     # 100 prompts each: minutes
"""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the live comparison needs PyTorch")
sys.path.insert(0, str(Path(__file__).parents[1]))

torch.set_num_threads(1)  # of tiny models: more would wait for each other

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from make_golden import FAMILIES, GOLDEN  # noqa: E402
from toys import drafting, write  # noqa: E402
from transformers import AutoModelForSeq2SeqLM  # noqa: E402

import logits_options  # noqa: E402
import processors  # noqa: E402
from decoder import Decoder  # noqa: E402
from model import load  # noqa: E402

SETTINGS = [
    {},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"min_length": 7},
    {"forced_bos_token_id": 9},
    {"bad_words_ids": [[7], [9, 9], [1]]},
    {"sequence_bias": [[[5], 0.5], [[9, 11], -2.0]]},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_length": 9},
]


def generate(theirs, prompts, settings, eos_ids):
    """What transformers writes, without the start token and what ends a text."""
    options = {"max_new_tokens": 16, "do_sample": False, "num_beams": 1}
    options["use_cache"] = False  # it fails where the decoder is deeper than the encoder
    mask = torch.ones(prompts.shape, dtype=torch.int64)
    with torch.no_grad():
        rows = theirs.generate(torch.tensor(prompts), attention_mask=mask, **options, **settings)
    for row in rows[:, 1:].tolist():
        ends = [i for i, token in enumerate(row) if token in eos_ids]
        yield row[: ends[0]] if ends else row


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_agrees(name, request):
    whole = request.config.getoption("--whole")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(GOLDEN / name).eval().float()
    ours, _ = load(GOLDEN / name)
    rng = np.random.default_rng(5)
    texts, accepted = set(), 0
    for settings in SETTINGS:
        made = [
            option.make(processors, settings[option.key], ours.eos_ids)
            for option in logits_options.OPTIONS
            if option.key in settings
        ]
        prompts = rng.integers(3, ours.vocab_size, (100 if whole else 3, 12))
        expected = generate(theirs, prompts, settings, ours.eos_ids)
        for i, (prompt, text) in enumerate(zip(prompts, expected, strict=True)):
            prompt = mx.array(prompt, mx.uint32)
            options = {"eos_id": ours.eos_ids, "logits_processors": made}
            assert write(Decoder(ours, **options), prompt, 16)[0] == text, settings
            for ceiling in (1, 4, 24) if whole else [(1, 4, 24)[i % 3]]:
                drafts = {"num_draft": ceiling, "fixed_draft": True}
                for decoder in drafting(ours, ours, **options, **drafts):
                    ids, _, stats = write(decoder, prompt, 16)
                    assert ids == text, settings
                    accepted += stats.accepted
            texts.add(tuple(text))
    assert len(texts) > 6 and accepted > len(texts)

"""Greedy ids with each processor are those of transformers' generate, drafted or not."""

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


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_agrees(name):
    theirs = AutoModelForSeq2SeqLM.from_pretrained(GOLDEN / name).eval().float()
    ours, _ = load(GOLDEN / name)
    rng = np.random.default_rng(5)
    texts = set()
    for i in range(100):
        settings = SETTINGS[i % len(SETTINGS)]
        made = [
            option.make(processors, settings[option.key], ours.eos_ids)
            for option in logits_options.OPTIONS
            if option.key in settings
        ]
        prompt = rng.integers(3, ours.vocab_size, 12)
        options = {"max_new_tokens": 16, "do_sample": False, "num_beams": 1, "use_cache": False}
        with torch.no_grad():
            expected = theirs.generate(torch.tensor(prompt)[None], **options, **settings)[0, 1:]
        expected = [t for t in expected.tolist() if t not in ours.eos_ids]
        prompt = mx.array(prompt, mx.uint32)
        options = {"eos_id": ours.eos_ids, "logits_processors": made}
        assert write(Decoder(ours, **options), prompt, 16)[0] == expected, settings
        options |= {"num_draft": (1, 4, 24)[i % 3], "fixed_draft": True}
        for decoder in drafting(ours, ours, **options):
            assert write(decoder, prompt, 16)[0] == expected, settings
        texts.add(tuple(expected))
    assert len(texts) > 12

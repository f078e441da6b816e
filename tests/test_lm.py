"""Models of mlx-lm: the text is that of mlx-lm's own `generate`, with and without drafts.

The models are tiny and random, the tokenizer has a word for each number.
"""

import copy
import functools
import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

pytest.importorskip("mlx_lm", reason="pip install mlx-lm")

import mlx_lm
from mlx_lm.models import gemma3_text, llama, mamba, phi, qwen3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lm
import main
from decoder import Decoder, SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder
from text import encode_chat

ROOT = Path(__file__).parent.parent
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GEMMA = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}
MAMBA = {"state_size": 4, "conv_kernel": 4, "time_step_rank": 4}
MAMBA |= {"use_bias": False, "use_conv_bias": True}
PHI = {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "num_key_value_heads": 4}
KINDS = {
    "llama": (llama, {}),
    "mistral": (llama, {}),
    "qwen3": (qwen3, {}),
    "gemma3_text": (gemma3_text, GEMMA),
    "phi": (phi, PHI),
    "mamba": (mamba, MAMBA),
}
TEMPLATE = (
    "{% for m in messages %}w60 {{ m['role'] == 'system' and 'w58' or 'w59' }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}w61{% endif %}"
)
PROMPT = "w5 w6 w7 w8 w9 w5 w6 w7 w10 w11 w12 w13 w5 w6"


def write_folder(folder, kind, seed=0):
    module, more = KINDS[kind]
    config = {"model_type": kind, **SIZES, **more}
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.3, model.parameters()))
    folder.mkdir()
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda kind, seed=0: write_folder(root / f"{kind}-{seed}", kind, seed))


def ids(stream):
    return [token.id for token in stream]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma3_text", "phi"])
def test_greedy_text_is_mlx_lms(folder, kind):
    own, tokenizer = mlx_lm.load(folder(kind))
    model, _ = lm.load(folder(kind))
    draft_model, _ = lm.load(folder(kind, 1))
    assert model.eos_ids == (1, 2)
    prompt = encode_chat(tokenizer, "here", PROMPT)
    responses = mlx_lm.stream_generate(own, tokenizer, prompt, max_tokens=60)
    expected = [r.token for r in responses]
    while expected and expected[-1] in (1, 2):
        expected.pop()
    fixed = {"num_draft": 5, "fixed_draft": True}
    accepted = []
    for decoder in (
        Decoder(model, model.eos_ids),
        PromptLookupDecoder(model, model.eos_ids, **fixed),
        SpeculativeDecoder(model, draft_model, model.eos_ids, **fixed),
        SpeculativeDecoder(model, model, model.eos_ids, **fixed),
    ):
        stream = decoder.stream(mx.array(prompt), 60)
        assert ids(stream) == expected
        accepted.append((stream.stats.accepted, stream.stats.drafted))
    assert accepted[3][0] == accepted[3][1] > 0  # also past the end of a sliding window


def test_prompt_is_what_mlx_lm_makes_of_it(folder):
    _, tokenizer = lm.load(folder("llama"))
    messages = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w4 w5"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert encode_chat(tokenizer, "here", "w4 w5", "w3") == chat == [60, 58, 3, 60, 59, 4, 5, 61]
    assert encode_chat(tokenizer, "here", "w4 w5", "w3", template=False) == [4, 5]
    with pytest.raises(ValueError, match="here: the text is empty"):
        encode_chat(tokenizer, "here", " \n")


def spy(model):
    """The widths of the passes that it makes from now on."""
    fed, inner = [], model.model

    def call(tokens, cache):
        fed.append(tokens.shape[1])
        return inner(tokens, cache=cache)

    call.layers, model.model = inner.layers, call
    return fed


def test_common_beginning_is_read_once_and_in_pieces(folder):
    model, _ = lm.load(folder("llama"))
    fed = spy(model)
    first = mx.random.randint(3, VOCAB, (1500,), key=mx.random.key(0))
    other = mx.concatenate([first[:1100], first[:11]])
    text = ids(Decoder(model, None).stream(first, 8))
    assert fed == [512, 512, 475] + [1] * 8
    fed.clear()
    result = ids(PromptLookupDecoder(model, None).stream(other, 8))
    assert fed[0] == 1110 - 1024
    fed.clear()
    assert ids(Decoder(model, None).stream(first, 8)) == text
    assert fed == [475] + [1] * 8
    again = copy.copy(model)
    again.last = [], []
    fed.clear()
    assert ids(Decoder(again, None).stream(other, 8)) == result
    assert fed[:3] == [512, 512, 86]


def test_streams_may_take_turns(folder):
    model, _ = lm.load(folder("gemma3_text"))
    prompts = [mx.arange(3, 20), mx.arange(3, 24)]
    alone = [ids(Decoder(model, None).stream(prompt, 12)) for prompt in prompts]
    streams = [Decoder(model, None).stream(prompt, 12) for prompt in prompts]
    both = [[stream_a.id, stream_b.id] for stream_a, stream_b in zip(*streams, strict=True)]
    assert [list(text) for text in zip(*both, strict=True)] == alone


@pytest.fixture
def run(capsys):
    """main.py in this process -> status, standard output, standard error."""

    def call(*options):
        status = main.main(list(map(str, options)))
        return status, *capsys.readouterr()

    return call


def test_command_line(folder, run):
    own, tokenizer = mlx_lm.load(folder("qwen3"))
    chat = encode_chat(tokenizer, "here", PROMPT)
    expected = mlx_lm.generate(own, tokenizer, chat, max_tokens=30)
    options = "--model", folder("qwen3"), "--prompt", PROMPT, "-m", 30, "--compare", "--json"
    result = json.loads(run(*options)[1])
    assert result["text"] == expected and result["identical"]
    assert result["prompt_tokens"] == len(chat)
    result = json.loads(run(*options, "--ignore-chat-template")[1])
    assert result["prompt_tokens"] == len(PROMPT.split())
    _, draft, errors = run(*options, "--draft-model", folder("qwen3", 1))
    assert json.loads(draft)["text"] == expected, errors


def test_a_checkpoint_asks_for_a_penalty(folder, run, tmp_path):
    """generation_config.json holds as a T5's does: every form of Qwen 2.5 has a penalty."""
    model = Path(shutil.copytree(folder("qwen3"), tmp_path / "model"))
    config = {"eos_token_id": [1, 2], "repetition_penalty": 1.7, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(config))
    options = "--model", model, "--prompt", PROMPT, "-m", 30, "--json", "--no-chat-template"
    _, asked, errors = run(*options, "--compare")
    line = "note: generation_config.json: repetition_penalty 1.7; without effect: do_sample true\n"
    assert errors.startswith(line)
    _, unasked, errors = run(*options, "--no-generation-config")
    assert "generation_config" not in errors
    _, given, _ = run(*options, "--no-generation-config", "--repetition-penalty", 1.7)
    asked, unasked, given = map(json.loads, (asked, unasked, given))
    assert asked["text"] == given["text"] != unasked["text"] and asked["identical"]


def test_refused_in_one_line(folder, run):
    for options in (
        ["--model", folder("mamba")],
        ["--model", folder("llama"), "--draft-model", folder("mamba")],
    ):
        status, _, errors = run(*options, "--prompt", PROMPT, "-m", 5)
        assert status == 2 and errors.count("\n") == 1
        assert "(ArraysCache) cannot be rewound: use --regular-decode" in errors
    plain = "--model", folder("mamba"), "--prompt", PROMPT, "-m", 5
    texts = [run(*plain, *option) for option in (["--regular-decode"], ["--num-draft", 0])]
    assert texts[0][:2] == texts[1][:2] and texts[0][0] == 0


def test_the_readme_quotes_the_adapter():
    section = (ROOT / "README.md").read_text().partition("\n## Your own MLX model")[2]
    blocks = section.split("```python\n")[1:]
    quoted = next(b.partition("```")[0] for b in blocks if "class Adapter" in b)
    imports, code = re.split(r"\n\n", quoted, maxsplit=1)
    source = (ROOT / "lm.py").read_text()
    assert code.strip() in source and set(imports.split("\n")) <= set(source.split("\n"))

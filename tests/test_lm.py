"""Models of mlx-lm: the text is that of mlx-lm's own `generate`, with and without drafts.

The models are tiny and random, the tokenizer has a word for each number.
"""

import copy
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

pytest.importorskip("mlx_lm", reason="pip install mlx-lm")

import mlx_lm
import test_text
from mlx_lm import tokenizer_utils
from mlx_lm.models import (
    deepseek_v2,
    gemma3_text,
    gpt_oss,
    llama,
    mamba2,
    phi,
    qwen3,
    recurrent_gemma,
    seed_oss,
)
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import lm
import main
from decoder import Decoder, SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder
from text import TextStream, encode_chat

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
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32}
YARN |= {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
DEEPSEEK |= {
    "v_head_dim": 6,
    "n_routed_experts": 2,
    "first_k_dense_replace": 2,
    "rope_scaling": YARN,
}
MAMBA = {"num_heads": 8, "state_size": 4, "conv_kernel": 4, "n_groups": 1, "time_step_rank": 4}
MAMBA |= {"use_bias": False, "use_conv_bias": True, "time_step_limit": (0.0, 10.0)}
MAMBA |= {"layer_norm_epsilon": 1e-5}
RECURRENT = {"attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0}
RECURRENT |= {"attention_window_size": 8, "block_types": ["recurrent", "attention"]}
PHI = {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "num_key_value_heads": 4}
KINDS = {
    "llama": (llama, {}),
    "mistral": (llama, {}),
    "qwen3": (qwen3, {}),
    "gemma3_text": (gemma3_text, GEMMA),
    "phi": (phi, PHI),
    "tied": (qwen3, {"model_type": "qwen3", "tie_word_embeddings": True}),
    "gpt_oss": (gpt_oss, GPT_OSS),
    "seed_oss": (seed_oss, {"tie_word_embeddings": True}),
    "deepseek_v2": (deepseek_v2, DEEPSEEK),
    "mamba2": (mamba2, MAMBA),
    "recurrent_gemma": (recurrent_gemma, RECURRENT),
}
TEMPLATE = (
    "{% for m in messages %}w60 {{ m['role'] == 'system' and 'w58' or 'w59' }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}w61{% endif %}"
)
PROMPT = "w5 w6 w7 w8 w9 w5 w6 w7 w10 w11 w12 w13 w5 w6"


def write_folder(folder, kind, seed=0):
    module, more = KINDS[kind]
    config = {"model_type": kind, **SIZES} | more
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
    begin = {"single": "w62 $A", "special_tokens": [("w62", 62)]}
    tokenizer.post_processor = processors.TemplateProcessing(**begin)
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


def own_text(model, tokenizer, prompt, max_tokens):
    """What mlx-lm writes, without the end of the text."""
    answers = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens)
    return [answer.token for answer in answers if answer.token not in (1, 2)]


@pytest.mark.parametrize("kind", [*KINDS][:-2])
def test_greedy_text_is_mlx_lms(folder, kind):
    own, tokenizer = mlx_lm.load(folder(kind))
    model, _ = lm.load(folder(kind))
    draft_model, _ = lm.load(folder(kind, 1))
    assert model.eos_ids == (1, 2)
    prompt = encode_chat(tokenizer, "here", PROMPT)
    expected = own_text(own, tokenizer, prompt, 40)
    fixed = {"num_draft": 5, "fixed_draft": True}
    accepted = []
    for decoder in (
        Decoder(model, model.eos_ids),
        PromptLookupDecoder(model, model.eos_ids, **fixed),
        SpeculativeDecoder(model, draft_model, model.eos_ids, **fixed),
        SpeculativeDecoder(model, model, model.eos_ids, **fixed),
    ):
        stream = decoder.stream(mx.array(prompt), 40)
        assert ids(stream) == expected
        accepted.append((stream.stats.accepted, stream.stats.drafted))
    assert accepted[3][0] == accepted[3][1] > 0  # also past the end of a sliding window


def test_prompt_is_what_mlx_lm_makes_of_it(folder):
    _, tokenizer = lm.load(folder("llama"))
    messages = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w4 w5"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert encode_chat(tokenizer, "here", "w4 w5", "w3") == chat == [60, 58, 3, 60, 59, 4, 5, 61]
    assert encode_chat(tokenizer, "here", "w4 w5", "w3", template=False) == [62, 4, 5]
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


def test_a_row_of_logits_is_the_same_however_it_is_fed(folder):
    """Past the end of a sliding window, past 256 tokens, and after drafts were taken back."""
    for kind in "gemma3_text", "llama":
        model, _ = lm.load(folder(kind))
        tokens = mx.random.randint(3, VOCAB, (340,), key=mx.random.key(1))
        whole = model.model(tokens[None])[0]
        cache, _ = model.start(tokens[:1])
        done = 0
        for fed, kept in [(1, 1), (20, 3), (250, 249), (30, 2), (30, 30), (1, 1), (20, 20)]:
            logits = model.decode(tokens[done : done + fed], cache)
            assert mx.allclose(logits, whole[done : done + fed], atol=1e-3)
            cache.trim(fed - kept)
            done += kept


def test_bfloat16_stays_bfloat16(folder, tmp_path):
    path = shutil.copytree(folder("llama"), tmp_path / "half")
    weights = mx.load(str(path / "model.safetensors"))
    weights = {name: weight.astype(mx.bfloat16) for name, weight in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    own, tokenizer = mlx_lm.load(str(path))
    model, _ = lm.load(path)
    prompt = encode_chat(tokenizer, "here", PROMPT)
    cache, token = model.start(mx.array(prompt))
    assert model.decode(token, cache).dtype == mx.bfloat16
    assert ids(Decoder(model, (1, 2)).stream(prompt, 20)) == own_text(own, tokenizer, prompt, 20)


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
    assert result["prompt_tokens"] == 1 + len(PROMPT.split())
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


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_path(folder, tmp_path, run, kind):
    own, tokenizer = mlx_lm.load(folder("llama"))
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(own, 2, config, use_dora=kind == "dora")
    names = [(name, w) for name, w in tree_flatten(own.parameters()) if "lora_" in name]
    weights = {
        name: mx.random.normal(w.shape, key=mx.random.key(i)) * 0.3
        for i, (name, w) in enumerate(names)
    }
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": config}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tuned, _ = mlx_lm.load(folder("llama"), adapter_path=str(tmp_path))
    expected = own_text(tuned, tokenizer, encode_chat(tokenizer, "here", PROMPT), 30)
    options = "--model", folder("llama"), "--prompt", PROMPT, "-m", 30, "--json", "--compare"
    result = json.loads(run(*options, "--adapter-path", tmp_path)[1])
    assert result["token_ids"] == expected and result["identical"]
    assert json.loads(run(*options)[1])["token_ids"] != expected
    status, _, errors = run(*options, "--adapter-path", tmp_path / "missing")
    assert status == 2 and "missing" in errors and errors.count("\n") == 1


def test_sampling(folder, run):
    options = "--model", folder("llama"), "--prompt", PROMPT, "-m", 30, "--json", "--compare"
    options += "--temp", 1.0, "--top-k", 4, "-n", 5, "--fixed-draft"
    texts = []
    for more in [], ["--seed", 1], ["--draft-model", folder("llama", 1)]:
        result = json.loads(run(*options, *more)[1])
        assert result["identical"] and result["drafted"] > 0
        texts.append(result["text"])
    assert texts[0] == texts[2] != texts[1]


def test_every_end_of_generation_config_ends_a_text(folder, run):
    options = "--model", folder("llama"), "--prompt", PROMPT, "--json", "-m", 9
    for token in 1, 2, 3:
        result = json.loads(run(*options, "--logit-bias", json.dumps({token: 1e4}))[1])
        ended = token != 3
        assert (result["stop"] == "eos") == ended and result["tokens"] == (0 if ended else 9)


def test_reference(folder, run, tmp_path):
    options = "--model", folder("phi"), "--prompt", PROMPT, "-m", 40, "--json", "--temp", 3
    plain = json.loads(run(*options, "--regular-decode")[1])
    (tmp_path / "text").write_text(" ".join(f"w{i}" for i in plain["token_ids"]))
    result = json.loads(run(*options, "--reference", tmp_path / "text")[1])
    assert result["text"] == plain["text"]
    assert result["passes"] < json.loads(run(*options)[1])["passes"]


def test_a_common_beginning_of_many_prompts_is_read_once(folder, run, tmp_path, monkeypatch):
    begin = " ".join(f"w{3 + i * i % 50}" for i in range(1400))
    prompts = [f"{begin} w{i} w7 w8" for i in range(5, 8)]
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts)
    (tmp_path / "in.jsonl").write_text(lines)
    fed, read = [], lm.Rereader.decode

    def decode(self, tokens, cache):
        fed.append(tokens.size)
        return read(self, tokens, cache)

    monkeypatch.setattr(lm.Rereader, "decode", decode)
    options = "--model", folder("llama"), "--prompts-file", tmp_path / "in.jsonl", "-m", 4
    plain = run(*options, "--regular-decode")[1].splitlines()
    rest = 1405 - 1024  # of the chat's 1406 tokens all but the last are read
    passes = [1] * 4
    assert fed == [512, 512, rest, *passes, rest, *passes, rest, *passes]
    fed.clear()
    compared = run(*options, "--compare")[1].splitlines()
    assert fed.count(512) == 2 * 4  # two that warm up, two that measure: each reads for itself
    assert fed.count(rest) == 2 + 2 * 3
    alone = [run(*options[:2], "--prompt", p, "-m", 4, "--json")[1] for p in prompts]
    texts = [[json.loads(line)["text"] for line in lines] for lines in (plain, compared, alone)]
    assert texts[0] == texts[1] == texts[2]


def test_refused_in_one_line(folder, run, tmp_path):
    other = shutil.copytree(folder("llama"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["w5"], vocab["w6"] = vocab["w6"], vocab["w5"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = json.dumps("{{ raise_exception('no system here') }}")
    strict = shutil.copytree(folder("llama"), tmp_path / "strict")
    (strict / "chat_template.jinja").write_text(json.loads(template))
    llama, rewound = ["--model", folder("llama")], "(ArraysCache) cannot be rewound: use --reg"
    for options, reason in [
        (["--model", folder("mamba2")], rewound),
        (["--model", folder("recurrent_gemma")], "(ArraysCache, RotatingKVCache) cannot be rew"),
        ([*llama, "--draft-model", folder("mamba2")], rewound),
        ([*llama, "--draft-model", other], "other tokens than the target model: 'w5' is 6, not 5"),
        (["--model", strict, "--system", "w3"], "--prompt cannot be encoded: no system here"),
        ([*llama, "--prompt", " "], "--prompt: the text is empty"),
        ([*llama, "--prompt", "\udcff"], "--prompt cannot be encoded"),
    ]:
        status, _, errors = run("--prompt", PROMPT, *options, "-m", 5)
        assert status == 2 and errors.count("\n") == 1 and reason in errors, errors


@pytest.mark.parametrize("kind", ["mamba2", "recurrent_gemma"])
def test_what_cannot_be_rewound_is_decoded_plainly(folder, run, kind):
    own, tokenizer = mlx_lm.load(folder(kind))
    expected = own_text(own, tokenizer, encode_chat(tokenizer, "here", PROMPT), 20)
    for option in ["--regular-decode"], ["--num-draft", 0]:
        status, result, errors = run(
            "--model", folder(kind), "--prompt", PROMPT, "-m", 20, "--json", *option
        )
        assert status == 0 and json.loads(result)["token_ids"] == expected, errors


def test_mlx_lm_is_asked_for_where_it_is_missing(folder, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm", None)
    status, _, errors = run("--model", folder("qwen3"), "--prompt", PROMPT)
    assert status == 2 and errors.endswith("a qwen3 model needs mlx-lm: pip install mlx-lm\n")


def test_what_has_no_effect_on_a_t5_is_said(run):
    options = "--system", "x", "--no-chat-template", "--adapter-path", "x", "-m", 1
    errors = run("--prompt", "replace a with b: a", *options)[2]
    for name in "--system", "--no-chat-template", "--adapter-path":
        assert f"note: {name} has no effect on a T5\n" in errors
    assert "note: --system has no effect with --no-chat-template\n" in errors


@pytest.mark.parametrize("make", [test_text.bpe, functools.partial(test_text.unigram, True)])
def test_streamed_text_is_mlx_lms(make, tmp_path):
    """Byte-level BPE and SentencePiece, whose characters may take several tokens."""
    make().save_pretrained(tmp_path)
    tokenizer = tokenizer_utils.load(tmp_path)
    split = 0
    for text in test_text.TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        own, stream, written = tokenizer.detokenizer, TextStream(tokenizer), ""
        own.reset()
        for i in token_ids:
            own.add_token(i)
            pieces = stream.push(i)
            split += not pieces
            written += "".join(piece for piece, _ in pieces)
        own.finalize()
        written += "".join(piece for piece, _ in stream.finish())
        assert written.strip() == own.text.strip()
    assert split > 20


def test_the_readme_quotes_the_adapter_and_shows_its_use(capsys):
    section = (ROOT / "README.md").read_text().partition("\n## Your own MLX model")[2]
    blocks = section.split("```python\n")[1:]
    quoted = next(b.partition("```")[0] for b in blocks if "class Adapter" in b)
    imports, code = re.split(r"\n\n", quoted, maxsplit=1)
    source = (ROOT / "lm.py").read_text()
    assert code.strip() in source and set(imports.split("\n")) <= set(source.split("\n"))
    exec("".join(block.partition("```")[0] for block in blocks), {})
    assert len(json.loads(capsys.readouterr().out)) == 20

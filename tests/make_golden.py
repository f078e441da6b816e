"""Write tests/golden/: a tiny random checkpoint of every kind of T5, and what transformers says.

    python tests/make_golden.py [NAME ...]      # needs torch, transformers, sentencepiece

A folder per family: the checkpoint as the hub (or transformers 5) has it, a tokenizer of its kind,
and golden.npz: `prompt` (S,), `fed` (L,) decoder ids from the start id on, `logits` (L, vocab) for
the rows `rows`, and `greedy`, the ids that generate() writes, without the start id.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForSeq2SeqLM, MT5Config, T5Config, T5Tokenizer, UMT5Config

GOLDEN = Path(__file__).parent / "golden"
LICENSE = Path(__file__).parent.parent / "LICENSE"  # something to train tokenizers on
TEXT = [line for line in LICENSE.read_text().splitlines() if line]
TEXT += ["Größe, déjà vu; naïve café: 10 °C → 50 °F"]

SIZES = dict(vocab_size=160, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
V11 = dict(feed_forward_proj="gated-gelu")
OWN_HEAD = dict(own_head=True)

# name: config class, its arguments, what is done to the files, the tokenizer
FAMILIES = {
    "t5-v1.0": (T5Config, {}, dict(copies=True), "t5"),
    "t5-v1.1": (T5Config, V11, dict(own_head=True, hub={"tie_word_embeddings": False}), "spiece"),
    "flan-t5": (T5Config, V11 | {"tie_word_embeddings": False}, OWN_HEAD, "t5"),
    "mt5": (
        MT5Config,
        V11 | {"decoder_start_token_id": 7},
        dict(own_head=True, no_shared="encoder", hub={"tie_word_embeddings": False}),
        "t5",
    ),
    "madlad": (
        T5Config,
        V11 | {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0},
        dict(own_head=True, no_shared="decoder", hub={"tie_word_embeddings": False}),
        "t5",
    ),
    "byt5": (
        MT5Config,
        V11 | {"vocab_size": 384, "num_layers": 4, "num_decoder_layers": 1},
        OWN_HEAD,
        "byt5",
    ),
    "ul2": (
        T5Config,
        dict(feed_forward_proj="gated-silu"),
        dict(own_head=True, hub={"tie_word_embeddings": False}),
        "t5",
    ),
    "umt5": (UMT5Config, {"tie_word_embeddings": False}, OWN_HEAD, "t5"),
    "umt5-scaled": (UMT5Config, {}, {}, "t5"),
    "codet5": (
        T5Config,
        {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2},
        {},
        "roberta",
    ),
    "odd-sizes": (
        T5Config,
        dict(
            feed_forward_proj="gelu",
            d_kv=12,
            num_heads=3,
            num_layers=1,
            num_decoder_layers=3,
            relative_attention_num_buckets=21,
            relative_attention_max_distance=47,
        ),
        dict(eos=[1, 83]),
        "t5",
    ),
    "sharded": (T5Config, {"eos_token_id": None}, dict(shards=3, eos=None), "t5"),
}


def make(name, folder, seed=3):
    """Write a random checkpoint of a family, with its tokenizer, to a folder."""
    torch.manual_seed(sum(name.encode()) + seed)
    config_class, arguments, files, tokenizer = FAMILIES[name]
    config = config_class(**SIZES | {"decoder_start_token_id": 0} | arguments)
    model = AutoModelForSeq2SeqLM.from_config(config).eval().float()
    for key, tensor in model.named_parameters():
        if "layer_norm" in key:  # not all ones
            tensor.data = 1 + 0.3 * torch.randn_like(tensor)
        elif "relative_attention_bias" in key:
            tensor.data = torch.randn_like(tensor)
        elif key.endswith(("o.weight", "wo.weight")):  # the context counts, not the last token
            tensor.data *= 4
    tensors = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    if files.get("own_head"):
        tensors["lm_head.weight"] = 0.5 * torch.randn_like(tensors["shared.weight"])
    else:
        del tensors["lm_head.weight"]
    for stack in ("encoder", "decoder"):
        if not files.get("copies"):
            tensors.pop(f"{stack}.embed_tokens.weight")
    if "copies" in files:  # as old checkpoints carry it: random, and read by nobody
        bias = "layer.1.EncDecAttention.relative_attention_bias.weight"
        tensors[f"decoder.block.0.{bias}"] = torch.randn(32, SIZES["num_heads"])
    if "no_shared" in files:
        tensors[f"{files['no_shared']}.embed_tokens.weight"] = tensors.pop("shared.weight")

    folder.mkdir(parents=True)
    if "hub" in files:  # config.json as older versions of transformers wrote it
        written = {"architectures": [type(model).__name__], "model_type": config.model_type}
        written |= SIZES | {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
        written |= arguments | files["hub"]
        (folder / "config.json").write_text(json.dumps(written, indent=1))
    else:
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    if "eos" in files:
        generation = {"eos_token_id": files["eos"], "decoder_start_token_id": 0, "pad_token_id": 0}
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save(tensors, folder, files.get("shards", 1))
    make_tokenizer(tokenizer, folder, config.eos_token_id or 1)


def save(tensors, folder, shards):
    if shards == 1:
        return save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        shard = {k: tensors[k] for k in sorted(tensors)[i::shards]}
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_tokenizer(kind, folder, eos):
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 3}
    if kind == "byt5":
        settings = {"tokenizer_class": "ByT5Tokenizer"}
    elif kind == "roberta":
        settings = {"tokenizer_class": "RobertaTokenizer"}
        tokenizer = ByteLevelBPETokenizer()
        special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
        tokenizer.train_from_iterator(TEXT, vocab_size=300, special_tokens=special)
        tokenizer.save_model(str(folder))
    else:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT),
            model_prefix=str(folder / "spiece"),
            vocab_size=150,
            normalization_rule_name="identity",
            pad_id=0,
            eos_id=eos,
            unk_id=3 - eos,
            bos_id=-1,
            minloglevel=2,
        )
        (folder / "spiece.vocab").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind == "t5":
        tokenizer = T5Tokenizer.from_pretrained(folder)
        (folder / "spiece.model").unlink()
        tokenizer.save_pretrained(folder)


def reference(folder, seed, length):
    """What transformers says of the checkpoint as it is on disk, in float32."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval().float()
    vocab, start = model.config.vocab_size, model.generation_config.decoder_start_token_id
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, vocab, 150)
    fed = np.concatenate([[start], rng.integers(3, vocab, length - 1)])
    inputs, fed_inputs = torch.tensor(prompt)[None], torch.tensor(fed)[None]
    # Without a cache: transformers' own fails where the decoder is deeper than the encoder.
    options = dict(max_new_tokens=24, do_sample=False, num_beams=1, use_cache=False)
    with torch.no_grad():
        logits = model(input_ids=inputs, decoder_input_ids=fed_inputs, use_cache=False).logits[0]
        greedy = model.generate(inputs, **options)[0, 1:]
    return dict(
        prompt=prompt.astype(np.uint32),
        fed=fed.astype(np.uint32),
        logits=logits.numpy(),
        greedy=greedy.numpy().astype(np.uint32),
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        make(name, folder)
        length = 300 if name == "t5-v1.0" else 40  # past the cache's first 256 positions
        said = reference(folder, len(name), length)
        said["rows"] = np.concatenate([np.arange(20), np.arange(length - 20, length)])
        said["logits"] = said["logits"][said["rows"]]
        np.savez_compressed(folder / "golden.npz", **said)
        print(f"{name}: logits {said['logits'].std():.3g}, greedy {said['greedy'].tolist()}")

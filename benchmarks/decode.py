"""Encoding, plain decoding, prompt lookup and speculative decoding, beside other engines.

    python benchmarks/decode.py --size t5-base --peers transformers,ctranslate2

The demo model writes the same text at every size (see widen.py); flan-t5-base has random weights
and writes a fixed number of tokens, plainly. `encode` is one prompt of 400 tokens. `decode` is six
edit prompts of 60 to 100 words that the model gets right, the sum of their medians, encoding
excluded. Engines take turns, each in a process of its own, with as many threads as they choose.

Peers need `pip install torch ctranslate2`; one that is not installed is skipped with a note.
"""

from start import ROOT, command

# isort: split
import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from common import (
    SIZES,
    Engine,
    checkpoint,
    ignore_interrupts,
    median,
    note,
    scratch,
    serve,
    timed,
)

MODES = {
    "mlx": ["regular", "prompt-lookup", "speculative"],
    "transformers": ["regular", "prompt-lookup"],
    "ctranslate2-float32": ["regular"],
    "ctranslate2-int8": ["regular"],
}
PEERS = {"transformers": ["torch"], "ctranslate2": ["ctranslate2", "torch"]}  # and what they need
DEMO, DRAFT = ROOT / "demo" / "t5-demo", ROOT / "demo" / "t5-demo-draft"
PROMPTS, WORDS, SEED = 6, range(60, 101), 0
ENCODED_TOKENS, MAX_TOKENS = 400, 400
FIXED_TOKENS = 64  # what random weights write per prompt, whether EOS comes or not
LARGE_TOKENS = 40  # at t5-large only the beginnings are written, to end within ten minutes
SECONDS = 540  # no further run is begun that would end later than this


# The engines. Each returns encode(ids) -> seconds and write(ids, mode, tokens, fixed) -> the ids
# written, the number of passes, and the seconds without encoding.


def mlx(folder):
    import mlx.core as mx

    from decoder import Decoder, SpeculativeDecoder
    from model import load
    from prompt_lookup import PromptLookupDecoder

    class Encoded:
        """The model, with a clock that starts when the prompt is encoded."""

        is_encoder_decoder = True

        def __init__(self, model):
            self.model, self.decode, self.parameters = model, model.decode, model.parameters
            self.vocab_size, self.alpha = model.vocab_size, model.alpha

        def start(self, prompt):
            cache, token = self.model.start(prompt)
            mx.eval(self.decode(token, cache))  # what is lazy until the first pass, too
            cache.trim(1)
            self.began = time.perf_counter()
            return cache, token

    model, draft_model = Encoded(load(str(folder))[0]), load(str(DRAFT))[0]
    decoders = {
        "regular": Decoder(model),
        "prompt-lookup": PromptLookupDecoder(model),
        "speculative": SpeculativeDecoder(model, draft_model),
    }
    endless = Decoder(model, eos_id=None)

    def encode(ids):
        prompt = mx.array(ids, mx.uint32)
        return timed(lambda: mx.eval(model.model.encode(prompt)))[0]

    def write(ids, mode, tokens, fixed):
        decoder = endless if fixed else decoders[mode]
        stream = decoder.stream(mx.array(ids, mx.uint32), tokens)
        written = [token.id for token in stream]
        return written, stream.stats.passes, time.perf_counter() - model.began

    return encode, write


def transformers(folder):
    import torch
    from transformers import T5ForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    model = T5ForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32).eval()
    passes = []
    model.decoder.register_forward_pre_hook(lambda *_: passes.append(1))

    @torch.inference_mode()
    def encode(ids):
        return timed(lambda: model.encoder(torch.tensor([ids])))[0]

    @torch.inference_mode()
    def write(ids, mode, tokens, fixed):
        options = {"prompt_lookup_num_tokens": 10} if mode == "prompt-lookup" else {}
        options |= {"min_new_tokens": tokens} if fixed else {}
        prompt = torch.tensor([ids])
        memory = BaseModelOutput(last_hidden_state=model.encoder(prompt).last_hidden_state)
        passes.clear()
        seconds, output = timed(
            lambda: model.generate(
                encoder_outputs=memory,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=tokens,
                **options,
            )
        )
        return output[0, 1:].tolist(), len(passes), seconds

    return encode, write


def ctranslate2(folder, compute_type):
    import ctranslate2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(DEMO))
    translator = ctranslate2.Translator(
        str(folder), compute_type=compute_type, intra_threads=os.cpu_count()
    )

    def call(ids, tokens, fixed=False):
        result = translator.translate_batch(
            [tokenizer.convert_ids_to_tokens(ids)],
            beam_size=1,
            max_input_length=0,
            max_decoding_length=tokens,
            min_decoding_length=tokens if fixed else 1,
            return_end_token=True,
        )
        return tokenizer.convert_tokens_to_ids(result[0].hypotheses[0])

    # It cannot be given the encoder's output. One token costs encoding and a pass, n tokens
    # encoding and n passes: the difference is n - 1 passes.
    def write(ids, mode, tokens, fixed):
        one, _ = timed(call, ids, 1)
        seconds, written = timed(call, ids, tokens, fixed)
        passes = len(written)
        return written, passes, (seconds - one) * passes / (passes - 1)

    def encode(ids):
        one, _ = timed(call, ids, 1)
        more, _ = timed(call, ids, 9, True)
        return one - (more - one) / 8

    return encode, write


def serve_engine(name, folder):
    def load():
        kind, _, compute_type = name.partition("-")
        load_engine = {"mlx": mlx, "transformers": transformers, "ctranslate2": ctranslate2}[kind]
        encode, write = load_engine(folder, *([compute_type] if compute_type else []))

        def answer(ids, mode=None, tokens=0, fixed=False):
            return write(ids, mode, tokens, fixed) if mode else encode(ids)

        return answer

    serve(load)


# What they are asked to do.


def choose_prompts():
    """Token ids: one prompt of 400 tokens, and six that the demo model edits right."""
    import mlx.core as mx

    from model import load
    from prompt_lookup import PromptLookupDecoder

    model, tokenizer = load(str(DEMO))
    decoder = PromptLookupDecoder(model)
    edits = [json.loads(line) for line in (ROOT / "demo" / "edits.jsonl").open(encoding="utf-8")]
    random.Random(SEED).shuffle(edits)
    fitting = [edit for edit in edits if edit["words"] in WORDS]
    shorter = sorted((e for e in edits if e["words"] < WORDS[0]), key=lambda e: -e["words"])
    chosen = []
    for edit in fitting + shorter:
        ids = tokenizer(edit["prompt"]).input_ids
        answer = tokenizer(edit["answer"]).input_ids[:-1]
        stream = decoder.stream(mx.array(ids, mx.uint32), len(answer) + 1)
        if [token.id for token in stream] == answer:
            chosen.append((edit["words"], ids))
        if len(chosen) == PROMPTS:
            break
    note(f"{len(chosen)} prompts of {', '.join(str(words) for words, _ in chosen)} words")
    text = tokenizer(" ".join(edit["prompt"] for edit in edits[:40])).input_ids
    return text[: ENCODED_TOKENS - 1] + [1], [ids for _, ids in chosen]


def engine_names(peers):
    names = ["mlx"]
    for peer in filter(None, peers.split(",")):
        if peer not in PEERS:
            raise ValueError(f"unknown peer {peer!r}; known are {', '.join(PEERS)}")
        missing = [name for name in PEERS[peer] if importlib.util.find_spec(name) is None]
        if missing:
            note(f"{peer} is skipped: pip install {' '.join(missing)}")
        else:
            names += [name for name in MODES if name.startswith(peer)]
    return names


def convert_for_ctranslate2(folder, out):
    """In a process of its own: PyTorch must not be loaded where CTranslate2 is timed."""
    code = "import ctranslate2, sys; c = ctranslate2.converters.TransformersConverter(sys.argv[1])"
    process = [sys.executable, "-c", f"{code}; c.convert(sys.argv[2])", str(folder), str(out)]
    if subprocess.run(process, stdout=sys.stderr, preexec_fn=ignore_interrupts).returncode:
        raise RuntimeError("CTranslate2 cannot convert the checkpoint; see its message above")


def measure(folders, size, long_prompt, prompts, runs, began):
    fixed = size == "flan-t5-base"
    tokens = {"flan-t5-base": FIXED_TOKENS, "t5-large": LARGE_TOKENS}.get(size, MAX_TOKENS)
    engines = [Engine(__file__, *item) for item in folders.items()]
    modes = {name: ["regular"] if fixed else MODES[name] for name in folders}
    tasks = [(engine, mode) for engine in engines for mode in modes[engine.name]]
    for engine, mode in tasks:  # warm
        engine.ask(ids=prompts[0], mode=mode, tokens=16, fixed=fixed)
    encode = {engine.name: [] for engine in engines}
    for _ in range(5):
        for engine in engines:
            encode[engine.name].append(engine.ask(ids=long_prompt))
    took = {(engine.name, mode): [[] for _ in prompts] for engine, mode in tasks}
    texts, passes, longest = {}, {}, 0.0
    for run in range(runs):
        run_began = time.perf_counter()
        if run and run_began + longest > began + SECONDS:
            break
        for i, prompt in enumerate(prompts):
            for engine, mode in tasks:
                answer = engine.ask(ids=prompt, mode=mode, tokens=tokens, fixed=fixed)
                key = engine.name, mode
                texts[(*key, i)], passes[(*key, i)], seconds = answer
                took[key][i].append(seconds)
        longest = max(longest, time.perf_counter() - run_began)
        note(f"run {run + 1} of at most {runs}, {time.perf_counter() - began:.0f} s")
    for engine in engines:
        engine.close()

    rows = []
    for name, mode in took:
        written = [[t for t in texts[name, mode, i] if fixed or t > 1] for i in range(len(prompts))]
        plain = [
            [t for t in texts["mlx", "regular", i] if fixed or t > 1] for i in range(len(prompts))
        ]
        if written != plain and not fixed:
            differ = sum(a != b for a, b in zip(written, plain, strict=True))
            note(f"{name}, {mode}: {differ} of {len(prompts)} texts differ from mlx, regular")
        count, seconds = sum(map(len, written)), sum(map(median, took[name, mode]))
        total = sum(passes[name, mode, i] for i in range(len(prompts)))
        row = {"engine": name, "mode": mode, "tokens": count, "passes": total, "seconds": seconds}
        rows.append(row | {"seconds_per_token": seconds / count})
    encode = [{"engine": name, "seconds": median(times)} for name, times in encode.items()]
    return {"size": size, "prompt_tokens": len(long_prompt), "encode": encode, "decode": rows}


def main():
    parser = argparse.ArgumentParser(description="Time decoding at the size of a real T5.")
    parser.add_argument("--size", choices=SIZES, default="demo", help="default: demo")
    parser.add_argument("--peers", default="", help="also: transformers,ctranslate2")
    parser.add_argument(
        "--runs", type=command.between(1), default=3, help="the most runs (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    arguments = command.parse(parser)
    if arguments.engine:
        return serve_engine(arguments.engine, arguments.folder)

    began, names = time.perf_counter(), engine_names(arguments.peers)
    long_prompt, prompts = choose_prompts()
    with checkpoint(arguments.size) as folder, scratch() as work:
        folders = dict.fromkeys(names, folder)
        if "ctranslate2-int8" in names:
            converted = work / "ctranslate2"
            convert_for_ctranslate2(folder, converted)
            folders |= {name: converted for name in names if name.startswith("ctranslate2")}
        result = measure(folders, arguments.size, long_prompt, prompts, arguments.runs, began)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{arguments.size}: encoding {result['prompt_tokens']} tokens")
    for row in result["encode"]:
        print(f"  {row['engine']:20} {row['seconds']:8.3f} s")
    print(f"{arguments.size}: decoding {len(prompts)} prompts")
    for row in result["decode"]:
        each = f"{row['seconds_per_token'] * 1e3:8.2f} ms a token"
        count = f"{row['tokens']:5} tokens {row['passes']:5} passes"
        print(f"  {row['engine']:20} {row['mode']:14} {count} {row['seconds']:8.2f} s {each}")


if __name__ == "__main__":
    sys.exit(command.run("decode.py", main))

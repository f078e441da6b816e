"""What prompt lookup would gain on logs of your own: answers are replayed, no model is run.

    python benchmarks/replay.py demo/edits.jsonl --tokenizer demo/t5-demo/tokenizer.json --seam

A FILE has JSON lines with "prompt" and "response" (or "answer"). Both are tokenized apart and
joined, as a causal model has them (--seam: as an encoder-decoder has them), and an EOS ends each
response. The real
search and the real draft length decide; a draft token is accepted if it is what the response has.
A pass that verifies k draft tokens costs 1 + alpha * k plain ones; speed is tokens per cost, plain
decoding being 1. benchmarks/verify_cost.py measures the alpha of a machine.
"""

from start import command

# isort: split
import argparse
import json
import sys

import mlx.core as mx
import sentencepiece
import tokenizers

from decoder import DraftLength, read
from prompt_lookup import LookupDrafter

CEILING, EOS = 24, 1


def replay(answers, alpha, seam=False, ngram_max=16, ngram_min=1):
    """answers [(prompt ids, response ids)] -> tokens, passes, drafted, accepted, cost"""
    policy = DraftLength(CEILING, alpha)
    tokens = passes = drafted = accepted = 0
    for prompt, response in answers:
        texts = [prompt, []] if seam else [prompt]
        drafter, done = LookupDrafter(texts, ngram_max, ngram_min), 0
        while done < len(response):
            left = len(response) - done
            k = policy.choose(drafter.length, drafter.doubt, min(len(drafter.found), left - 1))
            draft, real = drafter.found[:k], response[done : done + k]
            n = next((i for i in range(k) if draft[i] != real[i]), k)
            output = response[done : done + n + 1]
            found = read(*drafter.follow(mx.array(output, mx.uint32), mx.array(n), done))
            evidence = drafter.length, drafter.doubt
            policy.update(*evidence, k, *drafter.settle(output, k, found))
            done, tokens, passes = done + n + 1, tokens + n + 1, passes + 1
            drafted, accepted = drafted + k, accepted + n
    return tokens, passes, drafted, accepted, passes + alpha * drafted


def load_tokenizer(file):
    """-> encode(text): token ids. Raises OSError or ValueError."""
    with open(file, "rb") as f:
        model = f.read()
    try:
        if file.endswith(".json"):
            tokenizer = tokenizers.Tokenizer.from_buffer(model)
            return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        encode = sentencepiece.SentencePieceProcessor(model_proto=model).encode
        encode("")  # it takes an empty file for a model
        return encode
    except Exception:  # tokenizers raises nothing else
        what = "a SentencePiece model (spiece.model) or a tokenizer.json"
        raise ValueError(f"{file} is not {what}") from None


def read_answers(file, encode):
    """JSON lines -> [(prompt ids, response ids)]. Raises OSError or ValueError."""
    answers = []
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                answer = json.loads(line)
                texts = answer["prompt"], answer.get("response", answer.get("answer"))
                if not all(isinstance(text, str) for text in texts):
                    raise TypeError
                prompt, response = map(encode, texts)
                answers.append((prompt, [*response, EOS]))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ValueError(
                    f'{file}, line {number}: not JSON with texts "prompt" and "response"'
                ) from None
    if not answers:
        raise ValueError(f"{file} has no answers in it")
    return answers


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, alpha = parser.add_argument, command.between(0, 1e6, float)
    add("files", nargs="+", metavar="FILE", help="JSON lines")
    add("--tokenizer", required=True, metavar="T", help="a spiece.model or a tokenizer.json")
    add("--alpha", type=alpha, nargs="+", default=[0.15], metavar="A", help="0 to 1e6 (0.15)")
    add("--seam", action="store_true", help="prompt and response are two texts")
    add("--json", action="store_true", help="a list with an object per FILE and A")
    args = command.parse(parser)
    encode = load_tokenizer(args.tokenizer)
    files = [(file, read_answers(file, encode)) for file in args.files]
    results = []
    for file, answers in files:
        for alpha in args.alpha:
            tokens, passes, drafted, accepted, cost = replay(answers, alpha, args.seam)
            results.append(
                {
                    "file": file,
                    "alpha": alpha,
                    "tokens_per_pass": tokens / passes,
                    "drafted_per_pass": drafted / passes,
                    "acceptance": accepted / max(drafted, 1),
                    "speed": tokens / cost,
                }
            )
            if not args.json:
                row = (f"{k} {v:.3f}" for k, v in results[-1].items() if k not in ("file", "alpha"))
                print(f"{file}, alpha {alpha}:", ", ".join(row), flush=True)
    if args.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    sys.exit(command.run("replay.py", main))

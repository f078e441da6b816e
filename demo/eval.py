"""Held-out edits: how many does a demo checkpoint get exactly right (greedy), and how many drafted
tokens are accepted?

    python demo/eval.py [FOLDER] [--draft FOLDER] [--count 80]

`edits.jsonl` has 80 edits for each length limit (up_to: words of the text; words: its real length),
made like the training's from sentences that are not in it. The answer is what a regular expression
says, not what a model wrote.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from decoder import Decoder, SpeculativeDecoder  # noqa: E402
from model import load  # noqa: E402
from prompt_lookup import PromptLookupDecoder  # noqa: E402


def main(args):
    model, tokenizer = load(args.model)
    decoders = {"plain": Decoder(model)}
    if not args.plain:
        draft = load(args.draft)[0]
        decoders["draft model"] = SpeculativeDecoder(model, draft, num_draft=4, fixed_draft=True)
        decoders["prompt lookup"] = PromptLookupDecoder(model)
    lengths = {}
    for line in open(HERE / "edits.jsonl"):
        edit = json.loads(line)
        lengths.setdefault(edit["up_to"], []).append(edit)
    total = {name: [0, 0, 0, 0] for name in decoders}  # tokens, passes, drafted, accepted
    different = 0
    for length, edits in lengths.items():
        edits, right = edits[: args.count], 0
        for edit in edits:
            ids, texts = tokenizer(edit["prompt"]).input_ids, []
            for name, decoder in decoders.items():
                stream = decoder.stream(ids, max_tokens=2 * len(ids))
                texts.append([token.id for token in stream])
                s = stream.stats
                for i, n in enumerate((s.tokens, s.passes, s.drafted, s.accepted)):
                    total[name][i] += n
            different += any(text != texts[0] for text in texts)
            right += tokenizer.decode(texts[0]) == edit["answer"]
        share = right / len(edits)
        print(f"up to {length} words: {right} of {len(edits)} exactly right ({share:.0%})")
    for name, (tokens, passes, drafted, accepted) in total.items():
        print(f"{name}: {tokens / passes:.2f} tokens a pass", end="")
        print(f", {accepted / drafted:.0%} of {drafted} drafted accepted" if drafted else "")
    print(f"{different} texts differ between the decoders")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(HERE / "t5-demo"))
    parser.add_argument("--draft", default=str(HERE / "t5-demo-draft"))
    parser.add_argument("--count", type=int, default=80, help="Edits of each length.")
    parser.add_argument("--plain", action="store_true", help="Only how many are right.")
    main(parser.parse_args())

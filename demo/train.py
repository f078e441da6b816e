"""Trains the demo checkpoints: a small T5 that edits text, and a smaller one that drafts for it.

The task: `replace A with B: TEXT` -> TEXT with every whole word A (exact case) written as B. Almost
all of the answer stands in the prompt, and what does not (B) stands there too, elsewhere.

    python demo/train.py text /usr/share/wordnet    # -> corpus.txt, spiece.model, tokenizer
    python demo/train.py target --minutes 240       # from random weights, or on from --init FOLDER
    python demo/train.py draft --init work/target --minutes 20    # the target with fewer layers
    python demo/eval.py work/target --draft work/draft            # with this project's decoders

Everything is read from and written to --work. Needs torch, transformers, sentencepiece and
protobuf; a CPU is enough. SentencePiece is not reproducible to the bit: to go on from the shipped
checkpoints use --init with them, which brings their tokenizer along.

The text is the glosses and examples of WordNet 3.0 (Debian package wordnet-base, files data.noun,
data.verb, data.adj and data.adv), a sentence a line; 2,000 sentences are held out, and
`edits.jsonl` is made of them. WordNet's licence is in WORDNET-LICENSE.

The checkpoints that are shipped were trained by this recipe with a faster implementation of the
same forward pass, loss and optimizer (fused passes for one AVX-512 core; figures in README.md).
"""

import argparse
import copy
import json
import os
import random
import re
import shutil
import time
from pathlib import Path

HERE = Path(__file__).parent
WORD = re.compile(r"[A-Za-z]{2,}")
COPY_UNTIL = 24  # from scratch: random sequences of this length must be copied before text follows


def sentences(folder):
    """One sentence for each gloss and each example of WordNet."""
    for part in ("noun", "verb", "adj", "adv"):
        for line in open(f"{folder}/data.{part}", encoding="latin-1"):
            if line.startswith("  "):  # the licence
                continue
            gloss = line.split("|", 1)[1].strip()
            examples = re.findall(r'"([^"]+)"', gloss)
            definition = re.sub(r'"[^"]*"(\s*-[^;]*)?', "", gloss)
            definition = re.sub(r"\s*;\s*(;|$)", "", definition).strip(" ;")
            for s in [definition, *examples]:
                s = s.strip()
                if len(s) > 15:
                    yield s[0].upper() + s[1:] + ("" if s[-1] in ".!?" else ".")


def make_text(wordnet, work):
    """corpus.txt, spiece.model and transformers' tokenizer (4,000 ids, no sentinels)."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    from transformers import T5Tokenizer

    text = list(sentences(wordnet))
    random.Random(0).shuffle(text)
    (work / "corpus.txt").write_text("\n".join(text))
    sentencepiece.SentencePieceTrainer.train(
        input=str(work / "corpus.txt"),
        model_prefix=str(work / "spiece"),
        vocab_size=4000,
        model_type="unigram",
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        eos_piece="</s>",
        unk_piece="<unk>",
        normalization_rule_name="nmt_nfkc",
        required_chars="".join(map(chr, range(33, 127))),
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((work / "spiece.model").read_bytes())
    T5Tokenizer(
        vocab=[(p.piece, p.score) for p in proto.pieces],
        _spm_precompiled_charsmap=proto.normalizer_spec.precompiled_charsmap,
        extra_ids=0,
        model_max_length=100000,
    ).save_pretrained(work / "tokenizer")


class Examples:
    """Random examples: (prompt ids, answer ids, weight of each answer token in the loss)."""

    def __init__(self, work, tokenizer, seed):
        self.tokenizer = tokenizer
        text = (work / "corpus.txt").read_text().split("\n")
        random.Random(1).shuffle(text)
        text = [" ".join(s.split()) for s in text]
        self.held_out = text[:2000]
        held_out = set(self.held_out)
        self.train = [s for s in text[2000:] if s not in held_out]
        self.words = sorted({w for s in self.train for w in WORD.findall(s)})
        self.random, self.ids_of = random.Random(seed), {}
        self.colon = [tokenizer.convert_tokens_to_ids(":")]

    def ids(self, word):
        """No token crosses a space, so that a text's ids are its words' ids."""
        if word not in self.ids_of:
            self.ids_of[word] = self.tokenizer.encode(word, add_special_tokens=False)
        return self.ids_of[word]

    def edit(self, words, a, b):
        """A replacement's tokens and the two tokens after one weigh 2: that is where errors happen,
        the model would copy A, or has lost the context by which it finds its place. (At 4 and 3 it
        replaces words that are not A.)"""
        x = self.ids("replace") + self.ids(a) + self.ids("with") + self.ids(b) + self.colon
        y, weights, after, pattern = [], [], 0, re.compile(rf"\b{a}\b")
        for word in words:
            x = x + self.ids(word)
            new = pattern.sub(b, word)
            for token in self.ids(new):
                y.append(token)
                weights.append(2.0 if new != word or after > 0 else 1.0)
                after -= 1
            if new != word:
                after = 2
        return x + [1], y + [1], weights + [2.0 if after > 0 else 1.0]

    def passage(self, source, limit):
        """Random sentences, up to `limit` words."""
        out = []
        while len(out) < limit:
            s = self.random.choice(source).split()
            if out and len(out) + len(s) > limit:
                break
            out += s
        return out

    def text(self):
        """An edit of text; one in twelve names a word that is not there."""
        r = self.random
        limit = r.randint(4, r.choice((15, 25, 40, 60, 100, 100)))
        words = self.passage(self.train, limit)[: limit + 15]
        found = WORD.findall(" ".join(words))
        if not found:
            return self.text()
        u = r.random()
        if u < 0.08:
            a = r.choice(self.words)
        elif u < 0.35:  # a word that occurs more than once
            a = r.choice(sorted(w for w in set(found) if found.count(w) > 1) or found)
        else:
            a = r.choice(found)
        b = r.choice(self.words) if r.random() < 0.93 else r.choice(found)
        if a[0].isupper():
            b = b.capitalize()
        if u >= 0.08 and r.random() < 0.3:  # more of A
            for _ in range(r.randint(1, 1 + len(words) // 10)):
                words[r.randrange(len(words))] = a
        return self.edit(words, a, b)

    def random_words(self):
        """An edit of random words, A among them often. A small alphabet: the last token alone does
        not tell where to copy from, as in text after `the`."""
        r = self.random
        n = r.randint(4, r.choice((10, 20, 40)))
        alphabet = [r.choice(self.words) for _ in range(r.randint(3, max(4, n)))]
        a, b, share = r.choice(self.words), r.choice(self.words), r.choice((0.1, 0.2, 0.4))
        return self.edit([a if r.random() < share else r.choice(alphabet) for _ in range(n)], a, b)

    def random_tokens(self, n, alphabet=None):
        """A sequence of n random tokens to copy, over a small alphabet or (None) all tokens."""
        r, size = self.random, len(self.tokenizer)
        alphabet = [r.randrange(3, size) for _ in range(alphabet)] if alphabet else range(3, size)
        x = [r.choice(alphabet) for _ in range(n)] + [1]
        return x, x, [1.0] * len(x)

    def any(self):
        r, u = self.random, self.random.random()
        if u < 0.72:
            return self.text()
        if u < 0.9:
            return self.random_words()
        n = r.randint(6, r.choice((40, 80, 160)))
        return self.random_tokens(n, r.randint(max(4, n // 3), max(6, min(n, 64))))

    def batches(self, example, budget):
        """Endless batches of examples of about the same length, `budget` tokens each. The shapes
        are few: oneDNN prepares the matrix products of each new shape."""
        waiting = {}
        while True:
            x, y, weights = example()
            n = max(len(y), len(x) - 16) + 15 & -16
            rows = waiting.setdefault(n, [])
            rows.append((x, y, weights))
            if len(rows) == max(1, budget // (2 * n + 16)):
                yield collate(waiting.pop(n), n + 16, n)


def collate(rows, s, t):
    """Examples -> prompts (B, s), answers (B, t), weights (B, t); padded with 0."""
    import torch

    def pad(lists, n, zero):
        return torch.tensor([list(a) + [zero] * (n - len(a)) for a in lists])

    x, y, weights = zip(*rows, strict=True)
    return pad(x, s, 0), pad(y, t, 0), pad(weights, t, 0.0)


def logits(model, x, y):
    """(B, s), (B, t) ids -> (B, t, vocab)"""
    start = y.new_zeros(len(y), 1)
    inputs = {"input_ids": x, "attention_mask": (x != 0).long()}
    return model(**inputs, decoder_input_ids=y.roll(1, 1).index_fill(1, start[0], 0)).logits


def exactly_right(model, tokenizer, count):
    """Share of `count` held-out edits of each length that greedy decoding gets exactly right: every
    token is the likeliest one after the right ones before it."""
    import torch

    groups = {}
    for line in open(HERE / "edits.jsonl"):
        edit = json.loads(line)
        x, y = (tokenizer.encode(edit[k]) for k in ("prompt", "answer"))
        groups.setdefault(edit["up_to"], []).append((x, y, [1.0] * len(y)))
    result = {}
    for length, rows in groups.items():
        rows, right = rows[:count], 0
        for i in range(0, len(rows), 20):
            part = rows[i : i + 20]
            x, y, w = collate(part, *(max(len(row[k]) for row in part) for k in (0, 1)))
            with torch.no_grad():
                ok = logits(model, x, y).argmax(-1) == y
            right += (ok | (w == 0)).all(1).sum().item()
        result[length] = right / len(rows)
    return result


def save(model, tokenizer, folder):
    """The folder appears whole or not at all."""
    new = folder.with_name(f"{folder.name}.new")
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(new, folder)


def make_draft(target, encoder_layers):
    """A T5 with the target's first encoder layers and one decoder layer: the self-attention of the
    target's first (it looks at the tokens before), the rest of its last (it finds the place in the
    prompt). Untrained, its likeliest token is right 8 times in 10 (2 encoder layers: 7)."""
    config = copy.deepcopy(target.config)
    config.num_layers, config.num_decoder_layers = encoder_layers, 1
    draft, weights = type(target)(config), target.state_dict()
    last = target.config.num_decoder_layers - 1
    draft.load_state_dict(
        {
            name: weights[re.sub(r"^(decoder.block.)0(.layer.[12])", rf"\g<1>{last}\2", name)]
            for name in draft.state_dict()
        }
    )
    return draft


def train(args):
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.init or args.work / "tokenizer")
    examples = Examples(args.work, tokenizer, args.seed)
    if args.init:
        model = T5ForConditionalGeneration.from_pretrained(args.init)
    else:
        config = T5Config(
            vocab_size=4032,  # the tokenizer's 4,000, padded
            d_model=128,
            d_kv=32,
            num_heads=4,
            d_ff=512,
            num_layers=3,
            feed_forward_proj="relu",
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
    if args.what == "draft":
        model = make_draft(model, args.encoder_layers)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    edits = examples.batches(examples.any, args.budget)
    # A T5 of this size learns a language model from text and does not copy for a long time. Random
    # sequences first, short ones that grow, teach copying in about 1,500 steps; text then follows.
    scratch, n, right = not args.init, 6, 0.0
    seconds, step, began, best = 0.0, 0, time.time(), -1.0
    while (done := seconds / 60 / args.minutes) < 1:
        # constant for a while, then linearly to zero: most of the gain comes while it falls
        falling = 1 if done < args.hold else (1 - done) / (1 - args.hold)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 200) * falling
        if scratch:
            length = examples.random.randint(max(3, n // 2), n)
            rows = max(1, args.budget // (2 * length + 2))
            batch = [examples.random_tokens(length) for _ in range(rows)]
            x, y, weights = collate(batch, length + 1, length + 1)
        else:
            x, y, weights = next(edits)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = logits(model, x, y)
        losses = cross_entropy(z.flatten(0, 1).float(), y.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        step += 1
        if scratch:
            right = 0.95 * right + 0.05 * (z.argmax(-1) == y).float().mean().item()
            if right > 0.96:
                n, right = n + 2, 0.8
                scratch = n < COPY_UNTIL
        # a step that took longer than 2 s was interrupted
        seconds, began = seconds + min(2.0, time.time() - began), time.time()
        if step % args.every == 0:
            share = exactly_right(average.module, tokenizer, 20)
            right_now = " ".join(f"{k}: {v:.2f}" for k, v in share.items())
            state = f"copying {n}" if scratch else f"exactly right {right_now}"
            print(f"{seconds / 60:.1f} min, step {step}: loss {loss:.3f}, {state}", flush=True)
            if sum(share.values()) > best:
                best = sum(share.values())
                save(average.module, tokenizer, args.work / f"{args.what}-best")
            began = time.time()
    save(average.module, tokenizer, args.work / args.what)
    print("exactly right, of 80 each:", exactly_right(average.module, tokenizer, 80))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["text", "target", "draft"])
    parser.add_argument("wordnet", nargs="?", help="text: the folder with data.noun and so on.")
    parser.add_argument("--work", type=Path, default=Path("work"), help="Folder of the files.")
    parser.add_argument("--init", help="The checkpoint to go on from; the draft's target.")
    parser.add_argument("--minutes", type=float, default=240, help="Length of the schedule.")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="Highest learning rate.")
    parser.add_argument("--hold", type=float, default=0.2, help="Share of the time at that rate.")
    parser.add_argument("--budget", type=int, default=4096, help="Tokens in a step.")
    parser.add_argument("--every", type=int, default=250, help="Steps between evaluations.")
    parser.add_argument("--encoder-layers", type=int, default=3, help="Of the draft.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    if args.what == "text":
        if not args.wordnet:
            parser.error("text needs WordNet's folder, e.g. /usr/share/wordnet")
        make_text(args.wordnet, args.work)
    elif args.what == "draft" and not args.init:
        parser.error("draft needs --init TARGET")
    else:
        train(args)

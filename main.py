"""Write text with a T5 in fewer passes: `python main.py --prompt "..." --color`."""

import command

if __name__ == "__main__":
    command.begin()

import argparse
import functools
import json
import os
import sys
import warnings
from copy import copy
from itertools import chain

import jobs
import logits_options
import ranks
from command import between
from text import TextStream, encode, encode_chat, read_text, unknown, unknown_line, with_one_end

DEFAULT_MODEL = os.path.join(os.path.dirname(os.path.realpath(__file__)), "demo", "t5-demo")
DEFAULT_PROMPT = (
    "replace cat with dog: A cat was asleep in the sun near the kitchen window. Two small birds"
    " landed on the wall outside and began to sing. The cat opened one eye, looked at them for a"
    " moment, and decided that it was much too warm to chase anything before dinner."
)
# An underline, since hue alone is lost on some readers; magenta contrasts with black and white.
DRAFTED, RESET = "\033[4;35m", "\033[0m"


def parse_arguments(argv=None):
    """The options, checked together; which ones have no effect is said on standard error."""
    parser = argparse.ArgumentParser(
        usage="main.py [options]",
        description="Write text with a T5 or a model of mlx-lm. M is a folder or a Hugging Face id,"
        " FILE may be -, standard input. Defaults in parentheses.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26),
        allow_abbrev=False,
    )

    def number(*names, default, help, low=0, high=2**31 - 1, kind=int, auto=False):
        help = f"{help}, {low} to {high} ({'auto' if auto else default})"
        type = between(low, high, kind, auto)
        add(*names, type=type, default=default, metavar="N", help=help)

    add = (group := parser.add_argument_group("text")).add_argument
    model = "the target model (demo/t5-demo)"
    add("--model", "--model-name", default=DEFAULT_MODEL, metavar="M", help=model)
    add("--adapter-path", metavar="FOLDER", help="LoRA weights for the target model (mlx-lm)")
    add("--system", metavar="TEXT", help="what the chat template says as the system (mlx-lm)")
    raw = "--no-chat-template", "--ignore-chat-template"
    add(*raw, action="store_true", help="the prompt as it is, without the template (mlx-lm)")
    number("-m", "--max-tokens", default=200, help="at most N tokens")
    add = group.add_mutually_exclusive_group().add_argument
    example = f"the prompt, or - ({DEFAULT_PROMPT[:30]} …)"
    add("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help=example)
    add("--prompt-file", metavar="FILE", help="a file with the prompt")
    add("--prompts-file", metavar="FILE", help='lines of {"prompt": TEXT}; one JSON result each')
    add = parser.add_argument_group("many prompts").add_argument
    add("--output", metavar="PATH", help="append the results to PATH; what it has is skipped")
    add("--data-parallel", action="store_true", help="with mlx.launch: each process takes prompts")
    add = parser.add_argument_group("drafting").add_argument
    add("--draft-model", "--draft-model-name", metavar="M", help="a smaller model that drafts")
    names = "-n", "--num-draft", "--n-draft", "--num-draft-tokens"
    number(*names, default=None, auto=True, help="draft at most N tokens")
    add("--fixed-draft", action="store_true", help="draft N (10) whether or not it pays")
    number("--ngram-max", default=16, low=1, high=255, help="longest n-gram")
    number("--ngram-min", default=1, low=1, high=255, help="shortest n-gram")
    add("--reference", metavar="FILE", help="another text to look up drafts in")
    cost = "a draft token's cost, in passes, 0 to 1000000 (the model's)"
    add("--alpha", type=between(0, 10**6, float), metavar="N", help=cost)
    number("--delta", default=0, high=1, kind=float, help="lenience: faster, other text")
    add("--regular-decode", action="store_true", help="plain decoding, without drafts")
    add = parser.add_argument_group("sampling").add_argument
    number("--temp", default=0, high=10**6, kind=float, help="temperature, 0: no sampling")
    number("--top-p", default=1, low=1e-6, high=1, kind=float, help="nucleus, 1: all tokens")
    number("--top-k", default=0, help="only the N likeliest, 0: all")
    number("--seed", default=0, high=2**32 - 1, help="another seed, another text")
    logits_options.add_options(parser.add_argument_group("logits").add_argument)
    add = parser.add_argument_group("output").add_argument
    add("--color", action=argparse.BooleanOptionalAction, help="mark drafted text (on terminals)")
    add("--compare", action="store_true", help="plain decoding, too: both times, their ratio")
    add("--json", action="store_true", help="one JSON object instead of the text")

    args = command.parse(parser, argv)
    args.json |= args.prompts_file is not None
    args.mode = "prompt-lookup" if args.draft_model is None else "speculative"
    args.mode = "regular" if args.regular_decode else args.mode
    if args.ngram_min > args.ngram_max:
        parser.error(f"--ngram-min {args.ngram_min} is above --ngram-max {args.ngram_max}")
    names = "prompt", "prompt_file", "prompts_file", "reference"
    from_input = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) == "-"]
    if len(from_input) > 1:
        parser.error(f"{' and '.join(from_input)}: only one text can be standard input")
    for name in ("output", "data_parallel"):
        if getattr(args, name) and args.prompts_file is None:
            parser.error(f"--{name.replace('_', '-')} needs --prompts-file")
    lookup = ["ngram_max", "ngram_min", "reference"]
    drafting = ["draft_model", "num_draft", "fixed_draft", "alpha", "delta", *lookup]
    for names, where in [
        (drafting * args.regular_decode, "with --regular-decode"),
        (lookup * (args.mode == "speculative"), "with --draft-model"),
        (["top_p", "top_k", "seed"] * (args.temp == 0), "at --temp 0"),
        (["alpha"] * args.fixed_draft, "with --fixed-draft"),
        (["system"] * args.no_chat_template, "with --no-chat-template"),
        (["color"] * args.json, "on JSON"),
    ]:
        for name in names:
            if getattr(args, name) != parser.get_default(name):
                command.say(f"note: --{name.replace('_', '-')} has no effect {where}")
    return args


def read_prompts(args):
    """[(where it stands, prompt)]"""
    if args.prompts_file is not None:
        return jobs.read_prompts(args.prompts_file)
    path = "-" if args.prompt == "-" else args.prompt_file
    return [("--prompt", args.prompt) if path is None else (path, read_text(path))]


def check_draft(*pairs):
    """ValueError unless the tokens are the same; how their tables are padded does not matter."""
    special = [
        {"eos": c.eos_ids, "start": c.start_id, "padding": t.pad_token_id} if c else {}  # mlx-lm's
        for c, t in pairs
    ]
    ours, theirs = ({**t.get_vocab(), **ids} for (_, t), ids in zip(pairs, special, strict=True))
    for name in sorted(name for name, _ in ours.items() ^ theirs.items())[:1]:
        found = f"{name!r} is {theirs.get(name)}, not {ours.get(name)}"
        raise ValueError(f"the draft model has other tokens than the target model: {found}")


def load(name, group, adapter_path=None):
    """-> a T5, or what mlx-lm loads, and its tokenizer."""
    import model

    if (kind := model.kind(name)).endswith("t5"):
        return with_one_end(*model.load(name, group))
    try:
        import lm
    except ImportError:
        raise ValueError(f"{name}: a {kind} model needs mlx-lm: pip install mlx-lm") from None
    if group:
        raise ValueError(f"{name}: only a T5 can be divided among ranks: use --data-parallel")
    return lm.load(name, adapter_path)


def load_models(args, group):
    """-> (encode, tokenizer, make): encode(where, text) -> ids; make[mode]() is a new decoder."""
    warnings.simplefilter("ignore")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from decoder import Decoder, SpeculativeDecoder
    from prompt_lookup import PromptLookupDecoder

    model, tokenizer = load(args.model, group, args.adapter_path)
    draft_model = None
    if args.mode == "speculative":
        draft_model, draft_tokenizer = load(args.draft_model, group)
        both = (model, tokenizer), (draft_model, draft_tokenizer)
        check_draft(*((getattr(m, "config", None), t) for m, t in both))
    models = (args.model, model), (args.draft_model, draft_model)
    for name, m in models * (args.mode != "regular" and args.num_draft != 0):
        if fixed := getattr(m, "fixed", ""):
            raise ValueError(f"{name}: its cache ({fixed}) cannot be rewound: use --regular-decode")
    reader = functools.partial(encode, tokenizer)
    if hasattr(model, "fixed"):
        chat = {"system": args.system, "template": not args.no_chat_template}
        reader = functools.partial(encode_chat, tokenizer, **chat)
    else:
        for name in ("system", "no_chat_template", "adapter_path"):
            if getattr(args, name):
                command.say(f"note: --{name.replace('_', '-')} has no effect on a T5")

    sampling = {n: getattr(args, n) for n in ("temp", "top_p", "top_k", "seed")}
    asked = logits_options.from_options(args, model.eos_ids)
    sampling |= {"logits_processors": asked} if asked else {}
    drafting = sampling | {
        n: getattr(args, n) for n in ("num_draft", "fixed_draft", "alpha", "delta")
    }
    ngrams = {"ngram_max": args.ngram_max, "ngram_min": args.ngram_min}
    eos = model.eos_ids
    make = {  # with copies: each decoder reads for itself, see lm.Rereader
        "regular": lambda: Decoder(copy(model), eos, **sampling),
        "prompt-lookup": lambda: PromptLookupDecoder(copy(model), eos, **ngrams, **drafting),
        "speculative": lambda: SpeculativeDecoder(copy(model), copy(draft_model), eos, **drafting),
    }
    return reader, tokenizer, make


def write(tokenizer, mode, stream, show=None):
    """Writes a stream's text, piece by piece -> the result, a dict, and a line of statistics."""
    text, ids, written = TextStream(tokenizer), [], ""
    for token in chain(stream, [None]):  # None: the text has ended
        ids += [token.id] if token else []
        for piece, drafted in text.push(token.id, token.drafted) if token else text.finish():
            written += piece
            if show:
                show(piece, drafted)
    s = stream.stats
    line = f"{mode}: {s.tokens} tokens, {s.passes} passes, {s.tokens_per_pass:.2f} tokens per pass"
    if mode != "regular":
        line += f", {s.accepted} of {s.drafted} drafted accepted ({s.acceptance_rate:.0%})"
    line += f", {s.tokens_per_second:.1f} tokens/s in {s.seconds:.3f} s"
    line += ", cut by --max-tokens\n" if s.stop == "length" else "\n"
    names = "tokens passes drafted accepted prompt_tokens seconds tokens_per_second stop".split()
    result = {"mode": mode, "text": written, "token_ids": ids}
    return result | {name: getattr(s, name) for name in names}, line


def run(args, color):
    group = ranks.join()
    if group and "-" in (args.prompt, args.prompt_file, args.prompts_file, args.reference):
        raise ValueError("mlx.launch does not pass the end of standard input on: name a file")
    prompts = ranks.share(lambda: read_prompts(args), group)
    reference = ranks.share(lambda: args.reference and read_text(args.reference), group)
    together, apart = (None, group) if args.data_parallel else (group, None)
    if apart:
        import checkpoint

        names = [args.model, args.adapter_path, *[args.draft_model] * (args.mode == "speculative")]
        for name in filter(None, names):
            ranks.same_checkpoint(functools.partial(checkpoint.find_folder, name), apart)
    encode, tokenizer, make = ranks.agree(lambda: load_models(args, together), apart)
    if not prompts:
        command.say(f"note: {args.prompts_file} has no prompts in it")
    texts, prompts = prompts, [encode(*prompt) for prompt in prompts]
    wanted = reference is not None and args.mode == "prompt-lookup"
    extra = {"reference": encode(args.reference, reference)} if wanted else {}
    lost = [unknown(tokenizer, text) for _, text in texts]
    everywhere = [*chain(*lost, unknown(tokenizer, reference) if wanted else [])]
    if everywhere:
        command.say(unknown_line(tokenizer, everywhere))
    if args.compare and prompts:  # the cost of first runs would fall on one of the two
        warm = {"prompt": prompts[0], "max_tokens": min(16, args.max_tokens)}
        list(make[args.mode]().stream(**warm, **extra))
        list(make["regular"]().stream(**warm))
    decoder, regular = make[args.mode](), make["regular"]()

    def show(piece, drafted=False):  # style and reset in one write, so that none is left on
        print(f"{DRAFTED}{piece}{RESET}" if color and drafted else piece, end="", flush=True)

    def answer(i):
        stream = decoder.stream(prompts[i], args.max_tokens, **extra)
        result, report = write(tokenizer, args.mode, stream, None if args.json else show)
        ranks.check_equal("texts", result["token_ids"], together)
        result["unknown"] = len(lost[i])
        if color and args.mode != "regular":
            report = f"{DRAFTED}drafted and accepted{RESET}, the target model's own\n{report}"
        if args.compare:
            plain, line = write(tokenizer, "regular", regular.stream(prompts[i], args.max_tokens))
            speedup = plain["seconds"] / result["seconds"] if result["seconds"] else 0.0
            same = plain["token_ids"] == result["token_ids"]
            result |= {"regular": plain, "identical": same, "speedup": speedup}
            verdict = "identical texts" if same else "the texts DIFFER"
            report += f"{line}speedup: {speedup:.2f}x, {verdict}\n"
        show("" if args.json else "\n")
        command.say("" if args.json else report, end="")
        return result

    if args.prompts_file is not None:
        jobs.answer_all(args, texts, answer, apart, group)
    else:
        result = answer(0)
        show(json.dumps(result) + "\n" if args.json else "")
    ranks.leave(group)


def end_line(color):
    """After Ctrl-C."""
    for terminal in [descriptor for descriptor in (1, 2) if os.isatty(descriptor)][:1]:
        os.write(terminal, f"{RESET * color}\n".encode())


def main(argv=None):
    """The command line -> its exit status, see `command.run`."""

    def start():
        if ranks.number():  # rank 0 speaks for all
            command.discard(sys.stdout)
            command.discard(sys.stderr)
        args = parse_arguments(argv)
        no_color = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        color = sys.stdout.isatty() and not no_color if args.color is None else args.color
        sys.stdout.reconfigure(errors="replace")  # type: ignore
        command.endings.append(lambda: end_line(color))
        run(args, color)

    return command.run("main.py", start)


if __name__ == "__main__":
    sys.exit(main())

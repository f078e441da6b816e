"""The command line, run as a user runs it: a process, its output, its exit status.

Most tests run main.py beside stand-ins for the model and the decoders (folder `fake`), which write
down what they were asked for and yield tokens that the test chose; so that each option is seen to
arrive, and the printed text can be checked to the character. The others run the demo models.
"""

import contextlib
import functools
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
DRAFT = str(ROOT / "demo" / "t5-demo-draft")
ON, OFF = "\033[4;35m", "\033[0m"
FIELDS = {
    *("mode", "text", "token_ids", "tokens", "passes", "drafted", "accepted"),
    *("prompt_tokens", "seconds", "tokens_per_second", "stop"),
}

FAKES = {
    "model.py": '''
import os
from types import SimpleNamespace


class Tokenizer:
    """One token per character; 0 pad, 1 EOS."""

    is_fast, eos_token_id, pad_token_id = True, 1, 0
    all_special_ids, added_tokens_decoder = [0, 1], {}

    def __init__(self, vocab):
        self.vocab = vocab

    def __call__(self, text, verbose=True):
        text.encode()  # as transformers' do, it refuses what is not Unicode
        return SimpleNamespace(input_ids=[ord(c) for c in text if c != " "] + [1])

    def encode(self, text):
        return self(text).input_ids

    def convert_ids_to_tokens(self, i):
        return chr(i)

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(map(chr, ids))

    def get_vocab(self):
        return self.vocab


def kind(path):
    return "t5"


def load(path, group=None):
    if path == "missing":
        raise ValueError("missing: there is no such folder")
    pad, start = (5, 0) if path == "other-pad" else (0, 3 if path == "other-start" else 0)
    eos = (2,) if path == "other-eos" else (1,)
    config = SimpleNamespace(eos_ids=eos, start_id=start)
    tokenizer = Tokenizer({"a": 0, "b": 1} if path == "other-tokens" else {"a": 0})
    tokenizer.pad_token_id = pad
    return SimpleNamespace(path=path, eos_ids=eos, config=config), tokenizer
''',
    "decoder.py": '''
import json
import os
import time
from typing import NamedTuple


class Token(NamedTuple):
    id: int
    drafted: bool


def log(**call):
    with open(os.environ["LOG"], "a") as file:
        print(json.dumps(call), file=file)


class Stats:
    def __init__(self, tokens, prompt, seconds):
        self.tokens = len(tokens)
        self.passes = sum(not drafted for _, drafted in tokens)
        self.accepted = self.tokens - self.passes
        self.drafted = 2 * self.accepted
        self.prompt_tokens, self.seconds = len(prompt), seconds
        self.stop = os.environ.get("STOP", "eos")
        self.tokens_per_second = self.tokens / seconds if seconds else 0.0
        self.tokens_per_pass = self.tokens / self.passes if self.passes else 0.0
        self.acceptance_rate = 0.5 if self.accepted else 0.0


class Decoder:
    """Yields the characters of $TEXT, those in capitals drafted."""

    seconds = 2.0

    def __init__(self, model, *args, **options):
        models = [m.path for m in (model, *args) if hasattr(m, "path")]
        log(new=type(self).__name__, models=models, **options)
        self.seconds = float(os.environ.get("SECONDS", self.seconds))

    def stream(self, prompt, max_tokens, reference=None):
        log(stream=type(self).__name__, prompt=prompt, max_tokens=max_tokens, reference=reference)
        drafts = type(self) is not Decoder
        tokens = [Token(ord(c), drafts and c.isupper()) for c in os.environ.get("TEXT", "abCDe")]
        if os.environ.get("DIFFER") and drafts:
            tokens.pop()
        return Stream(tokens[:max_tokens], prompt, self.seconds)


class Stream:
    def __init__(self, tokens, prompt, seconds):
        self.tokens, self.stats = tokens, Stats(tokens, prompt, seconds)

    def __iter__(self):
        while True:
            for token in self.tokens:
                time.sleep(float(os.environ.get("SLEEP", 0)))
                if token.id == ord("!"):
                    raise ValueError("the model's logits are not finite in float16")
                yield token
            if not os.environ.get("ENDLESS"):
                return


class SpeculativeDecoder(Decoder):
    seconds = 1.0
''',
    "checkpoint.py": """
from pathlib import Path as find_folder


def read_json(path):
    return {}
""",
    "prompt_lookup.py": """
from decoder import Decoder


class PromptLookupDecoder(Decoder):
    seconds = 0.5
""",
}


@pytest.fixture
def fake(tmp_path):
    """Runs main.py among the stand-ins; `calls()` is what they were asked for."""
    for name in (
        "main.py",
        "text.py",
        "jobs.py",
        "ranks.py",
        "command.py",
        "logits_options.py",
        "processors.py",
    ):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in FAKES.items():
        (tmp_path / name).write_text(text)
    log = tmp_path / "log"

    def command(*options, **env):
        ours = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "PYTHONUNBUFFERED")}
        env = {**ours, "LOG": str(log), **env}
        return {"args": [sys.executable, "main.py", *options], "cwd": tmp_path, "env": env}

    def run(*options, stdin=b"", **env):
        log.write_text("")
        return finished(**command(*options, **env), input=stdin)

    run.command, run.folder = command, tmp_path
    run.calls = lambda: [json.loads(line) for line in log.read_text().splitlines()]
    run.made = lambda: [call for call in run.calls() if "new" in call]
    run.streams = lambda: [call for call in run.calls() if "stream" in call]
    return run


def finished(**process):
    result = subprocess.run(capture_output=True, timeout=120, **process)
    result.out, result.err = result.stdout.decode(), result.stderr.decode()
    return result


def demo(*options, stdin=b"", **env):
    result = finished(
        args=[sys.executable, str(ROOT / "main.py"), *options],
        env=os.environ | env,
        input=stdin,
    )
    assert "Traceback" not in result.err
    return result


def here(*options):
    """The same in this process, which has imported everything already."""
    import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main.main(options)
        sys.stderr.flush()
    texts = {"out": out.buffer.getvalue().decode(), "err": err.buffer.getvalue().decode()}
    return SimpleNamespace(returncode=status, **texts)


PROMPT = "replace post with river: A small house near the post, and a post by the old house."


@functools.cache
def demo_json(*options):
    result = here("--json", "--prompt", PROMPT, "-m", "40", *options)
    assert result.returncode == 0, result.err
    return json.loads(result.out)


# Each option arrives


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"new": "PromptLookupDecoder", "num_draft": None, "fixed_draft": False}),
        ([], {"temp": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "delta": 0.0}),
        ([], {"ngram_max": 16, "ngram_min": 1}),
        (["--model", "big"], {"models": ["big"]}),
        (["--model-name", "big"], {"models": ["big"]}),
        (["--draft-model", "small"], {"new": "SpeculativeDecoder"}),
        (["--model", "big", "--draft-model", "small"], {"models": ["big", "small"]}),
        (["--model", "big", "--draft-model-name", "small"], {"models": ["big", "small"]}),
        (["-n", "4"], {"num_draft": 4}),
        (["-n", "auto"], {"num_draft": None}),
        (["--num-draft", "0"], {"num_draft": 0}),
        (["--n-draft", "7"], {"num_draft": 7}),
        (["--num-draft-tokens", "7"], {"num_draft": 7}),
        (["-n", "3", "--draft-model", "small"], {"num_draft": 3, "new": "SpeculativeDecoder"}),
        (["--fixed-draft"], {"fixed_draft": True}),
        (["--ngram-max", "5"], {"ngram_max": 5}),
        (["--ngram-min", "2"], {"ngram_min": 2}),
        (["--delta", "0.25"], {"delta": 0.25}),
        (["--delta", "0.25", "--draft-model", "small"], {"delta": 0.25}),
        (["--regular-decode"], {"new": "Decoder"}),
        (["--temp", "0.5"], {"temp": 0.5}),
        (["--temp", "1", "--top-p", "0.5"], {"top_p": 0.5}),
        (["--temp", "1", "--top-k", "5"], {"top_k": 5}),
        (["--temp", "1", "--seed", "5"], {"seed": 5}),
        (
            ["--temp", "1", "--seed", "5", "--regular-decode"],
            {"seed": 5, "temp": 1, "new": "Decoder"},
        ),
        (["--temp", "1", "--seed", "5", "--draft-model", "small"], {"seed": 5, "temp": 1}),
    ],
)
def test_decoder_options(fake, options, expected):
    result = fake(*options)
    assert result.returncode == 0
    assert not result.err.startswith("note")
    made = fake.made()[0]
    assert {name: made[name] for name in expected} == expected


def test_the_plain_decoder_of_a_comparison_samples_alike(fake):
    fake("--compare", "--temp", "1", "--seed", "5", "--top-k", "3", "--top-p", "0.5")
    plain = [call for call in fake.made() if call["new"] == "Decoder"]
    assert plain
    for call in plain:
        assert (call["temp"], call["seed"], call["top_k"], call["top_p"]) == (1, 5, 3, 0.5)


@pytest.mark.parametrize("options", [["-m", "2"], ["--max-tokens", "2"]])
def test_max_tokens(fake, options):
    assert fake(*options).out == "ab\n"
    assert fake.streams()[0]["max_tokens"] == 2
    fake()
    assert fake.streams()[0]["max_tokens"] == 200


def ids(text):
    return [*map(ord, text), 1]


def test_where_a_prompt_comes_from(fake):
    file = fake.folder / "prompt.txt"
    file.write_bytes("\ufeffé\nx\r\n".encode())  # a byte order mark, a last line break
    fake("--prompt", "hello")
    assert fake.streams()[0]["prompt"] == ids("hello")
    fake("--prompt-file", str(file))
    assert fake.streams()[0]["prompt"] == ids("é\nx")
    fake("--prompt", "-", stdin="é\n".encode())
    assert fake.streams()[0]["prompt"] == ids("é")
    fake("--prompt-file", "-", stdin=b"hi")
    assert fake.streams()[0]["prompt"] == ids("hi")
    fake()
    assert fake.streams()[0]["prompt"][:7] == ids("replace")[:-1]


def test_a_prompt_has_one_end_of_text(fake):
    fake("--prompt", "a\x01\x01")
    assert fake.streams()[0]["prompt"] == ids("a")


def test_reference(fake):
    (fake.folder / "reference.txt").write_text("earlier\n")
    fake("--reference", "reference.txt", "--compare")
    references = {(call["stream"], json.dumps(call["reference"])) for call in fake.streams()}
    assert ("PromptLookupDecoder", json.dumps(ids("earlier"))) in references
    assert ("Decoder", "null") in references


def test_options_without_effect_are_told(fake):
    (fake.folder / "r").write_text("x")
    for options, names in [
        (["--regular-decode", "--ngram-max", "3", "-n", "4"], ["num-draft", "ngram-max"]),
        (["--regular-decode", "--draft-model", "d"], ["draft-model"]),
        (["--regular-decode", "--delta", "1", "--fixed-draft"], ["fixed-draft", "delta"]),
        (["--draft-model", "d", "--ngram-min", "3"], ["ngram-min"]),
        (["--draft-model", "d", "--reference", "r"], ["reference"]),
        (["--top-p", "0.5", "--top-k", "4", "--seed", "1"], ["top-p", "top-k", "seed"]),
        (["--json", "--color"], ["color"]),
    ]:
        result = fake(*options)
        assert result.returncode == 0
        notes = [line for line in result.err.splitlines() if line.startswith("note: ")]
        assert [re.search("--([a-z-]+)", note)[1] for note in notes] == names


# What is printed


def test_text_on_standard_output_statistics_on_standard_error(fake):
    result = fake(TEXT="abCDe")
    assert result.out == "abCDe\n"
    (line,) = result.err.splitlines()
    for figure in [
        *("prompt-lookup", "5 tokens", "3 passes", "1.67 tokens per pass"),
        *("2 of 4 drafted", "50%", "10.0 tokens/s", "0.500 s"),
    ]:
        assert figure in line
    assert "max-tokens" not in line
    assert "max-tokens" in fake(STOP="length").err
    assert "drafted" not in fake("--regular-decode").err


def test_nothing_written_is_no_division_by_zero(fake):
    result = fake("--compare", TEXT="", SECONDS="0")
    assert (result.returncode, result.out) == (0, "\n")
    assert "0 tokens" in result.err and "0%" in result.err
    assert json.loads(fake("--json", "--compare", TEXT="", SECONDS="0").out)["speedup"] == 0


@pytest.mark.parametrize("options", [[], ["--draft-model", "d"]])
def test_color_marks_exactly_the_drafted_tokens(fake, options):
    for text in ["abCDe fG", "ABC", "abc", "aB\nCd"]:
        out = fake("--color", *options, TEXT=text).out
        style, marked = OFF, ""
        for part in re.split("(\033\\[[0-9;]*m)", out):
            if part.startswith("\033"):
                style = part
            else:
                marked += part if style == ON else part.lower()
        assert marked == text + "\n"
        assert re.sub("\033\\[[0-9;]*m", "", out) == text + "\n"
        assert out.count(ON) == out.count(OFF)


def test_color_is_explained(fake):
    assert f"{ON}drafted" in fake("--color").err
    assert ON not in fake("--color", "--regular-decode").err
    assert "\033" not in fake().err


def test_json(fake):
    result = fake("--json", TEXT="abCDe")
    assert result.err == ""
    assert result.out.count("\n") == 1
    assert json.loads(result.out) == {
        "mode": "prompt-lookup",
        "text": "abCDe",
        "token_ids": [ord(c) for c in "abCDe"],
        "tokens": 5,
        "passes": 3,
        "drafted": 4,
        "accepted": 2,
        "prompt_tokens": json.loads(result.out)["prompt_tokens"],
        "seconds": 0.5,
        "tokens_per_second": 10.0,
        "stop": "eos",
        "unknown": 0,
    }
    assert json.loads(fake("--json", "--regular-decode").out)["mode"] == "regular"
    assert json.loads(fake("--json", "--draft-model", "d").out)["mode"] == "speculative"
    assert json.loads(fake("--json", "--prompt", "abc").out)["prompt_tokens"] == 4


def test_compare(fake):
    result = fake("--compare")
    assert result.out == "abCDe\n"
    for figure in ["0.500 s", "2.000 s", "4.00x", "identical"]:
        assert figure in result.err
    assert "DIFFER" in fake("--compare", DIFFER="1").err

    result = json.loads(fake("--compare", "--json").out)
    assert result["speedup"] == 4 and result["identical"] is True
    assert result["regular"]["mode"] == "regular" and set(result["regular"]) == FIELDS
    assert set(result) == FIELDS | {"unknown", "regular", "identical", "speedup"}
    assert json.loads(fake("--compare", "--json", DIFFER="1").out)["identical"] is False


def test_a_comparison_warms_both_decoders_up(fake):
    """The cost of first runs is in neither time; the decoders that are timed know nothing yet."""
    fake("--compare")
    order = [(call.get("stream"), call.get("max_tokens")) for call in fake.streams()]
    assert [max_tokens for _, max_tokens in order] == [16, 16, 200, 200]
    assert {name for name, _ in order[:2]} == {name for name, _ in order[2:]}
    assert len(fake.made()) == 4


def test_many_prompts(fake):
    lines = [{"prompt": "one", "id": 7}, {"prompt": "tw\u2028o"}, {"prompt": "three"}]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (fake.folder / "in.jsonl").write_text(text + "\n\n", encoding="utf-8")
    result = fake("--prompts-file", "in.jsonl", "--compare")
    assert result.err == ""
    results = [json.loads(line) for line in result.out.splitlines()]
    assert [r["prompt_tokens"] for r in results] == [4, 5, 6]
    assert all(set(r) == FIELDS | {"unknown", "regular", "identical", "speedup"} for r in results)
    timed = [call for call in fake.streams() if call["max_tokens"] == 200]
    prompts = [call["prompt"] for call in timed if call["stream"] == "PromptLookupDecoder"]
    assert prompts == [ids("one"), ids("tw\u2028o"), ids("three")]


@pytest.mark.parametrize("content", ["", "\n", " \n\n"])
def test_no_prompts(fake, content):
    (fake.folder / "in.jsonl").write_text(content)
    for result in (
        fake("--prompts-file", "in.jsonl"),
        fake("--prompts-file", "-", stdin=content.encode()),
    ):
        assert (result.returncode, result.out) == (0, "")
        assert re.fullmatch("note: (in.jsonl|-) has no prompts in it\n", result.err)


def test_a_terminal_of_few_characters(fake):
    result = fake(TEXT="aé😀", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.out) == (0, "a??\n")


# On a terminal


def on_terminal(fake, *options, interrupt_at=None, **env):
    """Runs with a terminal for standard output and error -> (exit status, what it shows)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        **fake.command(*options, **{"TERM": "xterm", **env}),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux says so where all has been read
            break
        if not data:
            break
        shown += data
        if interrupt_at and interrupt_at in shown.decode(errors="replace"):
            process.send_signal(signal.SIGINT)
            interrupt_at = None
    os.close(ours)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


def test_a_terminal_has_color_unless_asked_not_to(fake):
    assert f"ab{ON}C" in on_terminal(fake)[1]
    assert "\033" not in on_terminal(fake, "--no-color")[1]
    assert "\033" not in on_terminal(fake, NO_COLOR="1")[1]
    assert "\033" not in on_terminal(fake, TERM="dumb")[1]
    assert f"ab{ON}C" in on_terminal(fake, "--color", NO_COLOR="1")[1]
    assert f"ab{ON}C" in on_terminal(fake, NO_COLOR="")[1]  # no-color.org: empty is unset


def test_progress(fake):
    (fake.folder / "in.jsonl").write_text('{"prompt": "x"}\n' * 4)
    status, shown = on_terminal(fake, "--prompts-file", "in.jsonl")
    assert status == 0
    assert re.findall(r"\[(#*) *\] (\d)/4", shown) == [
        ("#" * 7, "1"),
        ("#" * 15, "2"),
        ("#" * 22, "3"),
        ("#" * 30, "4"),
    ]


def test_interrupted_on_a_terminal(fake):
    env = {"ENDLESS": "1", "SLEEP": "0.02"}
    status, shown = on_terminal(fake, interrupt_at="e", **env)
    assert status == 130
    assert "Traceback" not in shown and "tokens" not in shown
    assert shown.rindex(OFF) > shown.rindex(ON)
    assert shown.endswith("\n")


# The end


def test_interrupted_in_a_pipe(fake):
    """Exit status 130, as a shell reports it; nothing on standard error; no style left on."""
    command = fake.command("--color", ENDLESS="1", SLEEP="0.01")
    process = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out = process.stdout.read(60)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    out += rest
    assert out.count(ON.encode()) == out.count(OFF.encode()) > 0


@pytest.mark.parametrize("options", [["--color"], ["--json"], ["--prompts-file", "in.jsonl"]])
def test_a_reader_that_leaves(fake, options):
    """`main.py | head -c 10`: the reader has all it wanted, which is no failure. Status 0."""
    (fake.folder / "in.jsonl").write_text('{"prompt": "x"}\n' * 100_000)
    many = {"ENDLESS": "1"} if options == ["--color"] else {"TEXT": "abCDe" * 20_000}
    process = subprocess.Popen(
        **fake.command(*options, **many), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(60), err) == (0, b"")


def test_a_reader_of_both_that_leaves(fake):
    command = fake.command("--color", ENDLESS="1")
    process = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(60) == 0


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_standard_error_that_takes_nothing(fake, where):
    if "full" in where and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    command = fake.command(TEXT="abc")
    shell = ["sh", "-c", f'"$@" {where}', "sh"]
    done = subprocess.run(**command | {"args": shell + command["args"]}, stdout=subprocess.PIPE)
    assert done.stdout.decode().strip() == "abc"
    assert done.returncode == 0  # the answer is whole
    command = fake.command("--prompt-file", "none")
    done = subprocess.run(**command | {"args": shell + command["args"]}, stdout=subprocess.PIPE)
    assert done.returncode == 2 and done.stdout == b""


@pytest.mark.parametrize("closed", ["<&- 2>&-", "<&-"])
def test_closed_standard_input(closed, request):
    """A model's file does not get the descriptor of a stream that is closed."""
    if closed == "<&-" and not request.config.getoption("--whole"):
        pytest.skip("--whole: without closed standard error, too")
    shell = ["sh", "-c", f'"$@" {closed}', "sh"]
    command = [sys.executable, str(ROOT / "main.py"), "--prompt", PROMPT, "-m", "3"]
    done = subprocess.run(shell + command, capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_standard_output_that_takes_nothing(fake):
    command = fake.command(TEXT="abc")
    with open("/dev/full", "w") as full:
        done = subprocess.run(**command, stdout=full, stderr=subprocess.PIPE)
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 2 and line.startswith("main.py: error") and "space" in line


def test_text_comes_as_it_is_written(fake):
    command = fake.command(TEXT="abc", ENDLESS="1", SLEEP="0.05")
    process = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    assert os.read(process.stdout.fileno(), 100)[:1] == b"a"
    watchdog.cancel()
    process.kill()
    process.communicate()


# Bad input: status 2 and one line that names what is wrong


def refused(result, *words):
    assert result.returncode == 2, result.err
    assert result.out == ""
    (line,) = result.err.splitlines()
    for word in ("error", *words):
        assert word in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-tokens", "-1"], ["max-tokens", "-1"]),
        (["-m", "many"], ["many"]),
        (["-n", "-1"], ["num-draft", "-1"]),
        (["-n", "some"], ["some"]),
        (["--ngram-max", "0"], ["ngram-max", "0"]),
        (["--ngram-min", "0"], ["ngram-min", "0"]),
        (["--ngram-min", "5", "--ngram-max", "4"], ["ngram-min 5", "ngram-max 4"]),
        (["--ngram-min", "17"], ["ngram-min 17", "ngram-max 16"]),
        (["--delta", "1.5"], ["delta", "1.5"]),
        (["--delta", "-0.1"], ["delta", "-0.1"]),
        (["--delta", "nan"], ["delta", "nan"]),
        (["--temp", "-1"], ["temp", "-1"]),
        (["--top-p", "0"], ["top-p", "0"]),
        (["--top-p", "1.1"], ["top-p", "1.1"]),
        (["--top-k", "-1"], ["top-k", "-1"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--seed", str(2**32)], ["seed", str(2**32)]),
        (["--prompt", "x", "--prompt-file", "y"], ["--prompt", "--prompt-file"]),
        (["--prompt", "x", "--prompts-file", "y"], ["--prompt", "--prompts-file"]),
        (["--prompt-file", "missing.txt"], ["missing.txt"]),
        (["--prompt-file", "."], ["."]),
        (["--prompt-file", ""], []),
        (["--prompt-file", "binary"], ["binary", "utf-8"]),
        (["--prompts-file", "missing.jsonl"], ["missing.jsonl"]),
        (["--prompts-file", "broken.jsonl"], ["broken.jsonl", "line 2"]),
        (["--prompts-file", "numbers.jsonl"], ["numbers.jsonl", "line 1"]),
        (["--prompts-file", "nested.jsonl"], ["nested.jsonl", "line 1"]),
        (["--prompts-file", "empty.jsonl"], ["empty.jsonl", "line 2", "empty"]),
        (["--reference", "missing.txt"], ["missing.txt"]),
        (["--reference", "-", "--prompt", "-"], ["--prompt and --reference", "standard input"]),
        (["--reference", "-", "--prompt-file", "-"], ["--prompt-file and --reference"]),
        (["--reference", "-", "--prompts-file", "-"], ["--prompts-file and --reference"]),
        (["--reference", "blank"], ["blank", "empty"]),
        (["--prompt", ""], ["empty"]),
        (["--prompt", "  "], ["empty"]),
        (["--prompt", "-"], ["empty"]),
        (["--model", "missing"], ["missing", "no such folder"]),
        (["--draft-model", "missing"], ["missing", "no such folder"]),
        (["--draft-model", "other-tokens"], ["token", "'b'", "1"]),
        (["--draft-model", "other-pad"], ["pad", "5"]),
        (["--draft-model", "other-start"], ["start", "3"]),
        (["--draft-model", "other-eos"], ["eos", "2"]),
        (["--unknown"], ["--unknown"]),
        (["--unknown\nwords"], ["--unknown words"]),
        *[([f"--{name}=--"], ["--"]) for name in ("temp", "model", "num-draft", "prompt-file")],
        *[(["--temp", value], ["temp", value]) for value in ("inf", "1e999", "nan", "1e7")],
        *[([name, str(10**20)], [name]) for name in ("-n", "-m", "--top-k", "--ngram-min")],
        (["--regular"], ["--regular"]),  # no abbreviations: a typo is not another option
        (["words"], ["words"]),
    ],
)
def test_bad_input(fake, options, words):
    (fake.folder / "binary").write_bytes(b"\xff\xfe\x00")
    (fake.folder / "blank").write_text("\n")
    (fake.folder / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    (fake.folder / "numbers.jsonl").write_text('{"prompt": 5}\n')
    (fake.folder / "nested.jsonl").write_text("[" * 100_000 + "\n")
    (fake.folder / "empty.jsonl").write_text('{"prompt": "x"}\n{"prompt": " "}\n')
    refused(fake(*options), *words)
    assert fake.streams() == []


def test_an_error_while_writing(fake):
    """What was written stands; then the error, in one line."""
    result = fake("--color", TEXT="aB!")
    assert (result.returncode, result.out) == (2, f"a{ON}B{OFF}")
    assert "float16" in result.err and len(result.err.splitlines()) == 1


def test_bytes_that_are_no_text(fake):
    refused(fake("--prompt", b"a\xff".decode(errors="surrogateescape")), "--prompt", "Unicode")
    for text in r"a \ud800", r"\udcff", r"b\udfff b":
        (fake.folder / "in.jsonl").write_text(f'{{"prompt": "{text}"}}\n')
        refused(fake("--prompts-file", "in.jsonl"), "line 1 of in.jsonl", "Unicode")


@pytest.mark.parametrize("options", [["--help"], ["-n", "-5"], ["--prompt-file", "missing"]])
def test_what_needs_no_model_imports_none(options):
    command = [sys.executable, "-X", "importtime", str(ROOT / "main.py"), *options]
    imported = finished(args=command).err
    assert "argparse" in imported
    assert not re.search(r"\| +(mlx|transformers|numpy|decoder|model)\b", imported)


def test_help_is_short_and_shows_defaults():
    text = demo("--help", COLUMNS="80").out
    assert len(text.splitlines()) < 65
    assert text.count("2147483647") == 3
    for default in ["(200)", "(auto)", "(16)", "(1)", "(0)", "(demo/t5-demo)", "(replace cat"]:
        assert default in text
    for values in [
        "0 to 1 ",
        "1 to 255 ",
        "0 to 4294967295 ",
        "FILE may be -",
        'like {"ID": BIAS}',
    ]:
        assert values in text


# The demo


def test_demo():
    result = demo(HF_HUB_OFFLINE="1")
    assert result.returncode == 0
    assert len(result.out) > 20 and result.out.endswith("\n")
    passes = re.fullmatch(r"prompt-lookup: \d+ tokens, (\d+) passes.*\n", result.err)[1]
    with_reference = here("--reference", str(ROOT / "demo" / "earlier.txt"))
    assert with_reference.out == result.out
    assert int(re.search(r"(\d+) passes", with_reference.err)[1]) < int(passes)


def test_demo_text_is_the_same_however_it_is_written():
    from transformers import AutoTokenizer

    regular, lookup = demo_json("--regular-decode"), demo_json("--compare")
    speculative = demo_json("--draft-model", DRAFT, "-n", "3")
    plain = here("--prompt", PROMPT, "-m", "40").out
    assert regular["token_ids"] == lookup["token_ids"] == speculative["token_ids"]
    assert lookup["regular"]["token_ids"] == regular["token_ids"] and lookup["identical"]
    assert lookup["passes"] < regular["passes"] and lookup["accepted"] > 0
    assert plain == regular["text"] + "\n"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo" / "t5-demo")
    assert regular["text"] == tokenizer.decode(regular["token_ids"], skip_special_tokens=True)


def test_demo_drafting_options_have_their_effect():
    short = demo_json("-n", "1", "--fixed-draft")
    assert short["tokens"] <= 2 * short["passes"]
    lenient = demo_json("--delta", "1", "-n", "8", "--fixed-draft")
    assert lenient["passes"] < short["passes"]
    assert lenient["accepted"] == lenient["drafted"] > 0


def test_demo_samples():
    hot = ["--temp", "3", "--seed", "1"]
    text = demo_json(*hot)["text"]
    assert text == demo_json(*hot, "--draft-model", DRAFT)["text"]
    assert demo_json(*hot, "--top-k", "1")["text"] == demo_json("--regular-decode")["text"] != text


def test_demo_names_what_it_does_not_know_of_long_and_odd_prompts():
    text = ("words and words " * 700) + "\x00\t\n😀 שלום <extra_id_0> </s>"
    result = demo("--prompt", "-", "-m", "5", stdin=text.encode())
    assert result.returncode == 0
    note, _ = result.err.splitlines()
    assert (
        note.startswith("note: ")
        and r"takes '\t', '\n' for a space (2 times)" in note
        and "'😀', " in note
    )


@pytest.mark.parametrize(
    "name", ["./t5-demoo", "demo/t5", "/none/t5", "../none", "~/t5", "a/b/t5", "demo/t5/", ""]
)
def test_a_folder_that_is_not_there(monkeypatch, name):
    """It is no id of a model, or lies in a folder that exists: no advice about the hub."""
    import checkpoint

    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match="^there is no such folder$"):
        checkpoint.find_folder(name)
    for id in "nobody/t5", "t5-demoo":
        with pytest.raises(ValueError, match="no such folder, and the Hugging Face hub did not"):
            checkpoint.find_folder(id)


def test_demo_refuses_what_is_no_model(tmp_path):
    refused(here("--model", str(tmp_path / "missing")), "missing")
    refused(here("--model", str(tmp_path)), str(tmp_path))
    refused(demo("--model", "nobody/nothing", HF_HUB_OFFLINE="1"), "nobody/nothing")
    refused(here("--prompt", " \n "), "empty")


def test_demo_refuses_a_draft_model_of_other_tokens(tmp_path):
    shutil.copytree(DRAFT, tmp_path / "draft")
    tokenizer = tmp_path / "draft" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["model"]["vocab"][100][0] += "x"
    tokenizer.write_text(json.dumps(content))
    refused(here("--draft-model", str(tmp_path / "draft")), "tokens", "not 100")

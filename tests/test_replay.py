"""benchmarks/replay.py: what it counts, against a replay in plain Python, and what it prints."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import replay  # noqa: E402

WORDS = [f"w{i}" for i in range(400)]
EOS = 1


def copying(seed, size=40):
    """Prompt of different words; the response copies pieces of it, no word twice, with changes."""
    rng = random.Random(seed)
    words = rng.sample(WORDS, 3 * size)
    prompt, others = words[:size], words[size:]
    response, i = [], 0
    while i < size:
        response += prompt[i : i + rng.randint(1, 9)]
        i = prompt.index(response[-1]) + 1
        change = rng.random()
        if change < 0.6:
            response.append(others.pop())
        if change < 0.3:  # instead of the prompt's word
            i += 1
    return prompt, response


def count(answers, k):
    """Tokens, passes, drafted, accepted with k draft tokens where there are so many: those behind
    the last word, which stands elsewhere once or never; if it is new, those behind the word in the
    place of which it stands, if there was a draft."""
    tokens = passes = drafted = accepted = 0
    for prompt, response in answers:
        text, at, draft, place = prompt + response, len(prompt), [], 0
        while at < len(text):
            known = text[:at]
            if known[-1] in known[:-1]:
                place = known.index(known[-1]) + 1
            elif not draft:
                place = at
            draft = known[place:][: min(k, len(text) - at - 1)]
            good = 0
            while good < len(draft) and draft[good] == text[at + good]:
                good += 1
            passes, drafted, accepted = passes + 1, drafted + len(draft), accepted + good
            at, place = at + good + 1, place + good + 1
        tokens += len(response)
    return tokens, passes, drafted, accepted


class Fixed:
    def __init__(self, k):
        self.k = k

    def __call__(self, ceiling, alpha):
        return self

    def choose(self, length, doubt, limit):
        return min(self.k, limit)

    def update(self, *args):
        pass


def ids(words):
    return [2 + WORDS.index(word) for word in words]


@pytest.mark.parametrize("k", [0, 1, 3, 24])
def test_counts_are_those_of_a_replay_in_plain_python(monkeypatch, k):
    monkeypatch.setattr(replay, "DraftLength", Fixed(k))
    answers = [(ids(p), [*ids(r), EOS]) for p, r in map(copying, range(6))]
    *counts, cost = replay.replay(answers, 0.25)
    assert tuple(counts) == count(answers, k)
    assert cost == pytest.approx(counts[1] + 0.25 * counts[2])
    tokens, passes, drafted, accepted = counts
    assert tokens == passes + accepted and accepted <= drafted <= k * passes
    assert (accepted > 0.5 * tokens) == (k >= 3)


def test_a_seam_ends_a_draft_from_the_prompt(monkeypatch):
    monkeypatch.setattr(replay, "DraftLength", Fixed(24))
    prompt = list(range(10, 20))
    answer = [(prompt, [18, 19, 30, 31, EOS])]
    # 18 -> 19 and what follows it: the response joined to it, or nothing
    assert replay.replay(answer, 0)[2] > 1 == replay.replay(answer, 0, seam=True)[2]


# As a process


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spiece")
    (folder / "words").write_text("\n".join(WORDS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words"),
        model_prefix=str(folder / "spiece"),
        model_type="word",
        vocab_size=len(WORDS) + 3,
        minloglevel=2,
    )
    return str(folder / "spiece.model")


def lines(path, answers, more=""):
    dumped = [json.dumps({"id": 7, "prompt": " ".join(p), "response": " ".join(r)})
              for p, r in answers]  # fmt: skip
    path.write_text("\n".join([*dumped, more]) + "\n")
    return str(path)


def run(*args):
    command = [sys.executable, str(ROOT / "benchmarks" / "replay.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_json(spiece, tmp_path):
    one = [copying(seed) for seed in range(4)]
    two = [(WORDS[:20], WORDS[100:120])]  # nothing to copy
    files = lines(tmp_path / "one.jsonl", one, "\n"), lines(tmp_path / "two.jsonl", two)
    done = run(*files, "--tokenizer", spiece, "--alpha", "0", "0.3", "50", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(done.stdout)
    assert [(r["file"], r["alpha"]) for r in results] == [
        (file, alpha) for file in files for alpha in (0, 0.3, 50)
    ]
    for r in results:
        assert set(r) == {
            *("file", "alpha", "tokens_per_pass", "drafted_per_pass", "acceptance", "speed")
        }
        assert r["speed"] * (1 + r["alpha"] * r["drafted_per_pass"]) == pytest.approx(
            r["tokens_per_pass"]
        )
        accepted = r["acceptance"] * r["drafted_per_pass"]
        assert r["tokens_per_pass"] == pytest.approx(1 + accepted)
        if r["file"] == files[1]:  # never drafted
            assert r["speed"] == 1 and r["acceptance"] == 0
    # Where a draft costs nothing, as many are drafted as there are.
    tokens, passes, drafted, accepted = count([(p, [*r, None]) for p, r in one], 24)
    expected = tokens / passes, drafted / passes, accepted / drafted, tokens / passes
    names = "tokens_per_pass", "drafted_per_pass", "acceptance", "speed"
    assert tuple(results[0][n] for n in names) == pytest.approx(expected)
    assert results[1]["speed"] > 1.3 and results[2]["speed"] == 1


def test_each_file_and_alpha_starts_anew(spiece, tmp_path):
    one = lines(tmp_path / "one.jsonl", map(copying, range(3)))
    two = lines(tmp_path / "two.jsonl", map(copying, range(3, 6)))
    options = "--tokenizer", spiece, "--json", "--alpha"
    both = json.loads(run(one, two, *options, "0.3", "0.1").stdout)
    alone = [json.loads(run(f, *options, a).stdout)[0] for f in (one, two) for a in ("0.3", "0.1")]
    assert both == alone


def test_a_line_for_each_file_and_alpha(spiece, tmp_path):
    file = lines(tmp_path / "one.jsonl", [copying(0)])
    done = run(file, "--tokenizer", spiece, "--alpha", "0", "0.2")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert all("speed" in line and file in line for line in done.stdout.splitlines())


def test_the_example_of_the_readme():
    """The demo's edits, whose key is "answer", with a tokenizer.json."""
    block = (
        (ROOT / "benchmarks" / "README.md").read_text().split("```\n$ python benchmarks/replay.py ")
    )
    command, *output = block[1].split("\n```")[0].split("\n")
    command = [sys.executable, "benchmarks/replay.py", *command.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == output


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "missing.jsonl"),
        ('{"prompt": "w1", "response": "w2"}\n{"prompt": ', "line 2"),
        ('{"prompt": "w1"}\n', "line 1"),
        ('{"prompt": "w1", "response": 3}\n', "line 1"),
        ('{"prompt": ["w1"], "response": "w2"}\n', "line 1"),
        ('\n["w1", "w2"]\n', "line 2"),
        ('{"prompt": "w1", "answer": null}\n', "line 1"),
        ("[" * 100_000, "line 1"),
        (b'{"prompt": "\xff", "response": "w2"}\n', "line 1"),
        ("", "no answers"),
    ],
)
def test_bad_files_are_one_line_and_status_2(spiece, tmp_path, content, says):
    file = tmp_path / ("missing.jsonl" if content is None else "bad.jsonl")
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run(str(file), "--tokenizer", spiece)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and says in done.stderr and str(file) in done.stderr


@pytest.mark.parametrize("alpha", ["-0.1", "nan", "inf"])
def test_a_bad_alpha_is_one_line_and_status_2(spiece, tmp_path, alpha):
    file = lines(tmp_path / "one.jsonl", [copying(0)])
    done = run(file, "--tokenizer", spiece, "--alpha", "0.1", alpha)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert repr(alpha) in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"no model"])
@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_a_bad_tokenizer_is_one_line_and_status_2(tmp_path, content, name):
    file = lines(tmp_path / "one.jsonl", [copying(0)])
    tokenizer = tmp_path / name
    if content is not None:
        tokenizer.write_bytes(content)
    done = run(file, "--tokenizer", str(tokenizer))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert str(tokenizer) in done.stderr

"""Many prompts and a file of answers: what is there is kept, what is missing is added, once."""

import json
import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest
from test_distributed import ROOT, finish, start

import jobs
from decoder import Decoder
from model import load

PROMPTS = [("", f"prompt {i}") for i in range(5)]


def run(path, prompts=PROMPTS, asked=None, **settings):
    def answer(i):
        if asked is not None:
            asked.append(i)
        return {"text": prompts[i][1].upper()}

    args = SimpleNamespace(output=str(path), **settings)
    jobs.answer_all(args, prompts, answer, None, None)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_byte_at_which_a_run_can_end(tmp_path):
    whole = tmp_path / "whole"
    lines, data = run(whole), whole.read_bytes()
    assert [line["text"] for line in lines] == [text.upper() for _, text in PROMPTS]
    for end in range(0, len(data), 7):
        part, asked = tmp_path / "part", []
        part.write_bytes(data[:end])
        run(part, asked=asked)
        assert part.read_bytes() == data
        assert asked == [*range(data[:end].count(b"\n"), len(PROMPTS))]


def test_other_prompts_and_settings_are_answered_anew(tmp_path):
    asked = []
    run(tmp_path / "out")
    changed = [*PROMPTS[:2], ("", "other"), *PROMPTS[3:], PROMPTS[0]]
    assert len(run(tmp_path / "out", changed, asked)) == 7
    assert asked == [2, 5]
    assert len(run(tmp_path / "out", seed=1)) == 12
    assert len(run(tmp_path / "out", seed=1, color=True)) == 12


@pytest.mark.parametrize(
    "content", ['{"text": "x"}\n', "notes\n", "[1]\nnotes\n", "notes", '{"a', "[" * 9999 + "\n"]
)
def test_a_file_of_something_else_is_not_touched(tmp_path, content):
    (tmp_path / "out").write_text(content)
    with pytest.raises(ValueError, match="line 1"):
        run(tmp_path / "out")
    assert (tmp_path / "out").read_text() == content


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in tmp_path / "pipe", "/dev/null", tmp_path:
        with pytest.raises(ValueError, match="no regular file"):
            run(path)


def test_a_full_disk_ends_in_one_line_and_is_resumed(tmp_path):
    script = f"""
import resource, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
import command, pathlib, test_jobs
sys.exit(command.run("x", lambda: test_jobs.run(pathlib.Path({str(tmp_path / "out")!r}))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and f"--output {tmp_path / 'out'}" in line
    assert (tmp_path / "out").stat().st_size == 150
    assert len(run(tmp_path / "out")) == 5


def test_two_runs_do_not_write_to_one_file(tmp_path):
    answers = jobs.Answers(tmp_path / "out", PROMPTS, {})
    with pytest.raises(ValueError, match="another process"):
        jobs.Answers(tmp_path / "out", PROMPTS, {})
    answers.file.close()


def test_killed_at_any_time(tmp_path, request):
    """kill -9 of one of two ranks (--whole: or of both), then again, until all is answered."""
    count, kills = (200, 20) if request.config.getoption("--whole") else (30, 1)
    lines = (ROOT / "demo" / "edits.jsonl").read_text().splitlines()[:count]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    out, chance = tmp_path / "out.jsonl", random.Random(0)
    options = ["--prompts-file", str(tmp_path / "in.jsonl"), "-m", "12"]
    command = [str(ROOT / "main.py"), *options, "--output", str(out), "--data-parallel"]
    for kill in range(kills):
        processes = start(tmp_path, 2, command)
        before = out.stat().st_size if out.exists() else 0
        while processes[0].poll() is None and (out.stat().st_size if out.exists() else 0) <= before:
            try:
                processes[0].wait(chance.random() / 10)
            except subprocess.TimeoutExpired:
                pass
        killed = [processes[1:], processes[:1], processes][kill % 3]
        for process in killed:
            process.send_signal(signal.SIGKILL)
        finish(processes)
        assert {p.returncode for p in processes if p not in killed} <= {0, 2}
    (status, _, shown), (other, *_) = finish(start(tmp_path, 2, command))
    assert status == other == 0 and f"{count}/{count}" in shown
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["index"] for answer in answers] == [*range(count)]
    model, tokenizer = load(ROOT / "demo" / "t5-demo")
    decoder = Decoder(model, model.eos_ids)
    for line, answer in zip(lines, answers, strict=True):
        ids = mx.array(tokenizer(json.loads(line)["prompt"]).input_ids, mx.uint32)
        assert answer["token_ids"] == [token.id for token in decoder.stream(ids, 12)]

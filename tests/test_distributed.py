"""main.py as several processes on this machine, connected by MLX's ring."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import ranks

ROOT = Path(__file__).resolve().parent.parent
DEMO = str(ROOT / "demo" / "t5-demo")
PROBE = """
import json, sys
import mlx.core as mx
from mlx.utils import tree_flatten
import ranks
from decoder import Decoder
from model import load
from prompt_lookup import PromptLookupDecoder
group = ranks.join()
model, tokenizer = load(sys.argv[1], group)
cache, token = model.start(mx.arange(2, 40, dtype=mx.uint32))
logits = model.decode(mx.concatenate([token, mx.arange(3, 10, dtype=mx.uint32)]), cache)
rows = model.start(mx.arange(2, 40, dtype=mx.uint32))[0]
tokens = mx.concatenate([token, mx.arange(3, 10, dtype=mx.uint32)])
one_by_one = mx.concatenate([model.decode(tokens[i : i + 1], rows) for i in range(8)])
prompt, texts = mx.arange(2, 90, dtype=mx.uint32), []
for decoder in Decoder(model, None), PromptLookupDecoder(model, None, 5, fixed_draft=True):
    texts.append([t.id for t in decoder.stream(prompt, 30)])
found = {"logits": logits.astype(mx.float32).tolist(), "sent": [], "differing": None}
found["same"] = mx.array_equal(logits, one_by_one).item() and texts[0] == texts[1]
found["nbytes"] = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
gather = mx.distributed.all_gather
def count(x, **options):
    found["sent"].append(x.nbytes)
    return gather(x, **options)
mx.distributed.all_gather, model.fewest = count, 1
mx.eval(model.decode(token, cache))
mx.distributed.all_gather = gather
if len(sys.argv) > 2:
    sys.path.append("benchmarks")
    import divergence
    prompts = divergence.make_prompts(int(sys.argv[2]))
    found["differing"] = divergence.measure(model, None, prompts, None, 20)
if not ranks.number():
    print(json.dumps(found))
ranks.leave(group)
"""


def ports(count):
    """Free ports of this machine, none of those that the system gives away by itself."""
    found = []
    while len(found) < count:
        try:
            socket.create_server(("127.0.0.1", port := random.randrange(10_000, 30_000))).close()
            found += [port] if port not in found else []
        except OSError:
            pass
    return found


def start(folder, size, command, folders=None):
    """The processes of all ranks; folders: where each of them runs."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports(size)]))
    processes = []
    for rank in range(size):
        env = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                cwd=folders[rank] if folders else ROOT,
                env=os.environ | (env if size > 1 else {"PYTHONPATH": str(ROOT)}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    return processes


def finish(processes, timeout=120):
    """(exit status, standard output, standard error) of each"""
    try:
        ends = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *map(bytes.decode, end)) for p, end in zip(processes, ends, strict=True)]


def together(folder, size, *options, folders=None):
    return finish(start(folder, size, [str(ROOT / "main.py"), *options], folders))


def probe(folder, size, *arguments):
    (status, out, err), *_ = finish(
        start(folder, size, ["-c", PROBE, *map(str, arguments)]), timeout=600
    )
    assert status == 0, err
    return json.loads(out)


def probe_here(model):
    """The same as one process."""
    before, out = sys.argv, io.StringIO()
    sys.argv = ["-c", str(model)]
    try:
        with contextlib.redirect_stdout(out):
            exec(PROBE, {})
    finally:
        sys.argv = before
    return json.loads(out.getvalue())


def error(found, expected):
    """The largest difference of the logits, relative to the largest one."""
    ours, theirs = (np.array(each["logits"]) for each in (found, expected))
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.fixture
def whole(request):
    if not request.config.getoption("--whole"):
        pytest.skip("takes long; --whole runs it")


def test_a_divided_model(tmp_path, request):
    """Two ranks (--whole: four, whose parts have to be added in one order) have the logits of one,
    the same bits in every pass, and send three sums of d_model floats a layer and token."""
    size = 4 if request.config.getoption("--whole") else 2
    alone, parts = probe_here(DEMO), probe(tmp_path, size, DEMO)
    assert error(parts, alone) < 1e-5
    assert parts["same"]
    assert parts["nbytes"] < 0.8 * alone["nbytes"]  # the embedding is whole
    config = json.loads(Path(DEMO, "config.json").read_text())
    assert parts["sent"] == [4 * config["d_model"]] * 3 * config["num_decoder_layers"]
    assert alone["sent"] == []


@pytest.mark.parametrize("quantize", [False, True])
def test_gated_and_quantized_models(tmp_path, quantize, whole):
    source = ROOT / "tests" / "golden" / "flan-t5"
    if quantize:
        from convert import convert

        convert(DEMO, str(tmp_path / "model"), quantize=True, group_size=32)
        source = tmp_path / "model"
    parts = probe(tmp_path, 2, source)
    assert error(parts, probe_here(source)) < (2e-2 if quantize else 1e-5)
    assert parts["same"]


def test_near_ties(tmp_path, whole):
    """200 prompts where two logits nearly tie all the time: no text differs from plain decoding."""
    sys.path.append(str(ROOT / "benchmarks"))
    import divergence

    divergence.write_checkpoint(tmp_path / "near", "128", 0)
    differing = probe(tmp_path, 2, tmp_path / "near", 200)["differing"]
    assert len(differing) == 2
    for different, accepted, _ in differing.values():
        assert different == 0 and accepted > 100


def test_peak_memory_of_a_rank(tmp_path, whole):
    sys.path.append(str(ROOT / "benchmarks"))
    import widen

    widen.write(Path(DEMO), tmp_path / "t5-small", "t5-small")
    script = str(ROOT / "benchmarks" / "machines.py")
    ends = finish(start(tmp_path, 2, [script, "--memory", str(tmp_path / "t5-small")]))
    for status, out, err in ends:
        assert status == 0, err
        share, peak = (float(word) for word in out.split() if word[0].isdigit())
        assert 100 < share < 180 and peak < 1.15 * share


def test_rank_0_alone_speaks(tmp_path):
    (status, out, err), other = together(tmp_path, 2, "--compare", "--json", "-m", "20")
    assert (status, err) == (0, "") and other == (0, "", "")
    assert json.loads(out)["identical"]


@pytest.mark.parametrize("options", [[], ["--data-parallel"]])
@pytest.mark.parametrize("case", ["missing", "weights", "tokenizer", "config", "heads"])
def test_an_error_of_any_rank_ends_all(tmp_path, case, options, request):
    if case == "heads" or (options and case != "tokenizer"):
        request.getfixturevalue("whole")
    size = 3 if case == "heads" else 2
    folders = [tmp_path / str(rank) for rank in range(size)]
    for rank, folder in enumerate(folders):
        if not (rank and case == "missing"):
            shutil.copytree(DEMO, folder / "model")
        folder.mkdir(exist_ok=True)
        (folder / "in.jsonl").write_text('{"prompt": "replace a with b: A cat."}\n')
    if case == "weights":
        with open(folders[1] / "model" / "model.safetensors", "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\0\0")
    elif case in ("tokenizer", "config"):
        name = {"tokenizer": "tokenizer.json", "config": "config.json"}[case]
        changed = folders[1] / "model" / name
        changed.write_text(changed.read_text() + "\n")
    command = ["--model", "model", "--prompts-file", "in.jsonl", *options]
    ends = together(tmp_path, size, *command, folders=folders)
    if case == "heads" and options:
        assert [status for status, _, _ in ends] == [0] * size
        return
    assert [status for status, _, _ in ends] == [2] * size
    assert [out for _, out, _ in ends] == [""] * size
    (line,) = ends[0][2].splitlines()
    words = {"missing": "rank 1", "heads": "4 heads"}
    assert words.get(case, "different checkpoints") in line
    assert all(err == "" for _, _, err in ends[1:])


def test_a_message_that_is_another_one_is_a_lost_connection(monkeypatch):
    """What comes over a lost connection may be what was in memory."""
    replies: list = []

    def gather(x, group):
        replies.append(np.array(x))
        other = replies[-3] if len(replies) > 2 and stale else replies[-1]
        return mx.array(np.concatenate([replies[-1], other]))

    monkeypatch.setattr(mx.distributed, "all_gather", gather)
    stale = False
    assert ranks.exchange({"a": 1}, "two") == [{"a": 1}] * 2
    stale = True
    with pytest.raises(ConnectionError, match="lost"):
        ranks.exchange({"a": 1}, "two")


def test_one_rank_of_mlx_launch(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("\n")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("MLX_RANK", "0")
    assert ranks.join() is None


def test_bad_options_are_told_once(tmp_path):
    ends = together(tmp_path, 2, "-m", "many")
    assert [status for status, _, _ in ends] == [2, 2]
    assert [len(err.splitlines()) for _, _, err in ends] == [1, 0]


@pytest.mark.parametrize("options", [[], ["--data-parallel"]])
def test_a_rank_that_dies_ends_all(tmp_path, options, request):
    if options:
        request.getfixturevalue("whole")
    (tmp_path / "in.jsonl").write_text('{"prompt": "replace a with b: A cat."}\n' * 2_000)
    command = [str(ROOT / "main.py"), "--prompts-file", str(tmp_path / "in.jsonl"), *options]
    processes = start(tmp_path, 2, [*command, "-m", "3", "--regular-decode"])
    assert processes[0].stdout.readline().startswith(b"{")
    processes[1].send_signal(signal.SIGKILL)
    status, _, err = finish(processes)[0]
    assert status == 2
    assert "connection" in err.splitlines()[-1] and "]" not in err.splitlines()[-1][:8]


def test_ranks_that_take_turns_write_what_one_writes(tmp_path, whole):
    lines = (ROOT / "demo" / "edits.jsonl").read_text().splitlines()[:200]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ["--prompts-file", str(tmp_path / "in.jsonl"), "-m", "40"]
    texts = []
    for size in 1, 2, 3:
        ends = together(tmp_path, size, *options, *["--data-parallel"] * (size > 1))
        assert [status for status, _, _ in ends] == [0] * size
        texts.append([json.loads(line)["token_ids"] for line in ends[0][1].splitlines()])
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 200
    assert "200/200" in ends[0][2]


def test_more_ranks_than_prompts(tmp_path, whole):
    (tmp_path / "in.jsonl").write_text('{"prompt": "replace a with b: A cat."}\n')
    options = ["--prompts-file", str(tmp_path / "in.jsonl"), "--data-parallel", "-m", "4"]
    ends = together(tmp_path, 3, *options)
    assert [status for status, _, _ in ends] == [0] * 3
    assert [len(out.splitlines()) for _, out, _ in ends] == [1, 0, 0]

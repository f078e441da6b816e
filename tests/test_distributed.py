"""main.py as several processes on this machine, connected by MLX's ring."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = str(ROOT / "demo" / "t5-demo")
PROBE = """
import sys
import mlx.core as mx
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
import json
from mlx.utils import tree_flatten
nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
same = mx.array_equal(logits, one_by_one).item() and texts[0] == texts[1]
if not ranks.number():
    print(json.dumps([logits.astype(mx.float32).tolist(), same, nbytes]))
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


def finish(processes):
    """(exit status, standard output, standard error) of each"""
    try:
        ends = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *map(bytes.decode, end)) for p, end in zip(processes, ends, strict=True)]


def together(folder, size, *options, folders=None):
    return finish(start(folder, size, [str(ROOT / "main.py"), *options], folders))


def probe(folder, size, model):
    (status, out, err), *_ = finish(start(folder, size, ["-c", PROBE, str(model)]))
    assert status == 0, err
    return json.loads(out)


@pytest.fixture
def whole(request):
    if not request.config.getoption("--whole"):
        pytest.skip("takes long; --whole runs it")


def test_a_divided_model_has_the_logits_and_rows_of_the_whole_one(tmp_path, request):
    """One process and two (--whole: four, whose parts have to be added in one order)."""
    whole, _, all_bytes = probe(tmp_path, 1, DEMO)
    size = 4 if request.config.getoption("--whole") else 2
    parts, same, part_bytes = probe(tmp_path, size, DEMO)
    largest = max(abs(x) for row in whole for x in row)
    pairs = [(a, b) for x, y in zip(whole, parts, strict=True) for a, b in zip(x, y, strict=True)]
    differences = [abs(a - b) for a, b in pairs]
    assert max(differences) < 1e-5 * largest
    assert same
    assert part_bytes < 0.8 * all_bytes  # the embedding is whole


@pytest.mark.parametrize("quantize", [False, True])
def test_gated_and_quantized_models(tmp_path, quantize, whole):
    source = ROOT / "tests" / "golden" / "flan-t5"
    if quantize:
        from convert import convert

        convert(DEMO, str(tmp_path / "model"), quantize=True, group_size=32)
        source = tmp_path / "model"
    alone, parts = (probe(tmp_path, size, source) for size in (1, 2))
    largest = max(abs(x) for row in alone[0] for x in row)
    pairs = [(a, b) for x, y in zip(alone[0], parts[0], strict=True) for a, b in zip(x, y)]  # noqa: B905
    assert max(abs(a - b) for a, b in pairs) < (2e-2 if quantize else 1e-5) * largest
    assert parts[1]


def test_rank_0_alone_speaks(tmp_path):
    (status, out, err), other = together(tmp_path, 2, "--compare", "--json", "-m", "20")
    assert (status, err) == (0, "") and other == (0, "", "")
    assert json.loads(out)["identical"]


@pytest.mark.parametrize("case", ["missing", "different", "heads"])
def test_an_error_of_any_rank_ends_all(tmp_path, case, request):
    if case == "heads":
        request.getfixturevalue("whole")
    size = 3 if case == "heads" else 2
    folders = [tmp_path / str(rank) for rank in range(size)]
    for rank, folder in enumerate(folders):
        if not (rank and case == "missing"):
            shutil.copytree(DEMO, folder / "model")
        folder.mkdir(exist_ok=True)
    if case == "different":
        with open(folders[1] / "model" / "model.safetensors", "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\0\0")
    ends = together(tmp_path, size, "--model", "model", folders=folders)
    assert [status for status, _, _ in ends] == [2] * size
    assert [out for _, out, _ in ends] == [""] * size
    (line,) = ends[0][2].splitlines()
    words = {"missing": "rank 1", "different": "different checkpoints", "heads": "4 heads"}
    assert words[case] in line
    assert all(err == "" for _, _, err in ends[1:])


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
    assert "connection" in err.replace("\r", "\n").splitlines()[-1]


def test_ranks_that_take_turns_write_what_one_writes(tmp_path):
    lines = (ROOT / "demo" / "edits.jsonl").read_text().splitlines()[:7]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ["--prompts-file", str(tmp_path / "in.jsonl"), "-m", "20"]
    texts = []
    for size in 1, 2:
        ends = together(tmp_path, size, *options, *["--data-parallel"] * (size > 1))
        assert [status for status, _, _ in ends] == [0] * size
        texts.append([json.loads(line)["token_ids"] for line in ends[0][1].splitlines()])
    assert texts[0] == texts[1] and len(texts[0]) == 7
    assert "7/7" in ends[0][2]

"""Damaged checkpoints and odd command lines: one line and status 2, or the text.

A seeded script damages a tiny checkpoint, or draws options; each case runs main.py's main() in a
process of its own, forked from one that has imported everything, under limits of time and memory.
--whole: 200 of each instead of 40.
"""

import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
KINDS = ["t5-v1.1", "odd-sizes", "sharded", "codet5", "byt5"]
VALUES = [None, "", "x", "512", -1, 0, 1, 3, 3.5, [], [[]], {}, {"a": 1}, True, 10**6, 2**31]
VALUES += [2 * 10**9, 2**63, 10**40, math.nan, math.inf, "\ud800", "x" * 10**5, [1, "a"]]


def damage_json(path, rng):
    content = json.loads(path.read_text())
    inner = content
    while isinstance(inner, dict) and inner:
        key = rng.choice(sorted(inner))
        if isinstance(inner[key], dict) and inner[key] and rng.random() < 0.7:
            inner = inner[key]
            continue
        if rng.random() < 0.2:
            del inner[key]
        else:
            inner[key] = rng.choice(VALUES)
        break
    path.write_text(json.dumps(content))


def damage_bytes(path, rng):
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "append", "empty", "remove"])
    if kind == "cut":
        del content[rng.randrange(len(content)) :]
    elif kind == "append":
        content += rng.randbytes(100)
    elif kind == "empty":
        content.clear()
    for _ in range(rng.choice([1, 3, 30]) if kind == "flip" else 0):
        content[rng.randrange(min(len(content), 3000))] ^= 1 << rng.randrange(8)
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(content)


def damage_tensors(path, rng):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    kind = rng.choice(["remove", "add", "rename", "dtype", "shape", "offsets"])
    if kind == "remove":
        del header[name]
    elif kind == "add":
        header["decoder.block.9.weight"] = header[name] | {"data_offsets": [len(data)] * 2}
        header["decoder.block.9.weight"]["shape"] = [0]
    elif kind == "rename":
        header[name.replace("0", "1", 1) + "x"] = header.pop(name)
    elif kind == "dtype":
        header[name]["dtype"] = rng.choice(["F16", "BF16", "I32", "U32", "F64", "BOOL", "X"])
    elif kind == "shape":
        shape = header[name]["shape"]
        shapes = [shape[::-1], [math.prod(shape)], [], [-1, -1], ["a"], None, [2**62, 4]]
        header[name]["shape"] = rng.choice(shapes)
    else:
        header[name]["data_offsets"] = rng.choice([[0, 2**62], [8, 4], [-8, 8], None, [0]])
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def broken_checkpoint(rng, folder):
    """Options for a damaged copy of a checkpoint."""
    model = folder / "model"
    shutil.copytree(GOLDEN / rng.choice(KINDS), model, ignore=shutil.ignore_patterns("*.npz"))
    for _ in range(rng.choice([1, 1, 2])):
        file = rng.choice(sorted(model.iterdir()))
        ways = {".json": [damage_json] * 4, ".safetensors": [damage_tensors] * 3}
        way = rng.choice([damage_bytes, *ways.get(file.suffix, [])])
        try:
            way(file, rng)
        except (ValueError, LookupError, TypeError, AttributeError):
            file.write_bytes(b"[")  # it was damaged before
    return ["--model", str(model), "--prompt", "Permission is granted to use this", "-m", "20"]


NUMBERS = "0 1 2 5 64 255 256 -1 1.5 1e3 nan inf -inf 1e999 0.5 auto many -- ٣ 0x10".split()
NUMBERS += ["", " ", "1\n2", "1" * 30, "9" * 5000, str(2**31), str(2**32), "\udcff", "[1]"]
OPTIONS = "-m -n --ngram-max --ngram-min --alpha --delta --temp --top-p --top-k --seed".split()
OPTIONS += "--repetition-penalty --no-repeat-ngram-size --min-length --logit-bias".split()
OPTIONS += "--sequence-bias --bad-words-ids --forced-bos-token-id".split()
FLAGS = "--fixed-draft --regular-decode --compare --json --color --no-color".split()
FLAGS += ["--no-chat-template", "--unknown", "words"]
TEXTS = ["a", "", " ", "-", "--", "\udcff", "é\nx", "</s>", "<extra_id_0>", "a" * 3000, "\x00"]
JSON = ["{}", "[]", '{"5": 1}', '{"5": "x"}', "[[[5], 1]]", "[[5]]", "[" * 10**5, '{"99999": 5}']


def odd_command_line(rng, folder):
    """Options with values right and wrong, for a checkpoint that is whole."""
    model = str(GOLDEN / "t5-v1.1")
    (folder / "text").write_text("Permission is granted")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    (folder / "prompts").write_text('{"prompt": "a b"}\n{"prompt": "Permission"}\n')
    (folder / "odd").write_text('{"prompt": "\\ud800"}\n')
    files = ["text", "bytes", "prompts", "odd", "missing", ".", "", "-", "--", "\udcff", "a\nb"]
    files = [str(folder / name) if name.isalpha() else name for name in files]
    argv = ["--model", rng.choice([model] * 9 + files), "-m", "20"]
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.6:
            name, good = rng.choice(OPTIONS), rng.choice(["1", "2", "0.5"])
            value = rng.choice([good] * 8 + NUMBERS + JSON)
            if name == "-m" and value in (str(2**31), str(2**32)):
                continue
            argv += rng.choice([[name, value], [f"{name}={value}"]])
        elif kind < 0.75:
            argv += [rng.choice(FLAGS)]
        elif kind < 0.85:
            argv += ["--prompt", rng.choice(TEXTS)]
        else:
            names = ["--prompt-file", "--prompts-file", "--reference", "--draft-model", "--output"]
            argv += [rng.choice([*names, "--system"]), rng.choice([model, *files])]
    return argv


def run(argv, folder):
    """main(argv) in a process of its own -> its status, what it wrote, the most memory it had."""
    import prompt_lookup  # noqa: F401

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # as main.py has it
    from transformers import AutoTokenizer, T5Tokenizer  # noqa: F401

    import main
    import model  # noqa: F401
    import processors  # noqa: F401

    out, err = folder / "out", folder / "err"
    pid = os.fork()
    if pid == 0:
        for descriptor, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        signal.alarm(300)  # it waits for something
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        try:
            status = main.main(argv)
        except SystemExit as exit:  # argparse
            status = exit.code
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 99
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status or 0)
    _, status, usage = os.wait4(pid, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    return status, out.read_bytes(), err.read_bytes().decode(), usage.ru_maxrss * unit


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("make", [broken_checkpoint, odd_command_line])
def test_one_line_or_the_text(make, request, capfd):
    failures, refused = [], 0
    count = 200 if request.config.getoption("--whole") else 40
    for seed in range(count):
        rng = random.Random(f"{make.__name__} {seed}")
        with tempfile.TemporaryDirectory() as folder:
            argv = make(rng, Path(folder))
            status, out, err, memory = run(argv, Path(folder))
        lines = [line for line in err.splitlines() if not line.startswith("note: ")]
        right = status == 0 or status == 2 << 8 and len(lines) == 1 and "error" in lines[0]
        right = right and len(lines[-1:] and lines[-1]) < 1000 and "Traceback" not in err
        refused += status == 2 << 8
        if not right or len(out) > 10**5 or memory > 2 << 30:
            shown = ascii(argv)[:500]
            failures.append(f"seed {seed}: {shown}: status {status}, {memory} bytes: {err[-600:]}")
    assert not failures, "\n".join(failures)
    assert count / 10 < refused < count  # both happen

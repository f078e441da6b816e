"""What all commands have in common: closed and full standard streams, Ctrl-C, bad values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = str(ROOT / "demo" / "t5-demo")
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
BENCHMARKS = [name for name in BENCHMARKS if name not in ("common.py", "start.py")]
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")

# Runs a script and interrupts it at an event (an import, an open) whose argument has `where` in it.
AT = """
import os, runpy, signal, sys
script, moment, where = sys.argv[1:4]

class Lost:
    def __del__(self):  # an exception in here is dropped
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(3))

def hook(event, arguments):
    if done or event != moment or where not in str(arguments[0]):
        return
    done.append(1)
    if lost:
        Lost()
    else:
        os.kill(os.getpid(), signal.SIGINT)

done, lost = [], moment.startswith("lost ")
moment = moment.removeprefix("lost ")
sys.argv[:] = [script, *sys.argv[4:]]
sys.path[0] = os.path.dirname(script)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.addaudithook(hook)
runpy.run_path(script, run_name="__main__")
"""


def arguments(name, tmp_path):
    """A short run of a command."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "the cat sat", "response": "the cat sat down"}\n')
    tokenizer = ROOT / "tests" / "golden" / "t5-v1.1" / "spiece.model"
    return {
        "main.py": ["--prompt", "replace cat with dog: The cat sat.", "-m", "3"],
        "convert.py": ["--model", DEMO, "--out", str(tmp_path / "out")],
        "benchmarks/replay.py": [str(log), "--tokenizer", str(tokenizer)],
        "benchmarks/machines.py": [],
        "benchmarks/memory.py": ["--size", "t5-small"],
        "benchmarks/acceptance.py": ["--temp", "1", "--prompts", "1"],
    }[name]


SHORT = "main.py", "convert.py", "benchmarks/replay.py"


def run(shell, name, *options):
    """The command in a shell that does what `shell` says with its standard streams."""
    command = ["sh", "-c", shell, "sh", sys.executable, str(ROOT / name), *options]
    # As it is for a user: what is written waits in a buffer.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize("name", SHORT)
def test_all_standard_streams_are_closed(tmp_path, name):
    done = run('"$@" <&- >&- 2>&-', name, *arguments(name, tmp_path))
    assert done.returncode == 0
    assert name != "convert.py" or (tmp_path / "out" / "model.safetensors").exists()


@needs_full
@pytest.mark.parametrize("name", SHORT[1:])
def test_standard_output_that_is_full(tmp_path, name):
    done = run('"$@" <&- >/dev/full', name, *arguments(name, tmp_path))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"{Path(name).name}: error: ")
    assert "space" in line
    assert name != "convert.py" or (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("name", SHORT[1:])
def test_a_reader_that_has_left(tmp_path, name):
    done = run('{ "$@"; echo $? >&2; } | true', name, *arguments(name, tmp_path))
    assert done.stderr.split()[-1] == "0" and len(done.stderr.splitlines()) == 1, done.stderr


@needs_full
@pytest.mark.parametrize(
    ("name", "where"), [*zip(SHORT, [">&- 2>&-", "2>/dev/full", "2>&-"], strict=True)]
)
def test_an_error_that_cannot_be_said(name, where):
    done = run(f'"$@" {where}', name, "--nonsense")
    assert (done.returncode, done.stdout) == (2, "")


def test_every_benchmark_refuses_in_one_line():
    bad = {
        "acceptance.py": ["--prompts", "0"],
        "decode.py": ["--runs", "1" + 20 * "0"],
        "divergence.py": ["--prompts", "-1"],
        "draft_length.py": ["--rounds", "0"],
        "lm_texts.py": ["--prompts", "0"],
        "machines.py": ["--bandwidth", "nan"],
        "memory.py": ["--size=--"],
        "replay.py": ["none.jsonl", "--tokenizer", "none.model"],
        "search.py": ["--rounds", "1e3"],
        "verify_cost.py": ["--runs", "x"],
        "widen.py": ["--size", "t5-small", "--out", DEMO],
    }
    assert sorted(bad) == BENCHMARKS
    processes = {
        name: subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / name), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, options in bad.items()
    }
    for name, process in processes.items():
        out, err = process.communicate(timeout=120)
        (line,) = err.splitlines()
        assert (process.returncode, out) == (2, "") and line.startswith(f"{name}: error: ")


def interrupted(name, moment, where, *options):
    command = [sys.executable, "-c", AT, str(ROOT / name), moment, where, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "moment", "where"),
    [
        ("main.py", "import", "argparse"),
        ("main.py", "lost import", "transformers"),
        ("main.py", "open", "demo/t5-demo/config.json"),
        ("convert.py", "import", "argparse"),
        ("convert.py", "lost import", "mlx.core"),
        ("convert.py", "lost open", ".out."),
        ("benchmarks/replay.py", "lost import", "sentencepiece"),
        ("benchmarks/acceptance.py", "import", "mlx.core"),
        ("benchmarks/memory.py", "open", "demo/t5-demo/config.json"),
    ],
)
def test_interrupted_at_any_time(tmp_path, name, moment, where):
    """Status 130, no word, nothing left behind; also where a library drops exceptions."""
    command = [sys.executable, "-c", AT, str(ROOT / name), moment, where]
    command += arguments(name, tmp_path)
    before = sorted(tmp_path.iterdir())
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    said = [line for line in done.stderr.splitlines() if not line.startswith("writing the demo")]
    assert (done.returncode, said) == (130, [])
    assert sorted(tmp_path.iterdir()) == before

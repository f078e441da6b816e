"""Rows of logits keep their bits, and texts their tokens, on many machines: all played by this one.

    python -m pytest -q tests/machines              # a sample
    python -m pytest -q tests/machines --whole      # all that this processor can play: minutes

A machine is the BLAS that MLX is given, the processor whose kernels that one uses, and its threads.
What this processor cannot play is skipped, and so is a library that is not here: `pip install mkl`,
`apt install libopenblas0-pthread libblis4-pthread`.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import divergence  # noqa: E402
import widen  # noqa: E402

BITS = Path(__file__).parent / "bits.py"
GOLDEN = ROOT / "tests" / "golden"
DEMO = ROOT / "demo" / "t5-demo"

# Random checkpoints. Each of 64, 200, 384, 512, 768, 1000, 1024, 2048 and 3072 is a d_model, a d_ff
# and a num_heads * d_kv: the inner size of a product. Large ones have small ones beside them.
SIZES = {
    "64": dict(d_model=64, num_heads=24, d_kv=128, d_ff=3072, vocab_size=32100),
    "128": dict(d_model=128, num_heads=16, d_kv=128, d_ff=1000, vocab_size=160),
    "200": dict(d_model=200, num_heads=3, d_kv=33, d_ff=1024, vocab_size=999),
    "256": dict(d_model=256, num_heads=50, d_kv=20, d_ff=2048, vocab_size=160),
    "384": dict(d_model=384, num_heads=8, d_kv=128, d_ff=512, vocab_size=384),
    "512": dict(d_model=512, num_heads=8, d_kv=64, d_ff=2048, vocab_size=999),
    "768": dict(d_model=768, num_heads=12, d_kv=64, d_ff=768, vocab_size=999),
    "1000": dict(d_model=1000, num_heads=10, d_kv=20, d_ff=384, vocab_size=333),
    "1024": dict(d_model=1024, num_heads=6, d_kv=64, d_ff=200, vocab_size=384),
    "2048": dict(d_model=2048, num_heads=2, d_kv=32, d_ff=64, vocab_size=999),
    "3072": dict(d_model=3072, num_heads=1, d_kv=64, d_ff=64, vocab_size=160),
}
GATED = "200", "384", "768", "1000", "2048"
OWN_HEAD = "128", "200", "384", "1024", "2048"

FEW = ("200",)
SLOW = "t5-v1.0", "odd-sizes", "200"  # where a BLAS does 2 GFLOP/s
MOST = "t5-v1.0", "umt5", "odd-sizes", "t5-demo", "ties-512", *SIZES

# Processors whose kernels OpenBLAS has, and what this one must be able to do to run them.
CORES = {
    "SkylakeX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "Haswell": {"avx2", "fma"},
    "Sandybridge": {"avx"},
    "Nehalem": {"sse4_2"},
}
THREADS = {
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl_rt": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
VARIABLES = "FAST_BLAS", "OPENBLAS_", "GOTO_", "OMP_", "MKL_", "BLIS_"  # not this shell's, please


class Machine(NamedTuple):
    name: str
    environment: dict
    answers: str  # a part of the path of the library that shall answer
    core: str = ""  # the processor that it shall take this one for, if it is told
    missing: str = ""  # why this one cannot play it


def machines():
    ours = "/scipy_openblas32/lib/"
    yield Machine("MLX's own BLAS", {"FAST_BLAS": "0"}, "/mlx_cpu.libs/libblas")
    yield Machine("own choice", {}, ours)
    yield Machine("own choice, 2", {"OPENBLAS_NUM_THREADS": "2"}, ours)
    for threads in ("1", "2"):
        for core, needs in CORES.items():
            lacks = " ".join(sorted(needs - flags()))
            missing = f"{core} needs {lacks}" if lacks else ""
            environment = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": threads}
            yield Machine(f"{core}, {threads}", environment, ours, core, missing)
        for name, variable in THREADS.items():
            path = find_library(name)
            environment = {"FAST_BLAS": path, variable: threads}
            missing = "" if path else f"there is no lib{name}.so"
            path = os.path.realpath(path)
            yield Machine(f"lib{name}, {threads}", environment, path, missing=missing)


def flags():
    """What this processor can do; nothing where that is told otherwise, as on ARM."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()


def find_library(name):
    """The path of a BLAS that pip or the system has installed, or nothing."""
    system = f"/usr/lib/{platform.machine()}-linux-gnu"
    folders = [f"{sys.prefix}/lib", *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    folders += [f"{system}/{name}-pthread", system, "/usr/lib64"]
    for folder in filter(None, folders):
        for file in sorted(Path(folder).glob(f"lib{name}.so*")):
            return str(file)
    return ""


MACHINES = {machine.name: machine for machine in machines()}
SAMPLE = "own choice", "Sandybridge, 1", "Sandybridge, 2"


def write_checkpoint(folder, sizes, is_gated, own_head):
    """A random T5 with one layer in each stack."""
    config = json.loads((GOLDEN / "t5-v1.1" / "config.json").read_text()) | sizes
    config |= dict(num_layers=1, num_decoder_layers=1, relative_attention_num_buckets=32)
    config |= dict(feed_forward_proj="gated-gelu" if is_gated else "relu")
    config |= dict(tie_word_embeddings=not own_head)
    tensors = widen.random_weights(config)
    if not own_head:
        del tensors["lm_head.weight"]
    if not is_gated:
        tensors = {k.replace("wi_0", "wi"): v for k, v in tensors.items() if "wi_1" not in k}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in ("tokenizer_config.json", "spiece.model"):  # there must be one; nothing is read
        shutil.copy(GOLDEN / "t5-v1.1" / file, folder)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, request):
    """{name: folder} of those in this repository and of those that are written here."""
    written = tmp_path_factory.mktemp("checkpoints")
    whole = request.config.getoption("--whole")
    for name in SIZES if whole else FEW:
        write_checkpoint(written / name, SIZES[name], name in GATED, name in OWN_HEAD)
    for size in divergence.SIZES:
        divergence.write_checkpoint(written / f"ties-{size}", size, seed=0)
    folders = [DEMO, *GOLDEN.iterdir(), *written.iterdir()]
    return {folder.name: folder for folder in sorted(folders)}


def pytest_generate_tests(metafunc):
    names = list(MACHINES) if metafunc.config.getoption("--whole") else SAMPLE
    metafunc.parametrize("report", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def report(request, checkpoints):
    """What bits.py finds on one of the machines."""
    machine = MACHINES[request.param]
    if machine.missing:
        pytest.skip(machine.missing)
    return run(machine, checkpoints, request.config.getoption("--whole"))


def run(machine, checkpoints, whole):
    names, ties, extent = MOST, "ties-512", ["--every", "4"]
    if machine.name == "MLX's own BLAS":
        names, ties = SLOW, "ties-128"
    elif machine.name.startswith("own choice"):
        names = list(checkpoints)
    if not whole:
        names, extent = FEW, ["--every", "16", "--prompts", "8"]
    folders = [str(checkpoints[name]) for name in names]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES)}
    done = subprocess.run(
        [sys.executable, str(BITS), *folders, "--texts", str(checkpoints[ties]), *extent],
        env=environment | machine.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1]) | dict(machine=machine)


def test_the_machine_is_the_one_that_is_meant(report):
    machine, answered = report["machine"], report["blas"]
    assert len(answered) == 1, answered
    ((path, core),) = answered.items()
    assert machine.answers in path
    assert core == machine.core or not machine.core


def test_rows_have_the_same_bits(report):
    assert report["rows"] > 1000
    differ = {}
    for found in report["differ"]:
        differ.setdefault((found["checkpoint"], found["prompt"]), []).append(found)
    lines = [f"{place}: {len(found)} passes, first {found[0]}" for place, found in differ.items()]
    assert not lines, "rows with other bits\n" + "\n".join(lines)


def test_texts_are_the_same(report):
    assert len(report["texts"]) == 2
    for drafter, found in report["texts"].items():
        assert found["accepted"] > 0 and found["differ"] == 0, f"{drafter}: {found}"

"""Peak memory of loading and converting a checkpoint, beyond the result itself.

    python benchmarks/memory.py [--size t5-large] [--json]

Each job runs in a process of its own. Its peak is what the kernel counts as resident, less the peak
of the same job with the demo model, which is what Python, MLX and the tokenizer take. A conversion
holds what it is about to write, then loads what it wrote to check it: once the result, each time.
"""

from start import ROOT, command

# isort: split
import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import SIZES, checkpoint, note, scratch

LOAD = """
model, tokenizer = load(folder)
"""
CONVERT = """
convert(folder, out, **{options})
"""
JOB = """
import sys
root, folder, out = sys.argv[1:]
sys.path.insert(0, root)
from model import load
from convert import convert
{job}
if sys.platform == "linux":  # its ru_maxrss begins with what the parent process had
    lines = open("/proc/self/status").read().splitlines()
    print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
else:
    import resource
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
JOBS = {
    "load float32": LOAD,
    "convert to bfloat16": CONVERT.format(options={"dtype": "bfloat16"}),
    "convert to 4 bits": CONVERT.format(options={"quantize": True}),
    "load bfloat16": LOAD,
    "load 4 bits": LOAD,
}


def peak(job, folder, out):
    """Bytes of the largest resident set that the job ever had."""
    process = [sys.executable, "-c", JOB.format(job=job), ROOT, folder, out]
    done = subprocess.run(process, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a job failed: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout)


def weights(folder):
    """(bytes of all weights, bytes of the largest tensor)"""
    total = largest = 0
    for file in Path(folder).glob("*.safetensors"):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        sizes = [e["data_offsets"] for name, e in header.items() if name != "__metadata__"]
        sizes = [end - begin for begin, end in sizes]
        total, largest = total + sum(sizes), max(largest, *sizes)
    return total, largest


def measure(size):
    rows = []
    with scratch() as work, checkpoint(size) as large:
        folders = dict.fromkeys(JOBS, [ROOT / "demo" / "t5-demo", large])
        for name, job in JOBS.items():
            note(name)
            outs = [Path(work, f"{name}-{which}") for which in ("demo", "large")]
            demo, peak_bytes = (peak(job, *pair) for pair in zip(folders[name], outs, strict=True))
            result, source = outs[1] if "convert" in name else folders[name][1], folders[name][1]
            if "convert" in name:
                folders[name.replace("convert to", "load")] = outs
            total, largest = weights(result)[0], max(weights(f)[1] for f in (source, result))
            beyond = peak_bytes - demo - total
            rows.append(dict(job=name, result=total, largest_tensor=largest, beyond=beyond))
    return rows


def main():
    parser = argparse.ArgumentParser(description="Peak memory of loading and converting.")
    parser.add_argument("--size", choices=SIZES[1:], default="t5-base", help="Of the checkpoint.")
    parser.add_argument("--json", action="store_true", help="Print one JSON list.")
    arguments = command.parse(parser)
    rows = measure(arguments.size)
    if arguments.json:
        print(json.dumps(rows))
        return
    print("| job | result | largest tensor | peak beyond the result |")
    print("|---|---|---|---|")
    for row in rows:
        numbers = (row[key] / 1e6 for key in ("result", "largest_tensor", "beyond"))
        print(f"| {row['job']} | {' | '.join(f'{n:,.0f} MB' for n in numbers)} |")


if __name__ == "__main__":
    sys.exit(command.run("memory.py", main))

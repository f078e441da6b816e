"""What the benchmarks share: checkpoints by size, engines that live in processes of their own."""

from start import command

# isort: split
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import widen

SIZES = ["demo", *widen.SIZES]
SETTLE = 0.3  # seconds; idle OpenMP threads keep spinning for 0.2, which would slow the next engine


note = command.say


def ignore_interrupts():
    """In a process that ends when the one that started it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def scratch():
    """A folder for as long as a context lasts (TMPDIR moves it)."""
    return command.folder(Path(tempfile.gettempdir(), f"t5-{os.urandom(4).hex()}"))


@contextlib.contextmanager
def checkpoint(size):
    """The folder of the demo model at that size, for as long as the context lasts."""
    if size == "demo":
        yield widen.DEMO
        return
    with scratch() as folder:
        note(f"writing the demo model at {size} size to {folder} (TMPDIR moves it)")
        widen.write(widen.DEMO, folder / size, size)
        yield folder / size


class Engine:
    """A copy of a benchmark in a process of its own that does what `ask` tells it.

    Two OpenMP runtimes in one process disturb each other, and engines that take turns in
    processes of their own all meet the same machine, however it drifts.
    """

    def __init__(self, script, name, *arguments, pin=False):
        def prepare():
            ignore_interrupts()
            if pin and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, script, "--engine", name, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )
        self.ask()  # has loaded

    def ask(self, **request):
        """Sends a request, returns the answer. RuntimeError where the process has died."""
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the process of {self.name} has ended; see its message above")
        time.sleep(SETTLE)
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve(load):
    """The other side of Engine: load() gives a function from a request to an answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    function = load()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(function(**request) if request else {}), file=answers, flush=True)


def timed(function, *arguments):
    began = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - began, result


__all__ = [
    "Engine",
    "SIZES",
    "checkpoint",
    "ignore_interrupts",
    "median",
    "note",
    "scratch",
    "serve",
    "timed",
]

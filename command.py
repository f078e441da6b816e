"""What every command does about standard streams, signals, arguments and errors."""

import contextlib
import os
import signal
import sys

endings: list = []  # functions without arguments, called when a signal ends the process


def begin(tidy=False):
    """Before a command imports what takes time, or opens files: Ctrl-C ends the process without a
    word from here on. tidy: as other signals do, since there are `endings`."""
    open_streams()
    for number in [signal.SIGINT] + [signal.SIGTERM, signal.SIGHUP] * tidy:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def end(number, _frame):
    """At once: an exception could be lost in a library."""
    try:
        for ending in endings:
            ending()
    finally:
        os._exit(128 + number)


@contextlib.contextmanager
def folder(path):
    """A new folder that is removed at the end of the context, or when a signal ends it."""
    import shutil

    def remove():
        shutil.rmtree(path, ignore_errors=True)

    endings.append(remove)
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        remove()
        endings.remove(remove)


def open_streams():
    """What the caller has closed is the null device: else the next file gets its descriptor."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def discard(stream):
    """What is still to be written to the stream goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text, end="\n"):
    """To standard error; a full one takes nothing from the result."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        discard(sys.stderr)


def refuse(message):
    """As an argument parser's `error`: a ValueError, which `run` turns into its line."""
    raise ValueError(message)


def parse(parser, argv=None):
    """parser.parse_args, whose errors `run` says, without what argparse makes of --option=--: a
    list until Python 3.12."""
    parser.error = refuse
    args = parser.parse_args(argv)
    if any(value == [] or str(value) == "--" for value in vars(args).values()):
        refuse("-- is not the value of an option")
    return args


def between(low, high=2**31 - 1, kind=int, auto=False):
    """An argparse type: a number from low to high, or "auto" (None) where that is allowed."""
    import argparse

    def number(text):  # argparse shows its name where kind() fails
        if auto and text == "auto":
            return None
        if text.strip("0123456789.eE+-") or not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r:.50} is not a number from {low} to {high}")
        return kind(text)

    return number


def one_line(error):
    """What an exception says, in one line of bounded length."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if len(reason) <= 500 else f"{reason[:500]} …"


def run(name, function):
    """Exit status of function(): 0, also where the reader of a pipe has gone; 2, and one line, for
    bad input; 130 for Ctrl-C."""
    open_streams()
    try:
        try:
            function()
        except SystemExit as done:  # --help
            if done.code:
                raise
        sys.stdout.flush()
        return 0
    except (KeyboardInterrupt, BrokenPipeError) as end:
        for stream in sys.stdout, sys.stderr:
            if not stream.isatty():  # what is left has no reader
                discard(stream)
        return 130 if isinstance(end, KeyboardInterrupt) else 0
    except (ValueError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: MLX's
        for stream in sys.stdout, sys.stderr:
            try:
                stream.flush()
            except OSError:
                discard(stream)
        try:
            say(f"{name}: error: {one_line(error)}")
        except BrokenPipeError:
            discard(sys.stderr)
        return 2

"""Imported first by every benchmark: Ctrl-C ends it without a word from then on."""

import sys
from os.path import dirname, realpath

sys.path.insert(0, dirname(dirname(realpath(__file__))))
import command

if dirname(realpath(sys.argv[0])) == dirname(realpath(__file__)):  # it is run, not imported
    command.begin(tidy=True)

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["ROOT", "command"]

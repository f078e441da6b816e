"""Imported first by every benchmark: Ctrl-C ends it without a word from then on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import command

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

if Path(sys.argv[0]).resolve().parent == HERE:  # it is run, not imported by a test
    command.begin(tidy=True)

__all__ = ["ROOT", "command"]

"""Make the example's files importable from wherever pytest is started."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="all, not a sample")

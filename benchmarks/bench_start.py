"""How long a reader waits before anything happens."""

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).resolve().parent
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "import flatbook": [sys.executable, "-c", "import flatbook"],
    "import flatbook and torch": [sys.executable, "-c", "import flatbook, torch; flatbook.SAM"],
    "flatbook --help": [sys.executable, "-m", "flatbook.cli", "--help"],
}


@pytest.mark.parametrize("name", COMMANDS)
def bench_start(compare, name):
    def start():
        subprocess.run(COMMANDS[name], check=True, stdout=subprocess.DEVNULL)

    compare("start-up", name, start, rounds=7)

"""An application whose import blocks in a worker process until its process ends, and signals that with a file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.support.shop import platform

__all__ = ["platform"]

if any(argument.startswith("--worker-process=") for argument in sys.argv):
    (Path(os.environ["BLOCKED"]) / str(os.getpid())).touch()
    while True:
        time.sleep(60)

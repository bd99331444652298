"""Processes whose wall clock is wrong, jumps or stands still, while their monotonic clock goes on.

clock = WrongClock(folder)
subprocess.Popen(..., env={**os.environ, **clock.environment})
clock.jump(3600)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Final

from tests.support.kafka.fixtures import skip_or_fail

_SHAPE: Final = Struct("=qq")
"""How far it is ahead, and where it stands still if not 0: microseconds."""

_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *told;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("WRONG_CLOCK"), O_RDONLY);
    if (file >= 0) told = mmap(0, 16, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (syscall(SYS_clock_gettime, clock, now)) return -1;
    if (!told || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return 0;
    long long us = told[1] ? told[1] : now->tv_sec * 1000000LL + now->tv_nsec / 1000 + told[0];
    now->tv_sec = us / 1000000;
    now->tv_nsec = us % 1000000 * 1000;
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class WrongClock:
    """The wall clock of the processes that are started with its environment."""

    def __init__(self, folder: Path, ahead: float = 0.0) -> None:
        """`ahead`: seconds, negative for behind."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="clock-")
        os.close(descriptor)
        self._told = Path(name)
        self._library = _library()
        self.jump(ahead)

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(self._library), "WRONG_CLOCK": str(self._told)}

    def jump(self, ahead: float) -> None:
        """Be `ahead` seconds ahead of the right time from now on."""
        self._tell(round(ahead * 1e6), 0)

    def stop(self) -> None:
        """Stand still from now on."""
        self._tell(0, time.time_ns() // 1000)

    def _tell(self, ahead: int, stands_at: int) -> None:
        with self._told.open("r+b") as file:
            file.write(_SHAPE.pack(ahead, stands_at))

    @contextmanager
    def worn(self) -> Iterator[None]:
        """Processes that are started within the block have it, too."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@cache
def _library() -> Path:
    """What tells programs another time, compiled once a session."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        skip_or_fail("no C compiler on Linux here, to make clocks wrong with: install gcc")
    folder = Path(tempfile.gettempdir()) / f"idem-clock-{os.getuid()}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    _forget_at_exit(folder)
    return library


def _forget_at_exit(folder: Path) -> None:
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)

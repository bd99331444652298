"""Processes whose wall clock is wrong, jumps or is frozen, while their monotonic clock is right.

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
"""Microseconds that the clock is ahead, and the time at which it is frozen, or 0."""

_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shared;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("WRONG_CLOCK"), O_RDONLY);
    if (file >= 0) shared = mmap(0, 16, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (syscall(SYS_clock_gettime, clock, now)) return -1;
    if (!shared || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return 0;
    long long us = shared[1] ? shared[1] : now->tv_sec * 1000000LL + now->tv_nsec / 1000 + shared[0];
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
    """The wall clock of processes that are started with its environment."""

    def __init__(self, folder: Path, ahead: float = 0.0) -> None:
        """Set the clock `ahead` seconds ahead; negative values set it back."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="clock-")
        os.close(descriptor)
        self._file = Path(name)
        self._library = _library()
        self.jump(ahead)

    @property
    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(self._library), "WRONG_CLOCK": str(self._file)}

    def jump(self, ahead: float) -> None:
        """Set the clock `ahead` seconds ahead of the right time."""
        self._write(round(ahead * 1e6), 0)

    def stop(self) -> None:
        """Freeze the clock."""
        self._write(0, time.time_ns() // 1000)

    def _write(self, ahead: int, frozen_at: int) -> None:
        with self._file.open("r+b") as file:
            file.write(_SHAPE.pack(ahead, frozen_at))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give processes that are started within the block this clock, too."""
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
    """Compile the library that overrides the clock functions, once per session."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        skip_or_fail("no C compiler on Linux to build the clock library: install gcc")
    folder = Path(tempfile.gettempdir()) / f"idem-clock-{os.getuid()}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    _delete_at_exit(folder)
    return library


def _delete_at_exit(folder: Path) -> None:
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)

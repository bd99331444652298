"""How often each script ran, as recorded by the scripts.

A script's first act is to append one line to the journal, by one write to a file opened with O_APPEND, so
that lines of scripts that run at once do not mix.  At the start, not at the end: a run that is killed
half-way has run all the same.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_NOTE = """\
import os as _os, time as _time
_journal = _os.open({path!r}, _os.O_WRONLY | _os.O_APPEND)
_os.write(_journal, f"{execution_id} {{_os.getpid()}} {{_time.time():.6f}}\\n".encode())
_os.close(_journal)
"""


class Journal:
    """The file; every line is `execution id, process id, seconds since 1970`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch(mode=0o600)

    def noting(self, execution_id: str, script: str) -> str:
        """`script`, with the lines in front that leave a mark here.  It needs no environment for that."""
        return _NOTE.format(path=str(self.path), execution_id=execution_id) + script

    def runs(self) -> Counter[str]:
        """How often each execution has begun to run so far."""
        # The last line may still be on its way into the file.
        whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
        return Counter(line.split()[0] for line in whole.splitlines())

"""How often each script ran, as recorded by the scripts.

A script first appends one line to the journal, by a single write to a file opened with O_APPEND, so that lines of
concurrent scripts do not mix.  The line is written at the start, so that runs that are killed halfway count as well.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

_ENTRY = """\
import os as _os, time as _time
_journal = _os.open({path!r}, _os.O_WRONLY | _os.O_APPEND)
_os.write(_journal, f"{execution_id} {{_os.getpid()}} {{_time.time():.6f}}\\n".encode())
_os.close(_journal)
"""


class Journal:
    """The journal file; every line is `execution id, process id, seconds since 1970`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch(mode=0o600)

    def with_entry(self, execution_id: str, script: str) -> str:
        """Prepend code to `script` that writes an entry. It does not depend on the environment."""
        return _ENTRY.format(path=str(self.path), execution_id=execution_id) + script

    def runs(self) -> Counter[str]:
        """Return how often each execution has started so far."""
        # The last line may be incomplete.
        whole = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
        return Counter(line.split()[0] for line in whole.splitlines())

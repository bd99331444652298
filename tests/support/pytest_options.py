"""Options for a pytest that a test starts."""

from __future__ import annotations

from typing import Final

WITHOUT_PLUGINS: Final = tuple(
    f"-pno:{plugin}"
    # Of packages that only some tests of this repository need; and a cache would appear in the folder.
    for plugin in ("schemathesis", "valkey", "faker", "cacheprovider")
)

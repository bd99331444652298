"""The text of an error, for records, logs and dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from integr8s_idem.config.message_text import text_of
from integr8s_idem.config.urls import redacted

LONGEST_ERROR: Final = 1024
"""Maximum number of characters of an error in a FAILED record."""


_LONGEST_INNER: Final = 200
"""Maximum number of characters of one error in a group, so that the text has several."""

_MOST_INNER: Final = 50
"""Maximum number of errors in a group that are read."""


def describe_error(error: BaseException) -> str:
    """Describe `error` in one line of limited length without credentials, for records, logs and dead letters.

    A group is described with the errors in it, each once and in alphabetical order, since the order in which tasks fail
    is random.
    """
    text = _line(error)
    if isinstance(error, BaseExceptionGroup):
        inner = {_cut(_line(each), _LONGEST_INNER) for each in islice(_innermost(error), _MOST_INNER)}
        text = f"{_cut(text, _LONGEST_INNER)}: {'; '.join(sorted(inner))}"
    return _cut(text, LONGEST_ERROR)


def shorten_error(text: str) -> str:
    """Make the text of an error one line of limited length without credentials, as `describe_error` does."""
    return _cut(redacted(" ".join(_words(text))), LONGEST_ERROR)


def _line(error: BaseException) -> str:
    name, words = type(error).__name__, _words(text_of(error))
    return redacted(" ".join([f"{name}:" if words else name, *words]))


def _words(text: str) -> list[str]:
    # Truncate before redacting to bound its cost, but with a margin so that no credential is cut in two.
    return text[: 4 * LONGEST_ERROR].split()


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _innermost(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors in `group` and in its groups, which may be nested more deeply than Python can recurse."""
    seen, pending = set[int](), list[BaseException]([group])
    while pending:
        error = pending.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup):
            pending += reversed(error.exceptions)
        else:
            yield error

"""The text of an error, for records, logs and dead letters."""

from __future__ import annotations

from typing import Final

from integr8s_idem.config.message_text import text_of
from integr8s_idem.config.urls import redacted

LONGEST_ERROR: Final = 1024
"""Maximum number of characters of an error in a FAILED record."""


def describe_error(error: BaseException) -> str:
    """Describe `error` in one line of limited length without credentials, for records, logs and dead letters."""
    message = text_of(error)
    # Truncate before redacting to bound its cost, but with a margin so that no credential is cut in two.
    name, words = type(error).__name__, message[: 4 * LONGEST_ERROR].split()
    text = redacted(" ".join([f"{name}:" if words else name, *words]))
    return text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 1] + "…"

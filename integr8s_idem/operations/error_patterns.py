"""Replace what varies in error messages, such as ids, numbers and quoted texts, by placeholders.  Pure."""

from __future__ import annotations

import re
from typing import Final

MOST_READ: Final = 2_000
"""Characters of a message that count.  Anyone who can write to a dead-letter topic can write longer ones."""

LONGEST: Final = 300
"""Maximum characters of a pattern."""

# Each alternative begins where the previous character cannot belong to it, so that no text is scanned twice.
_VARIABLE: Final = re.compile(
    r"""
    (?P<text>(?<!\\)"(?:[^"\\]|\\.)*+"
           |(?<![\w\\])'(?:[^'\\]|\\.|(?<=\w)'(?=\w))*+'(?!\w)
           |\\"[^"\\]*\\"|\\'[^'\\]*\\'|`[^`]*`
           |[\u201c\u201d\u201e][^\u201c\u201d\u201e]*[\u201c\u201d]
           |[\u2018\u201a](?:[^\u2018\u2019\u201a]|(?<=\w)\u2019(?=\w))*+[\u2018\u2019]
           |\u00ab[^\u00ab\u00bb]*\u00bb|\u00bb[^\u00ab\u00bb]*\u00ab
           |\u2039[^\u2039\u203a]*\u203a|\u203a[^\u2039\u203a]*\u2039)
  | (?P<address>(?<![\w.+-])(?:[a-z][a-z0-9+.-]{0,30}://[^\s"'<>`\u201c]+
                             |[\w.+-]+@[\w-]+(?:\.[\w-]+)*
                             |\[(?=[0-9a-f.]{0,45}:)[0-9a-f:.]{1,45}\](?::\d+)?
                             |\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])
                             |[a-z][\w-]*(?:\.[\w-]+)*:\d{2,5}(?![\w:.])))
  | (?P<time>(?<![\w.+-])\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w.-]))
  | (?P<number>(?<![\w.,+-])[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?:[nmu\u00b5]?s|[kmgt]i?b)?(?![\w-]))
  | (?P<id>(?<![\w-])[\w-]*\d[\w-]*|\d+)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_HINT: Final = re.compile(r"\s*\bRead more: integr8s-idem errors \w+")
"""The end of the messages of this library."""

_SPACES: Final = re.compile(r"\s+")


def pattern_of(message: str) -> str:
    """Return `message` with placeholders: `<text>`, `<address>`, `<time>`, `<number>` and `<id>`.

    Messages about the same problem have the same pattern, whichever event they are about.  No digit remains.

    Args:
        message: Message of an error, of any length; only its first `MOST_READ` characters count.
    """
    text = _SPACES.sub(" ", _HINT.sub("", message[:MOST_READ])).strip()
    return _VARIABLE.sub(lambda found: f"<{found.lastgroup}>", text)[:LONGEST].rstrip()

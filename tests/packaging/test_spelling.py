"""`make check` finds slips of spelling, and American words in prose, and leaves code alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging import spelling

PAGE = """\
# A page

The behavior of `color`, and of settings.color; see [the color](color.md).

```python
color = serialize()
```

<!-- python
color = 1
-->
Normalized.
"""
MODULE = '''\
"""Colors of a table."""

color = "gray"  # the favorite one


def initialize() -> str:
    """Made anew: `initialize` is not `color`.

    It honors what is set.
    """
    return "behavior"
'''


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", PAGE, ["page.md:3 behavior", "page.md:3 color", "page.md:12 Normalized"]),
        ("module.py", MODULE, ["module.py:1 Colors", "module.py:3 favorite", "module.py:9 honors"]),
        ("notes.txt", "The color.", []),
    ],
)
def test_american_words_are_found_in_prose_alone(name: str, text: str, found: list[str], tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")

    slips = list(spelling.slips(name, spelling.prose_of(file)))

    assert sorted(f"{slip.place} {slip.word}" for slip in slips) == sorted(found)


def test_a_slip_is_found_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    slip = "rec" + "ieve"  # in one piece it would be one of this file's own
    file.write_text(f"def {slip}() -> None: ...\n", encoding="utf-8")

    assert f"{file}:1: {slip} ==> receive" in spelling.misspelt(file)


def test_what_is_let_pass_is_in_the_list_otherwise() -> None:
    assert spelling.BRITISH_TOO - spelling.listed().keys() == set()

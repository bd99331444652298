"""`make check` finds misspellings everywhere and British words in prose, but not in code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging import spelling

PAGE = """\
# A page

The behaviour of `colour`, and of settings.colour; see [the colour](colour.md).

```python
colour = serialise()
```

<!-- python
colour = 1
-->
Normalised.
"""
MODULE = '''\
"""Colours of a table."""

colour = "grey"  # the favourite one


def initialise() -> str:
    """Made anew: `initialise` is not `colour`.

    It honours what is set.
    """
    return "behaviour"
'''


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", PAGE, ["page.md:3 behaviour", "page.md:3 colour", "page.md:12 Normalised"]),
        ("module.py", MODULE, ["module.py:1 Colours", "module.py:3 favourite", "module.py:9 honours"]),
        ("notes.txt", "The colour.", []),
    ],
)
def test_british_words_are_found_in_prose_only(name: str, text: str, found: list[str], tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")

    slips = list(spelling.slips(name, spelling.prose_of(file)))

    assert sorted(f"{slip.place} {slip.word}" for slip in slips) == sorted(found)


def test_misspellings_are_found_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    slip = "rec" + "ieve"  # split, so that it is not a misspelling in this file
    file.write_text(f"def {slip}() -> None: ...\n", encoding="utf-8")

    assert f"{file}:1: {slip} ==> receive" in spelling.misspellings(file)


def test_every_allowed_word_is_listed_by_codespell() -> None:
    assert spelling.AMERICAN_TOO - spelling.listed().keys() == set()

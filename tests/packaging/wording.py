"""The words that this project does not use: `python -m tests.packaging.wording`, a part of `make check`.

Each rule is a word or a phrase that had a meaning here that no reader could guess, with what to write instead.  Rules
apply to every line that people read: pages, code with its names, settings, scripts.  They find words, not bad
sentences.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.packaging.repository import files, name_of

_SUFFIXES: Final = (".md", ".py", ".lua", ".sql", ".toml", ".yaml", ".yml", ".svg", ".tmpl")
_EXEMPT: Final = frozenset({"CHANGELOG.md", "tests/packaging/wording.py", "tests/packaging/test_wording.py"})
"""Files that quote the words: names that have been replaced, and these rules."""


@dataclass(frozen=True)
class Rule:
    """A phrase to avoid, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


@dataclass(frozen=True)
class Hit:
    """A phrase to avoid, in a line of a file."""

    place: str
    phrase: str
    instead: str

    def __str__(self) -> str:
        return f"{self.place}: {self.phrase!r}: write {self.instead}"


def _rule(pattern: str, instead: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), instead)


_START: Final = r"(?<![a-z])"
_END: Final = r"(?![a-z])"
"""Ends of a word in prose and of a part of a name: `_` separates the parts."""

RULES: Final = (
    _rule(rf"{_START}mend(s|ed|ing)?{_END}", "fix, resolve or remedy"),
    _rule(rf"{_START}told{_END}", "reported, logged, counted or notified"),
    _rule(rf"{_START}(?<!there )(is|are|was|were) no (?!longer|more|less)[a-z]", '"is not a valid …" or "invalid …"'),
    _rule(rf"{_START}twins?{_END}", "duplicate"),
    _rule(rf"{_START}(ours|theirs){_END}", "whom it belongs to"),
    _rule(rf"{_START}(whoever|whomever|whatever){_END}", "the name of the thing or the person"),
    _rule(r"\b(comes?|coming|came) again\b", "is redelivered"),
    _rule(rf"{_START}give[sn]?[ _](it[ _]|them[ _])?back{_END}", "release or return"),
    _rule(r"\bputs? (\w+ )?back\b", "replay or restore"),
    _rule(rf"{_START}(?<!dead.)(?<!lowercase )(?<!with a )letters?{_END}(?!(,| and) digits| case)", "dead letter"),
    _rule(rf"{_START}(letterbox|crews?|stirs|stirred){_END}", "the field's term"),
    _rule(r"\b(needs?|wants?|knows?) (it|them) not\b", "does not need it"),
    _rule(r"\bfor machines\b", "JSON"),
    _rule(r"\b(exit|print|show)\w* (\w+ )*and leave\b", "exit"),
)


def hits(name: str, lines: Iterable[str]) -> Iterator[Hit]:
    """The phrases to avoid in the lines of a file, each where it ends, and across the ends of lines."""
    before = ""
    for number, line in enumerate(map(str.strip, lines), 1):
        for rule in RULES:
            for found in rule.pattern.finditer(f"{before} {line}"):
                if found.end() > len(before) + 1:
                    yield Hit(f"{name}:{number}", found[0], rule.instead)
        before = line


def readable_files() -> Iterator[Path]:
    """The files of the checkout whose lines people read."""
    return (file for file in files() if file.suffix in _SUFFIXES and name_of(file) not in _EXEMPT)


def main() -> None:
    """Print the place of each phrase with a replacement, and exit with 1 if there is one."""
    found = [hit for file in readable_files() for hit in hits(name_of(file), file.read_text("utf-8").splitlines())]
    for hit in found:
        print(hit)
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()

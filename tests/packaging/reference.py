"""Generate `docs/reference/api/`, the reference of the public API, from signatures and docstrings.

`make reference` writes it, and the pages about commands, settings, metrics and spans that the `reference_*` modules
generate.

griffe parses the code without importing it, including docstrings of attributes; this module renders it as Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import griffe

from tests.packaging import reference_commands, reference_metrics, reference_settings, reference_spans
from tests.packaging.markdown import table
from tests.packaging.repository import ROOT
from tests.packaging.struct_constructors import constructor_of

MADE: Final = "Generated from signatures and docstrings by `make reference`."
FOLDER: Final = ROOT / "docs" / "reference" / "api"
PACKAGE: Final = "integr8s_idem"
PAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "front": ("",),
    "functions-and-loops": ("integrations.aiokafka", "integrations.confluent"),
    "http": ("integrations.asgi", "integrations.openapi", "integrations.httpx"),
    "faststream": ("integrations.faststream",),
    "dishka": ("integrations.dishka",),
    "outbox": ("integrations.sqlalchemy",),
    "messages": ("codecs", "keys.fingerprints"),
    "failures": ("failures", "reconciliation"),
    "records": ("records", "engine.work"),
    "stores": ("stores", "stores.memory", "stores.redis", "stores.sql", "stores.dynamodb"),
    "settings": ("config",),
    "worker": ("worker",),
    "runtime": ("runtime",),
    "telemetry": ("telemetry", "telemetry.log_fields"),
    "testing": ("testing", "testing.plugin", "testing.crash_points", "testing.transactional_crash_points"),
    "embedded": ("embedded",),
}
"""The modules on each page, by their names within the package."""

LEFT_OUT: Final = {
    "cli",
    "doctor",
    "functions.decorator",
    "handlers.dispatcher",
    "testing.contract",
    "testing.virtual_time",
    "worker.kafka_protocols",
}
"""Modules with an `__all__` that users do not import: commands, and modules whose names are exported elsewhere."""


@cache
def package() -> Any:
    """Return the package as parsed by griffe."""
    return griffe.load(PACKAGE, search_paths=[ROOT], docstring_parser="google", resolve_aliases=True)


@dataclass(frozen=True)
class Entry:
    """The place where a public object is documented."""

    page: str
    module: str
    thing: Any

    @property
    def heading(self) -> str:
        """The name as users import it, with its full module path."""
        return self.path

    @property
    def link(self) -> str:
        anchor = "".join(char for char in self.heading.lower() if char.isalnum() or char in "_-")
        return f"{self.page}.md#{anchor}"

    @property
    def path(self) -> str:
        """The path that users import it by."""
        return f"{_path(self.module)}.{self.thing.name}"


@cache
def entries() -> dict[str, Entry]:
    """Map the canonical path of each public object to the first place that documents it."""
    found: dict[str, Entry] = {}
    for name, modules in PAGES.items():
        for module in modules:
            for thing in public(module):
                found.setdefault(thing.canonical_path, Entry(name, module, thing))
    return found


def pages() -> dict[Path, str]:
    """Return the text of each page, by its file."""
    tables = {
        "cli": reference_commands,
        "metrics": reference_metrics,
        "settings": reference_settings,
        "spans": reference_spans,
    }
    beside = {FOLDER.parent / f"{name}.md": module.page() for name, module in tables.items()}
    return {FOLDER / "README.md": index(), **{FOLDER / f"{name}.md": page(name) for name in PAGES}, **beside}


def index() -> str:
    """Return the index page."""
    lines = ["# The public API", "", MADE, "", "Errors are documented on [a separate page](../errors.md).", ""]
    lines += [f"- [{title(name)}]({name}.md): {_named(modules)}" for name, modules in PAGES.items()]
    lines += ["", "| name | description |", "| --- | --- |"]
    for entry in entries().values():
        summary = " ".join(_text(entry.thing).partition("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| [`{entry.path}`]({entry.link}) | {summary} |")
    return "\n".join(lines) + "\n"


def title(page: str) -> str:
    """Return the heading of a page."""
    return page.replace("-", " ").capitalize()


def _named(modules: Iterable[str]) -> str:
    return ", ".join(f"`{_path(module)}`" for module in modules)


def page(name: str) -> str:
    """Return a page: its modules and their public objects."""
    lines = [f"# {title(name)}", "", MADE, ""]
    for module in PAGES[name]:
        lines += [f"## `{_path(module)}`", "", *_docstring(_module(module)), ""]
        listed = [entries()[thing.canonical_path] for thing in public(module)]
        elsewhere = [f"[`{entry.thing.name}`]({entry.link})" for entry in listed if entry.module != module]
        if elsewhere:
            lines += [f"Also here: {', '.join(elsewhere)}.", ""]
        for entry in listed:
            if entry.module == module:
                lines += [f"### {entry.heading}", "", *_rendered(entry.thing), ""]
    return "\n".join(_without_double_blanks(lines)).rstrip() + "\n"


def public(module: str) -> list[Any]:
    """Return the public objects of a module: its `__all__`, or all it defines without a leading underscore."""
    found = _module(module)
    names = sorted(map(str, found.exports or _defined_in(found)), key=str.lower)
    things = [found.members[name] for name in names]
    return [thing for thing in things if _is_public(thing) and (thing.docstring is not None or not thing.is_attribute)]


def exports(module: str) -> set[str]:
    """Return the names in the `__all__` of a module, including those of other packages."""
    return set(map(str, _module(module).exports or ()))


def _defined_in(module: Any) -> Iterator[str]:
    return (name for name, member in module.members.items() if name[0] != "_" and not member.is_alias)


def _is_public(thing: Any) -> bool:
    """Return whether the module defines it, or re-exports it from another module of the package."""
    if thing.is_alias:
        return str(thing.target_path).startswith(f"{PACKAGE}.")
    return not thing.is_module


def _module(name: str) -> Any:
    return package()[name] if name else package()


def _path(module: str) -> str:
    return f"{PACKAGE}.{module}" if module else PACKAGE


def _text(thing: Any) -> str:
    return str(thing.docstring.value) if thing.docstring is not None else ""


def _rendered(thing: Any) -> Iterator[str]:
    if thing.is_class:
        yield from _class(thing)
    elif thing.is_function:
        yield from (*_code(thing), "", *_docstring(thing))
    else:
        annotation = f": {thing.annotation}" if thing.annotation is not None else ""
        value = str(thing.value).replace("'", '"')  # the quotes that the formatter uses
        yield from ("```python", f"{thing.name}{annotation} = {value}", "```", "", *_docstring(thing))


def _class(thing: Any) -> Iterator[str]:
    bases = ", ".join(map(str, thing.bases))
    yield from ("```python", f"class {thing.name}({bases})" if bases else f"class {thing.name}", "```", "")
    yield from _docstring(thing)
    members = [member for member in thing.members.values() if member.name[0] != "_" or member.name == "__init__"]
    attributes = [member for member in members if member.is_attribute and _is_worth_listing(member)]
    if attributes:
        yield from ("", *table(("attribute", "type", "meaning"), [_row(member, thing) for member in attributes]))
    for member in members:
        if member.is_function and not _is_setter(member):
            yield from ("", *_code(member), "", *_docstring(member))
    if (constructor := constructor_of(thing)) is not None:
        yield from ("", *_code(constructor))


def _row(attribute: Any, of: Any) -> tuple[str, str, str]:
    shown = _type_of(attribute, of) or attribute.value
    kind = f"`{shown}`".replace("|", "\\|") if shown is not None else ""
    return f"`{attribute.name}`", kind, _one_line(attribute)


def _type_of(attribute: Any, of: Any) -> Any:
    """Return its annotation, or that of the parameter that it stores."""
    if attribute.annotation is not None:
        return attribute.annotation
    annotations = {parameter.name: parameter.annotation for parameter in of.parameters}
    return annotations.get(str(attribute.value))


def _is_worth_listing(attribute: Any) -> bool:
    return (
        attribute.docstring is not None or "instance-attribute" not in attribute.labels or attribute.annotation is None
    )


def _is_setter(member: Any) -> bool:
    return any("setter" in str(each.value) for each in member.decorators)


def _one_line(member: Any) -> str:
    return " ".join(_text(member).split()).replace("|", "\\|")


def _code(function: Any) -> Iterator[str]:
    """Yield the signature; if it is long, with one parameter per line."""
    makes = function.name == "__init__"
    name = function.parent.name if makes else function.name
    word = "" if makes else "async def " if "async" in function.labels else "def "
    returns = f" -> {function.returns}" if function.returns is not None and not makes else ""
    parts = list(_parameters(function.parameters))
    line = f"{word}{name}({', '.join(parts)}){returns}"
    yield "```python"
    if len(line) <= 100:
        yield line
    else:
        yield line.partition("(")[0] + "("
        yield from (f"    {part}," for part in parts)
        yield f"){returns}"
    yield "```"


def _parameters(parameters: Any) -> Iterator[str]:
    kinds = griffe.ParameterKind
    last = None
    for parameter in parameters:
        if parameter.name in {"self", "cls"}:
            continue
        if last is kinds.positional_only and parameter.kind is not kinds.positional_only:
            yield "/"
        if parameter.kind is kinds.keyword_only and last not in {kinds.keyword_only, kinds.var_positional}:
            yield "*"
        last = parameter.kind
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(parameter.kind, "")
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        equals = " = " if annotation else "="
        has_default = parameter.default is not None and not stars
        yield f"{stars}{parameter.name}{annotation}{f'{equals}{parameter.default}' if has_default else ''}"
    if last is kinds.positional_only:
        yield "/"


def modules_with_exports(module: Any = None) -> Iterator[str]:
    """Yield the modules that define `__all__`, by their names within the package."""
    found = module or package()
    if found.exports:
        yield found.path.removeprefix(PACKAGE).lstrip(".")
    for member in found.modules.values():
        yield from modules_with_exports(member)


def unknown_parameters(thing: Any) -> Iterator[str]:
    """Yield parameters that the docstrings of a function or class name, but that do not exist."""
    if thing.is_class:
        yield from _unknown_in(thing.parameters, thing)
        for member in thing.members.values():
            if member.is_function and (member.name[0] != "_" or member.name == "__init__"):
                yield from _unknown_in(member.parameters, member)
    elif thing.is_function:
        yield from _unknown_in(thing.parameters, thing)


def _unknown_in(parameters: Any, thing: Any) -> Iterator[str]:
    known = {parameter.name for parameter in parameters}
    for section in thing.docstring.parse("google", warnings=False) if thing.docstring is not None else ():
        if section.kind is griffe.DocstringSectionKind.parameters:
            # Related parameters can share a line.
            names = (name for each in section.value for name in each.name.split(", "))
            yield from (name for name in names if name not in known)


def _docstring(thing: Any) -> Iterator[str]:
    if thing.docstring is None:
        return
    for section in thing.docstring.parse("google", warnings=False):
        yield from _section(section)
        yield ""


def _section(section: Any) -> Iterator[str]:
    kinds = griffe.DocstringSectionKind
    match section.kind:
        case kinds.text:
            yield section.value
        case kinds.parameters:
            yield from ("Parameters:", "")
            yield from (f"- `{each.name}`: {_joined(each.description)}" for each in section.value)
        case kinds.raises:
            yield from ("Raises:", "")
            yield from (f"- `{each.annotation}`: {_joined(each.description)}" for each in section.value)
        case kinds.returns | kinds.yields:
            yield from (f"Returns: {_joined(each.description)}" for each in section.value)
        case kinds.admonition:
            yield from (f"{section.title}", "", section.value.contents)
        case _:
            raise AssertionError(f"docstring sections of kind {section.kind} are not supported yet")


def _joined(text: str) -> str:
    return " ".join(text.split())


def _without_double_blanks(lines: Iterable[str]) -> Iterator[str]:
    blank = False
    for line in lines:
        if line or not blank:
            yield line
        blank = not line


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for old in set(FOLDER.glob("*.md")) - set(made):
        old.unlink()
    for file, text in made.items():
        file.write_text(text, encoding="utf-8")
    print(f"{len(made)} pages written", file=sys.stderr)


if __name__ == "__main__":
    main()

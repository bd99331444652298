"""Render graphs as one self-contained HTML page that is readable without JavaScript."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Final

from integr8s_idem.operations.graphs import DISPATCHER, HANDLER, Dispatcher, Handler, Part, Scope, ServiceGraph
from integr8s_idem.operations.graphs.mermaid import as_mermaid

_LIVES: Final = {
    "RUNTIME": "put in from outside, once for the process",
    "APP": "one for the life of the worker",
    "SESSION": "one for a session",
    "REQUEST": "one for each delivery",
    "ACTION": "one for each action within a delivery",
    "STEP": "one for each step within an action",
}
_KINDS: Final = frozenset({"alias", "decorator", "selector", "collection"})
"""Labels of kinds that the headings of the groups do not cover."""
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Word boundaries in a name."""
_FEW: Final = 6
"""Number of parts in one column; more are laid out in two."""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def as_page(graphs: Sequence[ServiceGraph], title: str) -> str:
    """Return the page.  `title` names the application, such as `billing.workers:platform`."""
    sections = "\n".join(_service(graph, number) for number, graph in enumerate(graphs, start=1))
    count = f"{len(graphs)} service{'' if len(graphs) == 1 else 's'}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}: containers and dispatchers</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<header>
<p class="eyebrow">Containers and dispatchers</p>
<h1>{escape(title)}</h1>
<p class="lead">{count}. Each has a container of its own, and handles its events by the dispatcher that it gives.</p>
</header>
<main>
<section class="overview" aria-labelledby="overview">
<h2 id="overview">Who gets which dispatcher</h2>
{_overview(graphs)}
</section>
{sections}
</main>
<footer>Drawn by integr8s-idem {escape(version("integr8s-idem"))} from the graph that Dishka has checked.</footer>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _overview(graphs: Sequence[ServiceGraph]) -> str:
    headings = ("Service", "Dispatcher", "Keys", "Remembered", "Handlers", "Store")
    rows = "\n".join(_row(graph, number, headings) for number, graph in enumerate(graphs, start=1))
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _row(graph: ServiceGraph, number: int, headings: Sequence[str]) -> str:
    dispatcher = graph.dispatcher
    cells = [
        _badge(dispatcher),
        _keys(dispatcher),
        _remembered(dispatcher),
        _handlers(graph.handlers),
        _code(dispatcher.store) if dispatcher.store else _none("no records"),
    ]
    cells_html = "".join(
        f'<td data-heading="{heading}">{cell}</td>' for heading, cell in zip(headings[1:], cells, strict=True)
    )
    return f'<tr><th scope="row"><a href="#service-{number}">{escape(graph.name)}</a></th>{cells_html}</tr>'


def _badge(dispatcher: Dispatcher) -> str:
    kind = "idempotent" if dispatcher.is_idempotent else "plain"
    return f'<span class="badge {kind}">{kind}</span>'


def _keys(dispatcher: Dispatcher) -> str:
    return _code(dispatcher.strategy) if dispatcher.strategy else _none("no keys")


def _remembered(dispatcher: Dispatcher) -> str:
    if dispatcher.ttl_seconds is None:
        return _none("not at all")
    return escape(lasting(dispatcher.ttl_seconds)) + (
        '<br><span class="note">commits with what handlers write</span>' if dispatcher.is_transactional else ""
    )


def _handlers(handlers: Sequence[Handler]) -> str:
    """Return the event types by handler."""
    events: dict[tuple[str, bool, tuple[str, ...]], list[str]] = {}
    for handler in handlers:
        events.setdefault((handler.name, handler.takes_batches, handler.failures), []).append(handler.event_type)
    if not events:
        return _none("none")
    items = "".join(
        f"<li>{_code(name)}{' in batches' if in_batches else ''} ← {', '.join(_code(event) for event in taken)}"
        f"{_rules(failures)}</li>"
        for (name, in_batches, failures), taken in events.items()
    )
    return f'<ul class="plain-list">{items}</ul>'


def _rules(failures: Sequence[str]) -> str:
    if not failures:
        return ""
    return f'<br><span class="note">if it fails: {", ".join(_code(rule) for rule in failures)}</span>'


def _service(graph: ServiceGraph, number: int) -> str:
    scopes = "\n".join(_scope(scope, graph) for scope in graph.scopes)
    columns = " ".join(f"minmax(0, {_columns(scope)}fr)" for scope in graph.scopes)
    refused = (
        '<p class="warning">This container is synchronous, and the worker refuses it: '
        "make it with <code>make_async_container</code>.</p>\n"
        if graph.is_synchronous
        else ""
    )
    return f"""<section class="service" id="service-{number}" aria-labelledby="name-{number}">
<div class="title"><h2 id="name-{number}">{escape(graph.name)}</h2>{_badge(graph.dispatcher)}</div>
<p class="facts">{_facts(graph)}</p>
{refused}<div class="scopes" style="grid-template-columns: {columns}">
{scopes}
</div>
<details><summary>The same as Mermaid, to paste elsewhere</summary>
<pre tabindex="0" aria-label="Mermaid of {escape(graph.name)}"><code>{escape(as_mermaid([graph]))}</code></pre>
</details>
</section>"""


def _facts(graph: ServiceGraph) -> str:
    dispatcher = graph.dispatcher
    facts = [f"{_code(dispatcher.type)}", f"consumer group {_code(graph.group_id)}"]
    if dispatcher.strategy:
        facts.append(f"keys {_code(dispatcher.strategy)}")
    if dispatcher.ttl_seconds is not None:
        facts.append(f"remembered for {escape(lasting(dispatcher.ttl_seconds))}")
    if dispatcher.store:
        facts.append(f"records in {_code(dispatcher.store)}")
    return '<span aria-hidden="true"> · </span>'.join(f"<span>{fact}</span>" for fact in facts)


def _scope(scope: Scope, graph: ServiceGraph) -> str:
    groups = "\n".join(_group(title, parts, graph) for title, parts in _grouped(scope))
    lives = f' <span class="note">{_LIVES[scope.name]}</span>' if scope.name in _LIVES else ""
    heading = f"<h3>{escape(scope.name)}{lives}</h3>"
    look = f"scope columns-{_columns(scope)}"
    return f'<section class="{look}">\n{heading}\n<div class="groups">\n{groups}\n</div>\n</section>'


def _columns(scope: Scope) -> int:
    return 1 if len(scope.parts) <= _FEW else 2


def _grouped(scope: Scope) -> Iterator[tuple[str, list[Part]]]:
    """Group parts by provider: first context, last the handlers."""
    groups: dict[tuple[int, str], list[Part]] = {}
    for part in scope.parts:
        groups.setdefault(_group_of(part), []).append(part)
    for (_, title), parts in sorted(groups.items(), key=lambda group: group[0][0]):
        yield title, parts


def _group_of(part: Part) -> tuple[int, str]:
    component = f" in component {part.component}" if part.component else ""
    if part.kind == HANDLER:
        return 2, "What handlers ask for"
    if part.kind == "context":
        return 0, f"From outside{component}"
    return 1, f"{part.provider or 'By its own class or function'}{component}"


def _group(title: str, parts: Sequence[Part], graph: ServiceGraph) -> str:
    items = "\n".join(_part(part, graph) for part in parts)
    return f'<div class="group">\n<h4>{_name(title)}</h4>\n<ul class="parts">\n{items}\n</ul>\n</div>'


def _part(part: Part, graph: ServiceGraph) -> str:
    parts = graph.parts
    marks = [part.kind] if part.kind in _KINDS else []
    marks += ["protocol"] if part.is_protocol else []
    kinds = "".join(f'<span class="kind">{escape(mark)}</span>' for mark in marks)
    look, cells_html = "part", ""
    if part.name == DISPATCHER:
        look += " idempotent" if graph.dispatcher.is_idempotent else " plain"
        cells_html = f'<p class="needs">is {_code(graph.dispatcher.type)}</p>'
    needs = ", ".join(f'<a href="#{needed}">{_name(parts[needed].name)}</a>' for needed in part.needs)
    cells_html += f'<p class="needs">needs {needs}</p>' if needs else ""
    return (
        f'<li class="{look}" id="{part.id}" data-needs="{" ".join(part.needs)}">'
        f'<button type="button" aria-pressed="false">{_name(part.name)}</button>{kinds}{cells_html}</li>'
    )


def lasting(seconds: float) -> str:
    """Format a duration."""
    for unit, length in (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        count = seconds / length.total_seconds()
        if count >= 1 and count == int(count):
            return f"{int(count)} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:g} seconds"


def _name(text: str) -> str:
    """Escape a name, and allow line breaks before each of its words."""
    return "<wbr>".join(escape(word) for word in _WORDS.split(text))


def _code(text: str) -> str:
    return f"<code>{_name(text)}</code>"


def _none(text: str) -> str:
    return f'<span class="note">{text}</span>'

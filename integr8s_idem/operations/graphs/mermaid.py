"""Render graphs as a Mermaid flowchart with a box for each service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from integr8s_idem.operations.graphs import DISPATCHER, HANDLER, Part, ServiceGraph

_ENTITIES: Final = str.maketrans(
    {"#": "#35;", '"': "#quot;", "&": "#amp;", "<": "#lt;", ">": "#gt;", "`": "#96;", "\n": " "}
)
_SHAPES: Final = {"context": ("([", "])"), HANDLER: ("{{", "}}")}
"""Shapes of parts without a provider; all others are boxes."""
_CLASSES: Final = (
    "classDef idempotent fill:#d9f2e3,stroke:#0b6b3a,stroke-width:3px,color:#0a3d22",
    "classDef plain fill:#fdefc8,stroke:#8a5a00,stroke-width:3px,color:#4a3000",
)


def as_mermaid(graphs: Sequence[ServiceGraph]) -> str:
    """Return one diagram of all graphs; arrows lead from dependencies to dependents."""
    return "\n".join(["flowchart LR", *(line for graph in graphs for line in _lines(graph)), *_indented(_CLASSES), ""])


def _lines(graph: ServiceGraph) -> Iterator[str]:
    """Yield the box of a service with a box for each scope, followed by the arrows."""
    prefix = next(iter(graph.parts), "s0").partition("-")[0]
    yield f'  subgraph {prefix}["{_text(graph.name)}: {_text(graph.dispatcher.type)}"]'
    for number, scope in enumerate(graph.scopes):
        yield f'    subgraph {prefix}-{number}["{_text(scope.name)}"]'
        for part in scope.parts:
            yield f"      {_box(part, graph)}"
        yield "    end"
    yield "  end"
    for part in graph.parts.values():
        for needed in part.needs:
            yield f"  {needed} --> {part.id}"


def _box(part: Part, graph: ServiceGraph) -> str:
    left, right = _SHAPES.get(part.kind, ("[", "]"))
    mark = ""
    if part.name == DISPATCHER:
        mark = ":::idempotent" if graph.dispatcher.is_idempotent else ":::plain"
    component = f" ({_text(part.component)})" if part.component else ""
    return f'{part.id}{left}"{_text(part.name)}{component}"{right}{mark}'


def _text(text: str) -> str:
    """Escape `text` for a quoted label."""
    return text.translate(_ENTITIES)


def _indented(lines: Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)

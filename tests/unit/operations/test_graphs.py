"""Graphs of containers: parts, dispatchers and errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterable, Callable
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from dishka import (
    STRICT_VALIDATION,
    AsyncContainer,
    FromComponent,
    Provider,
    Scope,
    alias,
    decorate,
    from_context,
    make_async_container,
    make_container,
    provide,
)
from typer.testing import CliRunner

from integr8s_idem import (
    BaseEvent,
    EventDispatcher,
    EventRouter,
    IdempotencyConfig,
    IdempotencyManager,
    IdempotencyRepository,
    IdempotentEventDispatcher,
    KeyStrategy,
    MemoryIdempotencyRepository,
    Platform,
    Service,
    Settings,
)
from integr8s_idem.cli.app import app
from integr8s_idem.errors import ApplicationError
from integr8s_idem.failures import discard, retry
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    EventContextProvider,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.operations.graphs import Part, ServiceGraph, make_graphs
from integr8s_idem.operations.graphs.mermaid import as_mermaid
from integr8s_idem.operations.graphs.page import as_page, lasting


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


class Payments:
    """What the handler asks for."""


class Carefully(Payments):
    """Around another one."""


ODD = type("<script>alert(1)</script>", (), {})
"""A class of a name that a page could take for more."""

router = EventRouter()


@router.on(OrderPlaced)
async def charge(event: OrderPlaced, payments: FromDishka[Payments]) -> None:
    """Charge."""


class PaymentsProvider(Provider):
    scope = Scope.APP

    payments = provide(Payments)
    odd = alias(Payments, provides=ODD)

    @decorate
    def carefully(self, payments: Payments) -> Payments:
        return Carefully()


def container_of(*providers: Provider, **options: Any) -> Callable[[Settings], AsyncContainer]:
    def make(settings: Settings) -> AsyncContainer:
        context = {Settings: settings, ServiceName: ServiceName("billing")}
        return make_async_container(
            TelemetryProvider(), EventContextProvider(), KafkaProvider(), *providers, context=context, **options
        )

    return make


def guarded(**options: Any) -> Callable[[Settings], AsyncContainer]:
    return container_of(
        IdempotencyProvider(),
        IdempotentDispatcherProvider(router, **options),
        PaymentsProvider(),
    )


PLAIN = container_of(DispatcherProvider(router), PaymentsProvider())


def graph_of(container: Any, settings: dict[str, Any] | None = None, name: str = "billing") -> ServiceGraph:
    platform = Platform(Service(name, container=container, group_id="payers"))
    (graph,) = asyncio.run(make_graphs(platform, Settings.model_validate(settings or {})))
    return graph


def part(graph: ServiceGraph, name: str, kind: str | None = None) -> Part:
    """The only one of this name, and of this kind if given."""
    (found,) = [part for part in graph.parts.values() if part.name == name and kind in (None, part.kind)]
    return found


def needs(graph: ServiceGraph, name: str) -> set[str]:
    return {graph.parts[needed].name for needed in part(graph, name).needs}


def test_an_idempotent_dispatcher_has_keys_ttl_and_store() -> None:
    graph = graph_of(guarded(key_strategy=KeyStrategy.CONTENT_HASH, fields=["order_id"], ttl=timedelta(days=8)))

    result = graph.dispatcher
    assert (result.type, result.is_idempotent, result.is_transactional) == ("IdempotentEventDispatcher", True, False)
    assert (result.strategy, result.ttl_seconds, result.store) == ("content_hash of order_id", 691_200, "redis")
    assert [(each.event_type, each.name, each.takes_batches) for each in graph.handlers] == [
        ("order_placed", "charge", False)
    ]
    assert graph.group_id == "payers"


def test_a_plain_dispatcher_has_neither_keys_nor_store() -> None:
    result = graph_of(PLAIN).dispatcher

    assert (result.type, result.is_idempotent) == ("EventDispatcher", False)
    assert (result.strategy, result.ttl_seconds, result.store) == (None, None, None)


def test_the_rules_for_errors_of_a_handler_are_shown_with_those_of_the_settings() -> None:
    rules = EventRouter(failures=[retry(ConnectionError, attempts=20)])

    @rules.on(OrderPlaced, failures=[discard(KeyError)])
    async def charge(event: OrderPlaced) -> None: ...

    settings = {"services": {"billing": {"failures": [{"error": "OSError", "action": "stop"}]}}}
    graph = graph_of(container_of(DispatcherProvider(rules)), settings)

    assert [each.failures for each in graph.handlers] == [
        ("discard(KeyError)", "retry(ConnectionError, attempts=20)", "stop(OSError)")
    ]
    text = re.sub("<[^>]*>", "", as_page([graph], "shop:platform"))
    assert "charge ← order_placedif it fails: discard(KeyError), retry(ConnectionError, attempts=20), stop" in text
    assert "if it fails" not in as_page([graph_of(PLAIN)], "shop:platform")


def test_settings_override_the_ttl_of_the_dispatcher() -> None:
    settings = {
        "idempotency": {"default_ttl_seconds": 600},
        "store": {"kind": "memory"},
        "services": {"billing": {"group_id": "others"}},
    }
    graph = graph_of(guarded(), settings)

    assert (graph.dispatcher.ttl_seconds, graph.dispatcher.store, graph.group_id) == (600, "memory", "others")


def test_a_custom_dispatcher_is_recognized() -> None:
    """Its provider says EventDispatcher, as all do: only the object tells."""

    class Careful(IdempotentEventDispatcher):
        pass

    class Own(Provider):
        scope = Scope.APP

        @provide
        async def store(self) -> AsyncIterable[IdempotencyRepository]:
            yield MemoryIdempotencyRepository()

        @provide
        def dispatcher(self, store: IdempotencyRepository) -> EventDispatcher:
            manager = IdempotencyManager(IdempotencyConfig(), store, scope="billing")
            return Careful(EventRouter(), manager, resolver=KeyResolver(KeyStrategy.CUSTOM, custom=lambda event: "k"))

    graph = graph_of(lambda settings: make_async_container(Own()))

    assert (graph.dispatcher.type, graph.dispatcher.is_idempotent) == ("Careful", True)
    assert (graph.dispatcher.strategy, graph.dispatcher.store) == ("custom", "MemoryIdempotencyRepository")
    assert part(graph, "EventDispatcher").provider == "Own"


def test_parts_are_listed_by_scope_with_their_dependencies() -> None:
    graph = graph_of(guarded())

    scopes = {scope.name: {part.name for part in scope.parts} for scope in graph.scopes}
    assert list(scopes) == ["RUNTIME", "APP", "REQUEST"]
    assert {"Settings", "ServiceName"} <= scopes["RUNTIME"]
    assert {"EventDispatcher", "IdempotencyManager", "EventPublisher"} <= scopes["APP"]
    assert {"Attempt", "Outgoing", "Steps", "charge"} <= scopes["REQUEST"]
    assert needs(graph, "IdempotencyRepository") == {"Settings", "IdempotencyConfig"}
    assert needs(graph, "EventDispatcher") == {
        "Settings",
        "ServiceName",
        "AsyncContainer",
        "EventPublisher",
        "IdempotencyManager",
        "TransactionResources",
    }
    assert part(graph, "Settings").kind == "context"
    assert part(graph, "IdempotencyRepository").is_protocol
    assert part(graph, "IdempotencyManager").source == "IdempotencyProvider.manager"


def test_handlers_are_parts_with_their_dependencies() -> None:
    graph = graph_of(PLAIN)

    asked = part(graph, "charge")
    assert (asked.kind, asked.provider) == ("handler", "")
    assert needs(graph, "charge") == {"Payments"}


def test_decorators_and_aliases_are_parts() -> None:
    graph = graph_of(PLAIN)

    assert part(graph, "Payments", "decorator").source == "PaymentsProvider.carefully"
    assert [graph.parts[needed].kind for needed in part(graph, "charge").needs] == ["decorator"]
    assert [part.kind for part in graph.parts.values() if "script" in part.name] == ["alias"]


def test_internal_parts_of_dishka_are_hidden_unless_needed() -> None:
    graph = graph_of(PLAIN)

    assert not [part for part in graph.parts.values() if part.name.startswith("HasContext")]
    assert [scope.name for scope in graph.scopes for part in scope.parts if part.name == "AsyncContainer"] == ["APP"]


def test_parts_have_their_component() -> None:
    class Far(Provider):
        scope = Scope.APP
        component = "far"

        @provide
        def number(self) -> int:
            return 7

    class Near(Provider):
        scope = Scope.APP

        @provide
        def text(self, number: Annotated[int, FromComponent("far")]) -> str:
            return str(number)

    graph = graph_of(container_of(DispatcherProvider(EventRouter()), Far(), Near()))

    assert part(graph, "int").component == "far"
    assert needs(graph, "str") == {"int"}
    assert "Far in component far" in as_page([graph], "shop:platform")
    assert '["int (far)"]' in as_mermaid([graph])


def test_only_selected_services_are_created() -> None:
    def broken(settings: Settings) -> AsyncContainer:
        raise AssertionError("nobody asked for this one")

    platform = Platform(Service("billing", container=PLAIN), Service("audit", container=broken))

    assert [graph.name for graph in asyncio.run(make_graphs(platform, Settings(), ["billing"]))] == ["billing"]


def test_containers_are_always_closed() -> None:
    closed: list[str] = []

    class Closing(Provider):
        scope = Scope.APP

        @provide
        async def dispatcher(self) -> AsyncIterable[EventDispatcher]:
            yield EventDispatcher(EventRouter())
            closed.append("closed")

    graph_of(lambda settings: make_async_container(Closing()))

    assert closed == ["closed"]


def test_a_missing_dependency_is_reported_with_the_handler_that_needs_it() -> None:
    container = container_of(DispatcherProvider(router), validation_settings=STRICT_VALIDATION)

    with pytest.raises(ApplicationError) as refusal:
        graph_of(container)

    result = str(refusal.value)
    assert "the container of service billing cannot be created:" in result
    assert "Payments" in result
    assert "charge" in result  # the way to it
    assert "Traceback" not in result


@pytest.mark.parametrize(
    ("container", "why"),
    [
        (lambda settings: make_async_container(), "does not provide a dispatcher:"),
        (lambda settings: 1 / 0, "cannot be created: ZeroDivisionError: division by zero"),
    ],
)
def test_problems_of_a_container_are_reported(container: Any, why: str) -> None:
    with pytest.raises(ApplicationError, match=re.escape(f"the container of service billing {why}")):
        graph_of(container)


def test_creating_a_dispatcher_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Provider):
        scope = Scope.APP

        @provide
        async def dispatcher(self) -> EventDispatcher:
            await asyncio.sleep(3_600)
            raise AssertionError

    monkeypatch.setattr("integr8s_idem.operations.graphs.MAKE_SECONDS", 0.05)

    with pytest.raises(ApplicationError, match=r"does not provide a dispatcher: TimeoutError: no answer within 0.05 s"):
        graph_of(lambda settings: make_async_container(Hanging()))


def test_a_synchronous_container_is_drawn_and_marked() -> None:
    class Plainly(Provider):
        scope = Scope.APP
        settings = from_context(Settings)

        @provide
        def dispatcher(self, settings: Settings) -> EventDispatcher:
            return EventDispatcher(router)

    graph = graph_of(lambda settings: make_container(Plainly(), context={Settings: settings}))

    assert graph.is_synchronous
    assert needs(graph, "EventDispatcher") == {"Settings"}
    assert "make_async_container" in as_page([graph], "shop:platform")


def test_mermaid_has_a_box_for_each_part_and_an_arrow_for_each_dependency() -> None:
    graph = graph_of(guarded())

    lines = [line.strip() for line in as_mermaid([graph]).splitlines()]

    assert lines[0] == "flowchart LR"
    assert 'subgraph s1["billing: IdempotentEventDispatcher"]' in lines
    assert sum(line.startswith("subgraph") for line in lines) == lines.count("end") == 4
    for each in graph.parts.values():
        assert sum(bool(re.match(rf"{each.id}\W+\"", line)) for line in lines) == 1
        for needed in each.needs:
            assert f"{needed} --> {each.id}" in lines
    (dispatcher,) = [line for line in lines if line.endswith(":::idempotent")]
    assert dispatcher.startswith(part(graph, "EventDispatcher").id)


def test_mermaid_marks_plain_dispatchers() -> None:
    assert ":::plain" in as_mermaid([graph_of(PLAIN)])
    assert ":::idempotent" not in as_mermaid([graph_of(PLAIN)])


def test_names_are_escaped_in_mermaid() -> None:
    diagram = as_mermaid([graph_of(PLAIN, name='shop"]\nend <b>&#')])

    assert 'subgraph s1["shop#quot;] end #lt;b#gt;#amp;#35;: EventDispatcher"]' in diagram
    assert "<script>" not in diagram


class Markup(HTMLParser):
    """The tags of a page, balanced, and its ids."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        result = dict(attrs)
        self.ids += [result["id"] or ""] if "id" in result else []
        self.targets += [result["href"] or ""] if tag == "a" else []
        if tag not in ("meta", "link", "wbr", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_its_links_lead_to_its_parts() -> None:
    platform = Platform(Service("billing", container=guarded()), Service("audit", container=PLAIN, group_id="others"))
    page = Markup(as_page(asyncio.run(make_graphs(platform, Settings())), "shop:platform"))

    assert len(set(page.ids)) == len(page.ids)
    assert {target.removeprefix("#") for target in page.targets} <= set(page.ids)
    assert page.tags.count("h1") == page.tags.count("main") == page.tags.count("script") == 1


def test_names_are_escaped_in_the_page() -> None:
    graph = graph_of(PLAIN, name='<img src="x" onerror="alert(1)">')

    page = as_page([graph], "<b>shop</b>:platform")

    assert "<img" not in page
    assert "<b>shop" not in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(86_400, "1 day"), (691_200, "8 days"), (5_400, "90 minutes"), (7_200, "2 hours"), (0.5, "0.5 seconds")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


# The command.


def graph_command(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, ["graph", "examples.billing.workers:platform", *arguments])
    return ended.exit_code, ended.stdout, ended.stderr


def test_the_default_format_is_mermaid() -> None:
    status, printed, result = graph_command()

    assert (status, result) == (0, "")
    assert printed.startswith("flowchart LR\n")


def test_json_contains_the_whole_graph() -> None:
    status, printed, _ = graph_command("--format", "json", "--service", "audit")

    (audit,) = json.loads(printed)["services"]
    assert status == 0
    assert audit["dispatcher"]["is_idempotent"] is False
    assert audit["handlers"] == [
        {"event_type": "order_paid", "name": "note_payment", "takes_batches": False, "failures": []}
    ]
    assert {part["name"] for scope in audit["scopes"] for part in scope["parts"]} >= {"Audit", "note_payment"}


@pytest.mark.parametrize(
    ("name", "options", "start"),
    [
        ("graph.html", [], "<!doctype html>"),
        ("graph.HTM", [], "<!doctype html>"),
        ("graph.json", [], "{"),
        ("graph.mmd", [], "flowchart"),
        ("graph.txt", ["--format", "html"], "<!doctype html>"),
    ],
)
def test_the_format_follows_the_option_or_the_suffix(tmp_path: Path, name: str, options: list[str], start: str) -> None:
    status, printed, result = graph_command("--output", str(tmp_path / name), *options)

    assert (status, printed) == (0, "")
    assert result == f"wrote {tmp_path / name}\n"
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--service", "biling"], 'did you mean "billing"?'),
        (["--output", "nowhere/graph.html"], "cannot write nowhere/graph.html: No such file or directory"),
        (["--settings", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_invalid_arguments_are_reported(arguments: list[str], why: str) -> None:
    status, printed, result = graph_command(*arguments)

    assert (status, printed) == (2, "")
    assert why in result

"""A collector of spans and log records over OTLP, which keeps what it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord


class Collector:
    """What a collector has received."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.paths: list[str] = []
        """Paths of HTTP requests."""
        self.traces: list[ExportTraceServiceRequest] = []
        self.logs: list[ExportLogsServiceRequest] = []

    def spans(self) -> list[tuple[str, str]]:
        """Return service and name of each span."""
        return [
            (attribute.value.string_value, span.name)
            for request in self.traces
            for of in request.resource_spans
            for attribute in of.resource.attributes
            if attribute.key == "service.name"
            for scope in of.scope_spans
            for span in scope.spans
        ]

    def records(self, logger: str) -> list[LogRecord]:
        """Return the log records of a logger."""
        return [
            record
            for request in self.logs
            for of in request.resource_logs
            for scope in of.scope_logs
            for record in scope.log_records
            if scope.scope.name == logger
        ]

    def attributes(self, record: LogRecord) -> dict[str, Any]:
        """Return the attributes of a log record."""
        return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in record.attributes}

    @property
    def loggers(self) -> set[str]:
        scopes = [scope for request in self.logs for of in request.resource_logs for scope in of.scope_logs]
        return {scope.scope.name for scope in scopes}

    def receive(self, path: str, body: bytes) -> None:
        """Keep the body of an HTTP request."""
        self.paths.append(path)
        if path == "/v1/logs":
            self.logs.append(ExportLogsServiceRequest.FromString(body))
        else:
            self.traces.append(ExportTraceServiceRequest.FromString(body))


@contextmanager
def http_collecting() -> Iterator[Collector]:
    """Run a collector for OTLP over HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.receive(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_collecting() -> Iterator[Collector]:
    """Run a collector for OTLP over gRPC."""
    collector = Collector()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: N802
            collector.traces.append(request)
            return ExportTraceServiceResponse()

    class Logs(logs_service_pb2_grpc.LogsServiceServicer):
        def Export(self, request: ExportLogsServiceRequest, context: object) -> ExportLogsServiceResponse:  # noqa: N802
            collector.logs.append(request)
            return ExportLogsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)  # type: ignore[no-untyped-call]
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Logs(), server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()

"""`KubernetesStandIn`: the fake API server on a loopback port, with injectable faults.

async with KubernetesStandIn(tmp_path) as cluster:
    cluster.kubeconfig           # a kubeconfig file for it
    cluster.refuse("create", "jobs", 503, times=3)
    ...
    assert cluster.made == ["exec-1"]
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import yaml
from aiohttp import web

from tests.support.kubernetes.checks import (
    LARGEST_OBJECT,
    LARGEST_REQUEST,
    RefusalError,
    check_deletion,
    check_job,
    check_parameters,
    documented_rights,
)
from tests.support.kubernetes.controller import Controller
from tests.support.kubernetes.kubelet import Kubelet
from tests.support.kubernetes.objects import Objects, new_metadata
from tests.support.listening import accept_no_more

NAMESPACE: Final = "executions"
TOKEN: Final = "a-token"
_USER: Final = "system:serviceaccount:executions:k8s-worker"


@dataclass
class Fault:
    """A fault for the next requests of a kind."""

    verb: str
    resource: str
    times: int
    happens: Callable[[web.Request], Any]
    afterwards: bool = False
    """Whether the request is executed first, so that only its answer is lost."""


class KubernetesStandIn:
    """A namespace of a fake cluster."""

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        self.objects = Objects()
        self.kubelet = Kubelet(self.objects, folder / "pods")
        self.controller = Controller(self.objects, self.kubelet)
        self.rights = documented_rights()
        self.token = TOKEN
        self.requests: list[tuple[str, str]] = []
        """(verb, resource) of every request so far."""
        self.deletions: list[tuple[str, str]] = []
        """(name, policy) of every deleted Job."""
        self.made: list[str] = []
        """Names of the created Jobs, in order."""
        self.kubeconfig = folder / "kubeconfig"
        self.most_jobs: int | None = None
        """The quota for Jobs that exist at the same time."""
        self.faults: list[Fault] = []
        self._tls = tls
        self._watches: set[asyncio.WriteTransport] = set()
        self._bugs: list[Exception] = []
        self._runner: web.AppRunner | None = None

    def refuse(self, verb: str, resource: str, code: int, *, times: int = 1, retry_after: int | None = None) -> None:
        """Answer the next requests of that kind with an error."""
        refusal = RefusalError(code, "Refused", "refused by the test", retry_after)

        async def happens(request: web.Request) -> web.StreamResponse:
            return refusal.response()

        self.faults.append(Fault(verb, resource, times, happens))

    def drop(self, verb: str, resource: str, *, times: int = 1, afterwards: bool = False) -> None:
        """Close the connection instead of answering, before or after the request is executed."""
        self.faults.append(Fault(verb, resource, times, _drop, afterwards))

    def keep_waiting(self, verb: str, resource: str, *, times: int = 1) -> None:
        """Accept the next requests of that kind, and never answer them."""

        async def happens(request: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError("unreachable: the event is never set")

        self.faults.append(Fault(verb, resource, times, happens))

    def break_watches(self) -> int:
        """Close the connections of all watches, and return their number."""
        for transport in (broken := list(self._watches)):
            transport.abort()
        return len(broken)

    def pod(self) -> dict[str, Any]:
        """Return the only pod."""
        (pod,) = self.objects.pods.values()
        return pod

    @property
    def port(self) -> int:
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    def write_kubeconfig(self, token: str = TOKEN) -> None:
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "stand-in",
                    "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": "worker"}}],
                    "clusters": [{"name": "stand-in", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "worker", "user": {"token": token}}],
                }
            )
        )

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2 * LARGEST_REQUEST)
        jobs = "/apis/batch/v1/namespaces/{namespace}/jobs"
        pods = "/api/v1/namespaces/{namespace}/pods"
        for method, path, verb, resource, answer in (
            ("POST", jobs, "create", "jobs", self._create_job),
            ("GET", f"{jobs}/{{name}}", "get", "jobs", self._get_job),
            ("DELETE", f"{jobs}/{{name}}", "delete", "jobs", self._delete_job),
            ("GET", jobs, "list", "jobs", self._refuse_unknown),
            ("GET", pods, "list", "pods", self._list_pods),
            ("GET", f"{pods}/{{name}}", "get", "pods", self._refuse_unknown),
            ("DELETE", f"{pods}/{{name}}", "delete", "pods", self._refuse_unknown),
            ("GET", f"{pods}/{{name}}/log", "get", "pods/log", self._log),
        ):
            app.router.add_route(method, path, self._route(verb, resource, answer))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        self._listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(self._runner, self._listening, ssl_context=self._tls).start()
        self.write_kubeconfig()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self.kubelet.close()
        await self.controller.close()
        await accept_no_more([self._listening])
        await self._runner.cleanup()
        # Clients retry errors of the server, so bugs of this fake would go unnoticed without this check.
        assert self._bugs == []

    def _route(self, verb: str, resource: str, answer: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            asked = "watch" if verb == "list" and request.query.get("watch") in ("true", "True", "1") else verb
            self.requests.append((asked, resource))
            fault = self._fault(asked, resource)
            answered: web.StreamResponse
            try:
                if fault is not None and not fault.afterwards:
                    answered = await fault.happens(request)
                    return answered
                self._check(request, asked, resource)
                answered = await answer(request)
            except RefusalError as refusal:
                answered = refusal.response()
            except Exception as bug:
                self._bugs.append(bug)
                raise
            if fault is not None:
                answered = await fault.happens(request)
            return answered

        return handle

    def _fault(self, verb: str, resource: str) -> Fault | None:
        for fault in self.faults:
            if (fault.verb, fault.resource) == (verb, resource) and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def _check(self, request: web.Request, verb: str, resource: str) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise RefusalError(401, "Unauthorized", "Unauthorized")
        namespace = request.match_info["namespace"]
        group = "batch" if resource == "jobs" else ""
        if (verb, resource) not in self.rights or namespace != NAMESPACE:
            raise RefusalError(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "{_USER}" cannot {verb} resource "{resource}" in API group "{group}" '
                f'in the namespace "{namespace}"',
            )
        check_parameters("log" if resource == "pods/log" else verb, request.query)

    async def _create_job(self, request: web.Request) -> web.Response:
        body = await request.read()
        if len(body) > LARGEST_REQUEST:
            raise RefusalError(413, "RequestEntityTooLarge", "the request is too large")
        job = json.loads(body)
        check_job(job)
        name = job["metadata"]["name"]
        if name in self.objects.jobs:
            raise RefusalError(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        if self.most_jobs is not None and (used := len(self.objects.jobs)) >= self.most_jobs:
            count = "count/jobs.batch"
            raise RefusalError(
                403,
                "Forbidden",
                f'jobs.batch "{name}" is forbidden: exceeded quota: scripts, requested: {count}=1, '
                f"used: {count}={used}, limited: {count}={self.most_jobs}",
            )
        if len(body) > LARGEST_OBJECT:
            raise RefusalError(500, "InternalError", "etcdserver: request is too large")
        job["metadata"] = new_metadata(job["metadata"], NAMESPACE, self.objects.next_version())
        job["status"] = {}
        self.objects.jobs[name] = job
        self.made.append(name)
        self.controller.made(job)
        return web.json_response(job, status=201)

    async def _get_job(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request))

    async def _delete_job(self, request: web.Request) -> web.Response:
        job, body = self._job(request), await request.read()
        options = json.loads(body) if body else {}
        check_deletion(options)
        uid = options.get("preconditions", {}).get("uid", job["metadata"]["uid"])
        if uid != job["metadata"]["uid"]:
            raise RefusalError(409, "Conflict", "the UID in the precondition does not match the UID in record")
        # batch/v1 orphans pods by default.
        policy = request.query.get("propagationPolicy") or options.get("propagationPolicy", "Orphan")
        self.deletions.append((job["metadata"]["name"], policy))
        self.controller.delete(job, policy)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        selector = request.query.get("labelSelector", "")
        if request.query.get("watch"):
            return await self._watch_pods(request, selector)
        metadata = {"resourceVersion": str(self.objects.version)}
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": self.objects.selected(selector)}
        )

    async def _watch_pods(self, request: web.Request, selector: str) -> web.StreamResponse:
        since, seconds = int(request.query["resourceVersion"]), int(request.query["timeoutSeconds"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.WriteTransport)
        self._watches.add(transport)
        try:
            with suppress(ConnectionError):  # closed by the client or by `break_watches`
                async for event in self._events(selector, since, seconds):
                    await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watches.discard(transport)
        return response

    def _events(self, selector: str, since: int, seconds: int) -> AsyncIterator[dict[str, Any]]:
        return self.objects.watch(selector, since, seconds)

    async def _log(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.objects.pods:
            raise RefusalError(404, "NotFound", f'pods "{name}" not found')
        if not self.kubelet.has_begun(name):
            raise RefusalError(400, "BadRequest", f'container "script" in pod "{name}" is waiting to start')
        log = self.kubelet.log_of(name)
        return web.Response(body=log[: int(request.query.get("limitBytes", len(log) or 1))], content_type="text/plain")

    async def _refuse_unknown(self, request: web.Request) -> web.Response:
        raise AssertionError("unreachable: no role allows this request")

    def _job(self, request: web.Request) -> dict[str, Any]:
        name = request.match_info["name"]
        if name not in self.objects.jobs:
            raise RefusalError(404, "NotFound", f'jobs.batch "{name}" not found')
        return self.objects.jobs[name]


async def _drop(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(0)
    raise asyncio.CancelledError

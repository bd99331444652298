"""The requests that the Kubernetes runner makes: six verbs on three resources, each repeated until it is answered.

    jobs       create, get, delete
    pods       list, watch
    pods/log   get

Objects are dictionaries, as the API gives them: a server may be newer than the client's models.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from time import monotonic
from typing import Any, Final, TypeVar

import aiohttp
from kubernetes_asyncio import client

from services.settings import KubernetesSection

REQUEST_SECONDS: Final = 20.0
"""Longest wait for one answer."""
WATCH_SLACK_SECONDS: Final = 10.0
"""A watch that says nothing for this long beyond its own end is a connection that nobody has closed."""

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 10.0
_LONGEST_RETRY_AFTER: Final = 60.0
_MOST_WORDS: Final = 65_536
_PASSING: Final = frozenset({408, 410, 425, 429, 500, 502, 503, 504})
"""410: what we have listed is too old to go on from."""
_CONTROLLER: Final = "batch.kubernetes.io/controller-uid"
"""The label of a Job's pods; the Job's uid, since its name may have belonged to another one before."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[], Awaitable[aiohttp.ClientResponse]]


class ClusterError(OSError):
    """The cluster did not do it.  Asked again, later, it may."""


class UnansweredError(ClusterError):
    """No usable answer: no connection, an overloaded server, one that fails, a watch that cannot go on."""

    def __init__(self, why: str, retry_after: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class RefusedError(ClusterError):
    """The cluster has answered, and will not."""

    def __init__(self, doing: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"the cluster refuses to {doing}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason


class Cluster:
    """One namespace of a cluster.

    Raises:
        ClusterError: By every request, once it is refused, or was not answered for `api_patience_seconds`.
    """

    def __init__(self, api: client.ApiClient, settings: KubernetesSection) -> None:
        # Their types speak of the client's models; we ask for the bare answer.
        self._jobs: Any = client.BatchV1Api(api)
        self._pods: Any = client.CoreV1Api(api)
        self._namespace = settings.namespace
        self._patience = settings.api_patience_seconds

    async def create_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Make the Job.  `RefusedError` with `AlreadyExists` may mean that we have made it, and not heard so."""
        return await self._ask(
            "create a Job",
            lambda: self._jobs.create_namespaced_job(
                self._namespace, job, field_validation="Strict", _preload_content=False
            ),
        )

    async def job(self, name: str) -> dict[str, Any] | None:
        """The Job of that name, if there is one."""
        try:
            return await self._ask(
                "get a Job",
                lambda: self._jobs.read_namespaced_job(name, self._namespace, _preload_content=False),
            )
        except RefusedError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def delete_job(self, job: Mapping[str, Any], *, pods_first: bool) -> None:
        """Delete this Job, with its pods, and no other of that name.  It may be gone already.

        Args:
            pods_first: Let the Job stand until its pods are gone.
        """
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        # Without a policy the pods of a Job would stay.
        policy = "Foreground" if pods_first else "Background"
        options = {"propagationPolicy": policy, "preconditions": {"uid": uid}}
        try:
            await self._ask(
                "delete a Job",
                lambda: self._jobs.delete_namespaced_job(name, self._namespace, body=options, _preload_content=False),
            )
        except RefusedError as error:
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise

    async def pods(self, uid: str) -> tuple[list[dict[str, Any]], str]:
        """The pods of the Job with this uid, and the version from which to watch them."""
        found = await self._ask(
            "list pods",
            lambda: self._pods.list_namespaced_pod(
                self._namespace, label_selector=f"{_CONTROLLER}={uid}", _preload_content=False
            ),
        )
        return found["items"], found["metadata"]["resourceVersion"]

    async def watch_pods(self, uid: str, version: str, seconds: int) -> AsyncGenerator[dict[str, Any]]:
        """Changes of the Job's pods since `version`, for that long.  One try: whoever watches lists again.

        Raises:
            UnansweredError: The connection broke, or the cluster has forgotten `version`.
        """

        def call() -> Any:
            return self._pods.list_namespaced_pod(
                self._namespace,
                label_selector=f"{_CONTROLLER}={uid}",
                resource_version=version,
                watch=True,
                timeout_seconds=seconds,
                _preload_content=False,
                _request_timeout=(REQUEST_SECONDS, seconds + WATCH_SLACK_SECONDS),
            )

        async with _answered("watch pods", call, None) as response:
            async for line in response.content:
                yield _event(line)

    async def log(self, pod_name: str, container: str, most: int) -> bytes | None:
        """At most `most` bytes of the beginning of a container's output; `None` if the pod is gone."""

        def call() -> Any:
            return self._pods.read_namespaced_pod_log(
                pod_name, self._namespace, container=container, limit_bytes=most, _preload_content=False
            )

        async def read() -> bytes:
            text = bytearray()
            async with _answered("read the log of a pod", call, REQUEST_SECONDS) as response:
                # A limit is a wish: the cluster may send some more.
                while len(text) < most and (chunk := await response.content.read(most - len(text))):
                    text += chunk
            return bytes(text)

        try:
            return await self._persist(read)
        except RefusedError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def _ask(self, doing: str, call: Call) -> dict[str, Any]:
        """The object that `call` is answered with."""

        async def ask() -> dict[str, Any]:
            async with _answered(doing, call, REQUEST_SECONDS) as response:
                return _object(await response.read())

        return await self._persist(ask)

    async def _persist(self, ask: Callable[[], Awaitable[T]]) -> T:
        until, pause = monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                return await ask()
            except UnansweredError as error:
                wait = max(error.retry_after, pause * random.uniform(0.5, 1))  # noqa: S311  # jitter, no secret
                if monotonic() + wait > until:
                    raise
                _log.warning("%s; trying again in %.1f s", error, wait)
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)


@asynccontextmanager
async def _answered(doing: str, call: Call, seconds: float | None) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to `call`, to be read within the block; the block and the call together take `seconds` at most."""
    try:
        async with asyncio.timeout(seconds), await call() as response:
            if response.status >= 400:
                raise _error(doing, response, await response.content.read(_MOST_WORDS))
            yield response
    except ClusterError:
        raise
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # ValueError: what came is no JSON, or a line without an end.
        raise UnansweredError(f"could not {doing}: {type(error).__name__} {error}".rstrip()) from error


def _object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the answer is no object")
    return found


def _event(line: bytes) -> dict[str, Any]:
    event = _object(line)
    if event.get("type") != "ERROR":
        return event
    told = event.get("object", {})
    raise UnansweredError(f"the watch ended: {told.get('reason')}: {told.get('message')}")


def _error(doing: str, response: aiohttp.ClientResponse, body: bytes) -> ClusterError:
    reason, message = response.reason or "", body.decode("utf-8", "replace")
    try:
        told = _object(body)
        reason, message = told.get("reason", reason), told.get("message", message)
    except ValueError:
        pass  # somebody between us and the cluster answers in words of its own
    status = response.status
    if status in _PASSING:
        return UnansweredError(f"could not {doing}: {status} {reason}: {message}", _retry_after(response))
    return RefusedError(doing, status, reason, message)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks us to stay away; the cluster's own servers write no dates here."""
    try:
        return min(max(0.0, float(response.headers.get("Retry-After", "0"))), _LONGEST_RETRY_AFTER)
    except ValueError:
        return 0.0

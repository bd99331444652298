"""The requests of the Kubernetes runner: six verbs on three resources, retried on transient errors.

    jobs       create, get, delete
    pods       list, watch
    pods/log   get

Objects are plain dictionaries, since the server may be newer than the client's models.
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
"""Timeout of one request."""
WATCH_SLACK_SECONDS: Final = 10.0
"""A watch that is silent for this long after its end is a dead connection."""

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 10.0
_LONGEST_RETRY_AFTER: Final = 60.0
_MAX_ERROR_BYTES: Final = 65_536
_TRANSIENT: Final = frozenset({408, 410, 425, 429, 500, 502, 503, 504})
"""Statuses to retry.  410: the listed version is too old to watch from."""
_EXCEEDED_QUOTA: Final = "exceeded quota:"
"""Part of the message of a quota; status and reason are those of a missing permission."""
_CONTROLLER: Final = "batch.kubernetes.io/controller-uid"
"""Label of a Job's pods with the Job's uid; its name may have belonged to an earlier Job."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[], Awaitable[aiohttp.ClientResponse]]


class ClusterError(OSError):
    """The request failed.  A later attempt may succeed."""


class UnansweredError(ClusterError):
    """No usable answer: no connection, an overloaded or failing server, or a watch that cannot continue."""

    def __init__(self, why: str, retry_after: float = 0.0, status: int | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after
        self.status = status
        """Status of the response; `None` if there was none."""


class RefusedError(ClusterError):
    """The cluster refused the request."""

    def __init__(self, doing: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"the cluster refuses to {doing}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.exceeds_quota = status == HTTPStatus.FORBIDDEN and _EXCEEDED_QUOTA in message
        """Whether a ResourceQuota leaves no room for the object, as opposed to a missing permission."""


class Cluster:
    """One namespace of a cluster.

    Raises:
        ClusterError: By every request that is refused, or not answered within `api_patience_seconds`.
    """

    def __init__(self, api: client.ApiClient, settings: KubernetesSection) -> None:
        # Typed as Any, since the client's types describe its models instead of the raw response.
        self._jobs: Any = client.BatchV1Api(api)
        self._pods: Any = client.CoreV1Api(api)
        self._namespace = settings.namespace
        self._patience = settings.api_patience_seconds

    async def create_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Create the Job.  After a lost response, a retry raises `RefusedError` with `AlreadyExists`."""
        return await self._request(
            "create a Job",
            lambda: self._jobs.create_namespaced_job(
                self._namespace, job, field_validation="Strict", _preload_content=False
            ),
        )

    async def job(self, name: str) -> dict[str, Any] | None:
        """Return the Job of that name, or `None`."""
        try:
            return await self._request(
                "get a Job",
                lambda: self._jobs.read_namespaced_job(name, self._namespace, _preload_content=False),
            )
        except RefusedError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def delete_job(self, job: Mapping[str, Any], *, pods_first: bool) -> None:
        """Delete this Job and its pods, but no other Job of that name.  A missing Job is not an error.

        Args:
            pods_first: Keep the Job until its pods are gone.
        """
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        # Without a policy, the pods would remain.
        policy = "Foreground" if pods_first else "Background"
        options = {"propagationPolicy": policy, "preconditions": {"uid": uid}}
        try:
            await self._request(
                "delete a Job",
                lambda: self._jobs.delete_namespaced_job(name, self._namespace, body=options, _preload_content=False),
            )
        except RefusedError as error:
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise

    async def pods(self, uid: str) -> tuple[list[dict[str, Any]], str]:
        """Return the pods of the Job with this uid, and the version to watch from."""
        found = await self._request(
            "list pods",
            lambda: self._pods.list_namespaced_pod(
                self._namespace, label_selector=f"{_CONTROLLER}={uid}", _preload_content=False
            ),
        )
        return found["items"], found["metadata"]["resourceVersion"]

    async def watch_pods(self, uid: str, version: str, seconds: int) -> AsyncGenerator[dict[str, Any]]:
        """Yield changes of the Job's pods since `version`, for `seconds`.  Not retried: the caller lists again.

        Raises:
            UnansweredError: The connection broke, or `version` is too old.
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

        async with _response("watch pods", call, None) as response:
            async for line in response.content:
                yield _event(line)

    async def log(self, pod_name: str, container: str, most: int) -> bytes | None:
        """Return the first `most` bytes of a container's output; `None` if the pod is gone."""

        def call() -> Any:
            return self._pods.read_namespaced_pod_log(
                pod_name, self._namespace, container=container, limit_bytes=most, _preload_content=False
            )

        async def read() -> bytes:
            text = bytearray()
            async with _response("read the log of a pod", call, REQUEST_SECONDS) as response:
                # The cluster may send more than the limit.
                while len(text) < most and (chunk := await response.content.read(most - len(text))):
                    text += chunk
            return bytes(text)

        try:
            return await self._retry(read)
        except RefusedError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def _request(self, doing: str, call: Call) -> dict[str, Any]:
        """Send a request and return the object in its response."""

        async def ask() -> dict[str, Any]:
            async with _response(doing, call, REQUEST_SECONDS) as response:
                return _object(await response.read())

        return await self._retry(ask)

    async def _retry(self, ask: Callable[[], Awaitable[T]]) -> T:
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
async def _response(doing: str, call: Call, seconds: float | None) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response of `call`.  The call and the block together take at most `seconds`."""
    try:
        async with asyncio.timeout(seconds), await call() as response:
            if response.status >= 400:
                raise _error(doing, response, await response.content.read(_MAX_ERROR_BYTES))
            yield response
    except ClusterError:
        raise
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # ValueError: invalid JSON, or a line that is too long.
        raise UnansweredError(f"could not {doing}: {type(error).__name__} {error}".rstrip()) from error


def _object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the response is not a JSON object")
    return found


def _event(line: bytes) -> dict[str, Any]:
    event = _object(line)
    if event.get("type") != "ERROR":
        return event
    status = event.get("object", {})
    raise UnansweredError(f"the watch ended: {status.get('reason')}: {status.get('message')}")


def _error(doing: str, response: aiohttp.ClientResponse, body: bytes) -> ClusterError:
    reason, message = response.reason or "", body.decode("utf-8", "replace")
    try:
        error = _object(body)
        reason, message = error.get("reason", reason), error.get("message", message)
    except ValueError:
        pass  # a proxy answered in another format
    status = response.status
    if status in _TRANSIENT:
        return UnansweredError(f"could not {doing}: {status} {reason}: {message}", _retry_after(response), status)
    return RefusedError(doing, status, reason, message)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Return the seconds of the Retry-After header; the cluster's servers do not send dates."""
    try:
        return min(max(0.0, float(response.headers.get("Retry-After", "0"))), _LONGEST_RETRY_AFTER)
    except ValueError:
        return 0.0

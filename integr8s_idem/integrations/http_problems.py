"""Responses to requests that were not processed, as RFC 9457 problem details."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.exceptions import HTTPException

from integr8s_idem._util.escaping import printable
from integr8s_idem.errors import InProgressError, LeaseLostError, ScheduledError, StoreError
from integr8s_idem.integrations.http_responses import Response, response_of
from integr8s_idem.records import Completed, Corrupt, Failed, KeyReused, Pending, StoredResult

logger = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"

LONGEST_KEY: Final = 255
"""Maximum number of characters of a key, as sent by a client."""

RETRY_SOON: Final = 1
"""Default value of `Retry-After`, in seconds."""


@dataclass(frozen=True, slots=True)
class Problems:
    """Makes the problem responses of one application."""

    documentation: str = ""
    """URL of the application's documentation for clients, linked from each problem."""

    def missing_key(self) -> Response:
        return self._problem(
            400, "Idempotency-Key is missing", "This operation requires an Idempotency-Key header.", section="bad-key"
        )

    def malformed_key(self) -> Response:
        return self._problem(
            400,
            "Idempotency-Key is malformed",
            f"It must be one string in double quotes, of 1 to {LONGEST_KEY} ASCII characters, "
            'such as "8e03978e-40d5-43dd-bc93-6894a57f9324".',
            section="bad-key",
        )

    def too_large(self, most: int) -> Response:
        detail = f"A request with an Idempotency-Key may have at most {most} bytes."
        return self._problem(413, "Request is too large", detail, section="too-large")

    def too_many(self, most: int) -> Response:
        detail = (
            f"A caller may have at most {most} open requests with an Idempotency-Key. Retry when one of them is done."
        )
        return self._problem(
            429,
            "Too many open requests",
            detail,
            section="too-many",
            headers={"retry-after": str(RETRY_SOON)},
        )

    def not_let_in(self, error: HTTPException) -> Response:
        """For a caller rejected by `identity`."""
        return self._problem(error.status_code, str(error.detail), "", section="not-let-in", headers=error.headers)

    def in_progress(self, error: InProgressError | None = None) -> Response:
        """For a request whose key is in progress, or scheduled for another attempt: `error` says when."""
        seconds = RETRY_SOON
        if isinstance(error, ScheduledError):
            seconds = max(seconds, math.ceil(error.retry_after.total_seconds()))
        return self._problem(
            409,
            "A request is outstanding for this Idempotency-Key",
            "The first request with this key is still being processed. Retry when it is done.",
            section="in-progress",
            headers={"retry-after": str(seconds)},
        )

    def unavailable(self, error: StoreError | LeaseLostError) -> Response:
        return self._problem(
            503,
            "Idempotency is temporarily unavailable",
            "You may retry the request with the same Idempotency-Key."
            if isinstance(error, LeaseLostError)
            else "The request was not processed. You may retry it with the same Idempotency-Key.",
            section="unavailable",
            headers={"retry-after": str(RETRY_SOON)},
        )

    def for_outcome(self, outcome: Completed | Failed | KeyReused | Corrupt | Pending) -> Response:
        """For a request whose key has an outcome already."""
        match outcome:
            case Completed(result=StoredResult() as result):
                try:
                    return response_of(result)
                except ValueError as error:
                    logger.error("the response stored for %s cannot be read: %s", outcome.key, printable(str(error)))
                    return self._no_response("The stored response cannot be read.")
            case Completed():
                return self._no_response("The response was not stored.")
            case KeyReused():
                return self._problem(
                    422,
                    "Idempotency-Key is already used",
                    "This key was used for another request. Retry the same request, or use a new key.",
                    section="key-reused",
                )
            case Failed():
                return self._problem(
                    409,
                    "The request was given up",
                    "It failed or was interrupted too often, and may have been partly processed. Do not repeat it.",
                    section="given-up",
                )
            case _:
                logger.error("the record of a request cannot be read: %s", printable(str(outcome)))
                return self._problem(500, "The record of this request cannot be read", "", section="unreadable")

    def _no_response(self, why: str) -> Response:
        return self._problem(
            409,
            "The request was processed, but its response is not available",
            f"{why} Do not repeat it.",
            section="no-response",
        )

    def _problem(
        self, status: int, title: str, detail: str, *, section: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        body: dict[str, object] = {"type": f"urn:integr8s-idem:{section}", "title": title, "status": status}
        if detail:
            body["detail"] = detail
        encoded = json.dumps(body).encode()
        all_headers = {"content-type": MEDIA_TYPE, "content-length": str(len(encoded)), **(headers or {})}
        if self.documentation:
            all_headers["link"] = f'<{self.documentation}>; rel="describedby"'
        return Response(
            status,
            [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in all_headers.items()],
            encoded,
        )

"""Results of FastStream handlers: read before the handler's scope closes, stored, and returned again to duplicates."""

from __future__ import annotations

import logging
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

from faststream.exceptions import AckMessage
from faststream.kafka import KafkaResponse
from faststream.response import Response

from integr8s_idem.engine.results import NO_RESULT, OCTETS, decode_result, encode_result, repeatable
from integr8s_idem.errors import ResultDecodeError, ResultDroppedError
from integr8s_idem.records import JSON, Completed, StoredResult

logger = logging.getLogger(__name__)


def materialized(value: Any, name: str | None) -> Any:
    """Read an iterator that a handler returned, or the body of its `Response`, before FastStream does."""
    if isinstance(value, Response):
        value.body = repeatable(value.body, f"{name}")
        return value
    return repeatable(value, f"{name}")


_RESPONSE: Final = "; response"
_KEY: Final = "; key="
"""Follows `_RESPONSE`; earlier versions ignore it."""


def stored(value: Any, *, is_kept: bool) -> Any:
    """Convert a handler's result for the store.  Of a `Response`, the body, the headers and the key are stored.

    `is_kept`: whether results are stored at all.
    """
    if not is_kept or isinstance(value, str) or value is NO_RESULT:
        return value
    is_response = isinstance(value, Response)
    body, headers = (value.body, value.headers) if is_response else (value, {})
    try:
        encoded = encode_result(body)
        if _is_json_string(encoded) and not isinstance(body, str):
            # A date, for example: FastStream publishes it as JSON, and would publish a restored string as plain text.
            encoded, headers = StoredResult(encoded.body, OCTETS), {"content-type": JSON, **headers}
        elif not is_response:
            return encoded
        head = encode_result(headers)
    except Exception:  # noqa: BLE001  # user-defined serializers may raise; the work is done, so drop the result
        return value
    media_type = encoded.content_type + _RESPONSE
    if is_response and isinstance(key := value.get_publish_key(), bytes):
        media_type += _KEY + quote(key, safe="")
    return StoredResult(head.body + b"\n" + encoded.body, media_type)


def _is_json_string(encoded: StoredResult) -> bool:
    return encoded.content_type == JSON and encoded.body.startswith(b'"')


def replayed(done: Completed) -> Any:
    """Return the result of the first run, for FastStream to publish it again.

    Raises:
        AckMessage: There is no result, or it was not stored or cannot be read.  No published message is missing,
            because a record is completed after its messages are sent.
    """
    result = done.result
    if result is None:
        if done.result_dropped:
            logger.warning("%s", ResultDroppedError(done.key))
        raise AckMessage
    kind, mark, options = result.content_type.partition(_RESPONSE)
    try:
        if not mark:
            return decode_result(done.key, result)
        head, _, body = result.body.partition(b"\n")
        headers = decode_result(done.key, StoredResult(head))
        _, _, key = options.partition(_KEY)
        value = decode_result(done.key, StoredResult(body, kind))
        return KafkaResponse(value, headers=headers, key=unquote_to_bytes(key) or None)
    except ResultDecodeError as error:
        logger.warning("%s", error)
        raise AckMessage from error

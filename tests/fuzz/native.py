"""The campaign `speedups`: native and Python code do the same with any input: the same bytes, objects and errors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import astuple, replace

from integr8s_idem._util import speedups
from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.events import BaseEvent, EventDecoder, read_json
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.records import Completion, Reserved, ReserveRequest, StoredResult, TraceLink
from integr8s_idem.stores.redis import batch_codec, codec, scripts
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.fuzz.claims import must
from tests.fuzz.events import OrderPlaced, message
from tests.fuzz.mutators import NUMBERS, damaged, flipped, text
from tests.fuzz.stored import stored
from tests.support.stored import checked

BODIES: Final = 10
"""Bodies per run: one message, and damaged copies of it."""
LONGEST_SECONDS: Final = 3.0
"""Maximum CPU time of a run."""


class Shipped(BaseEvent):
    """An event whose payload is plain."""

    event_type: Literal["shipped"] = "shipped"
    order_id: str
    count: int = 0
    is_gift: bool = False
    note: str | None = None


class NewShipped(Shipped):
    event_type: Literal["new_shipped"] = "new_shipped"  # type: ignore[assignment]
    event_version: str = "2.7"


class Text(str):
    """A string that is not exactly a `str`."""

    __slots__ = ()


_EVENTS: Final = (OrderPlaced, Shipped, NewShipped)
_RESOLVER: Final = KeyResolver()
_PIECES: Final = (
    *(bytes((code,)) for code in range(0x20, 0x80)), "é".encode(), "😀".encode(), b"\\n", b"\\u0041", b"\\u00e9",
    b"\\ud83d\\ude00", b"\\ud800", b"\\/", b"\\x", b"1e5", b"-0", b"1E400", b"-1e-400", b"0.1", b"01", b"1.", b".5",
    b"null", b"true", b"[]", b"{}",
    b'"a":1,', b"\x00", b"\x1f", b"\xc2", b"  ", b"[[]]", b"9" * 299, b"9" * 400,
)  # fmt: skip
"""Replace or precede a byte of a body."""
_SECOND: Final = timedelta(seconds=1)


def python(call: Callable[[], Any]) -> Any:
    """Return the outcome of a call without native code."""
    native, speedups.native = speedups.native, None
    try:
        return outcome(call)
    finally:
        speedups.native = native


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or type and text of its error."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # errors are compared as well
        return type(error), str(error)


def must_agree(kind: str, call: Callable[[], Any], given: object) -> Figures:
    """Call with and without native code, and compare the outcomes, including their types."""
    native, expected = outcome(call), python(call)
    must(native == expected and _types(native) == _types(expected), f"{kind}: {native!r}, not {expected!r}: {given!r}")
    return Figures({kind: 1, "inputs": 1, f"{kind}_errors": type(expected) is tuple and type(expected[0]) is type})


def _types(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [type(value), *map(_types, value)]
    return [type(value), *map(_types, astuple(value))] if isinstance(value, Struct) else type(value)


def _decoder(native: Any) -> EventDecoder:
    before, speedups.native = speedups.native, native
    try:
        return EventDecoder(_EVENTS)
    finally:
        speedups.native = before


_PYTHON: Final = _decoder(None)
_NATIVE: Final = _decoder(speedups.native)


def scanned(body: bytes) -> Figures:
    """Look for the class of an event: what native code accepts, Python must accept, and find the same class."""
    assert _NATIVE._find is not None
    found = _NATIVE._find(body)
    if found is not None:
        try:
            expected: Any = _PYTHON._class_for(read_json(body))
        except UndecodableEventError as error:
            expected = error
        must(found is expected, f"{found}, not {expected!r}: {body!r}")
    return Figures({"bodies": 1, "bodies_accepted": found is not None, "inputs": 1})


def _bodies(random: Random) -> Sequence[bytes]:
    raw = message(random)
    if random.random() < 0.3:
        raw = raw.replace(b"order_placed", random.choice((b"shipped", b"new_shipped")))
    if random.random() < 0.2:
        raw = raw.replace(b'"1.0"', random.choice((b'"2.0"', b'"1"', b'"1.9"', b'"2.7"', b'""', b'"1.0.0"', b'".1"')))
    return [raw, *[damaged(random, raw) if copy % 3 == 0 else _changed(random, raw) for copy in range(BODIES - 1)]]


def _changed(random: Random, raw: bytes) -> bytes:
    """Return `raw` with a small change that often leaves it valid."""
    at = random.randrange(len(raw) or 1)
    match random.randrange(4):
        case 0:
            return raw[:at] + random.choice(_PIECES) + raw[at + 1 :]
        case 1:
            return raw[:at] + random.choice(_PIECES) + raw[at:]
        case 2:
            return raw.replace(b"1.0", b"1." + b"0" * random.randint(0, 3), 1) + b" " * random.randint(0, 1)
    parts = raw.split(b":")
    where = random.randrange(len(parts))
    return b":".join([*parts[:where], parts[where] + random.choice((b"", b" ", b"\n", b"\r\t")), *parts[where + 1 :]])


def _keyed(random: Random) -> Figures:
    event_class = random.choice((Shipped, NewShipped, OrderPlaced))
    values: dict[str, Any] = {
        "event_id": random.choice((text(random), "0192-7f", f"id-{random.random()}", "x" * random.randint(150, 260))),
        "event_type": random.choice(("shipped", "new_shipped", text(random, 2))),
        "order_id": random.choice((text(random), text(random), text(random), Text("a"), random.choice(NUMBERS))),
        "count": random.choice((0, -7, 2**53 - 1, -(2**53), random.choice((*NUMBERS, True, None, "1", [1])))),
        "is_gift": random.random() < 0.5,
        "note": random.choice((None, text(random))),
    }
    if random.random() < 0.05:
        del values[random.choice(list(values))]
    if "event_id" in values and random.random() < 0.05:
        values["event_id"] = Text("x")
    event = event_class.model_construct(**values)
    handler = random.choice(("ship", text(random, 1)))
    generation = random.choice((0, 0, 0, 1, 999))
    return must_agree("keys", lambda: _RESOLVER.resolve(handler, event, generation), (handler, values))


def _bytes(random: Random, usual: int) -> bytes:
    return random.randbytes(usual if random.random() < 0.9 else random.randint(0, 40))


def _duration(random: Random) -> timedelta:
    return random.choice((0, 1, 300, 3600, -5, 10**9, 10**-4)) * _SECOND


def _encoded(random: Random) -> Figures:
    def request() -> ReserveRequest:
        return ReserveRequest(
            key=text(random),
            token=_bytes(random, 16),
            lease=_duration(random),
            retention=_duration(random),
            fingerprint=random.choice((None, _bytes(random, 16))),
            owner=text(random),
            trace=TraceLink(_bytes(random, 16), _bytes(random, 8)) if random.random() < 0.2 else None,
            alone=random.random() < 0.1,
        )

    requests = [request() for _ in range(random.choice((1, 1, 2, 5)))]
    return must_agree("requests", lambda: batch_codec.encode_requests(requests), requests)


def _completed(random: Random) -> Figures:
    def completion() -> Completion:
        body = random.choice((b"null", b"{}", text(random).encode("utf-8", "surrogatepass")))
        content_type = random.choice(("application/json", "application/json", "text/plain", text(random)))
        fence = random.choice((0, 1, 2**53, 2**56 - 1, 2**56, 2**64, -1)) if random.random() < 0.3 else 1_700 * 10**12
        reserved = Reserved(key=text(random), token=_bytes(random, 16), attempt=1, fence=fence, lease=_SECOND)
        result = random.choice((None, StoredResult(body, content_type)))
        return Completion(
            reservation=reserved, ttl=_duration(random), result=result, result_dropped=random.random() < 0.1
        )

    completions = [completion() for _ in range(random.choice((1, 1, 2, 5)))]
    # A token of another length is packed as it is by Python, and the store refuses it.
    return must_agree("completions", lambda: batch_codec.encode_completions(completions), completions)


def _taken_over(random: Random, request: ReserveRequest) -> bytes:
    """Return the answer to a takeover, sometimes with the trace of the previous attempt."""
    packed = codec.encode_request(request)
    header = bytes((codec.FORMAT, codec.PROCESSING, packed[0] + random.choice((32, 64)))) + b"\0\2" + bytes(13)
    trace = b"\0" + random.randbytes(24) if random.random() < 0.7 else b""
    return trace + checked(header) + packed[1:]


def _recorded(random: Random, request: ReserveRequest) -> bytes:
    """Return the answer for a key that has a record, of this or another payload, sometimes damaged."""
    record = stored(random, replace(request, fingerprint=random.choice((request.fingerprint, None, b"g" * 16))))
    return random.choice((record, flipped(record, random.randrange(8 * len(record))), damaged(random, record)))


def _answered(random: Random) -> Figures:
    fingerprints: tuple[Any, ...] = (None, b"f" * 16, bytearray(b"f" * 16))
    requests = [
        ReserveRequest(
            key=text(random),
            token=b"t" * 16,
            lease=_SECOND,
            retention=_SECOND,
            fingerprint=random.choice(fingerprints),
            trace=random.choice((None, TraceLink(random.randbytes(16), random.randbytes(8)))),
        )
        for _ in range(random.randint(1, 4))
    ]
    answers = [
        random.choice(
            (
                0,
                0,
                0,
                random.choice((1, 2, random.randbytes(random.randint(0, 60)))),
                _taken_over(random, request),
                _recorded(random, request),
                _recorded(random, request),
            )
        )
        for request in requests
    ]
    if random.random() < 0.05:
        answers = answers[:-1] if random.random() < 0.5 else [*answers, 1]
    answer = [random.choice((1_700 * 10**12, 0)), *answers]
    if len(answers) != len(requests):
        native = outcome(lambda: batch_codec.verdicts_of(requests, answer))
        must(len(native) != len(requests) or type(native) is tuple, native)
        return Figures({"verdicts": 1, "inputs": 1})
    return must_agree("verdicts", lambda: batch_codec.verdicts_of(requests, answer), answer)


def _packed(random: Random) -> Figures:
    keys = [random.choice(("idempotency:a:b", text(random))) for _ in range(random.randint(0, 3))]
    numbers = (300_000, 0, -1, 2**63, 2**64, True)
    arguments = [
        random.choice((random.randbytes(random.randint(0, 40)), random.choice(numbers)))
        for _ in range(random.randint(0, 3))
    ]
    given = (scripts.SETTLE, keys, arguments)
    return must_agree("commands", lambda: scripts.command_of(*given), given)


_TARGETS: Final = (_keyed, _encoded, _completed, _answered, _packed)


def run_numbered(number: int) -> Figures:
    """Test a message with its damaged copies, and an input for each of the other functions.

    Raises:
        ViolationError: Native and Python code differ; the message names the number.
    """
    random = Random(number)
    began, figures = time.thread_time(), Figures()
    try:
        for body in _bodies(random):
            figures.update(scanned(body))
        for target in _TARGETS:
            figures.update(target(random))
    except Exception as error:
        raise ViolationError(f"run {number}: {type(error).__name__}: {error!s:.2000}") from error
    took = time.thread_time() - began
    if took > LONGEST_SECONDS:
        raise ViolationError(f"run {number} took {took:.1f} s")
    return figures


def run(first: int, count: int) -> Figures:
    """Test the runs `first` to `first + count - 1`; nothing is tested if the native code is not installed."""
    total = Figures()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic warns of values that it has not validated
        for number in range(first, first + count) if speedups.native is not None else ():
            total.update(run_numbered(number))
    return total


CAMPAIGN: Final = Campaign(
    name="speedups",
    counts="inputs",
    says="one message, event, request, completion, answer or command, through native and Python code",
    scenarios=(81, 86, 88, 92),
    in_test=1_000,
    target=10_000_000,
    batch=40_000,
    run=run,
    at_least=15_000,
    on_page=(15_000, 10_000_000),
)

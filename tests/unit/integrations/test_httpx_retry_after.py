"""`retry_after` of `integr8s_idem.integrations.httpx`: how long a server asks a client to wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.httpx import retry_after

NOW = "Tue, 01 Jan 2030 12:00:00 GMT"


def delay_of(status: int = 429, **headers: str) -> float:
    """Return the seconds of a response with these headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return retry_after(httpx.Response(status, headers=named)).delay.total_seconds()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        (" 7 ", 7),
        ("0", 0),
        ("Tue, 01 Jan 2030 12:05:00 GMT", 300),
        ("Tuesday, 01-Jan-30 12:05:00 GMT", 300),
        ("Tue Jan  1 12:05:00 2030", 300),
        ("Tue, 01 Jan 2030 11:00:00 GMT", 0),
        ("99999999999999999999", 3600),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 3600),
    ],
)
def test_the_delay_is_a_number_of_seconds_or_a_date(value: str, seconds: int) -> None:
    assert delay_of(retry_after=value, date=NOW) == seconds


@pytest.mark.parametrize("value", ["", "soon", "-5", "1.5", "٣", "Tue, 99 Foo 2030 12:05:00 GMT"])
def test_an_invalid_header_is_ignored(value: str) -> None:
    headers = [(b"Retry-After", value.encode()), (b"Date", NOW.encode())]

    assert retry_after(httpx.Response(503, headers=headers)).delay == timedelta(minutes=1)


def test_without_the_header_the_default_applies() -> None:
    assert retry_after(httpx.Response(503), default=5).delay == timedelta(seconds=5)


def test_a_date_without_the_servers_time_is_compared_with_this_machines_clock() -> None:
    at = format_datetime(datetime.now(UTC) + timedelta(minutes=5), usegmt=True)

    assert 290 < delay_of(retry_after=at) <= 300


def test_the_longest_delay_can_be_chosen() -> None:
    response = httpx.Response(503, headers={"Retry-After": "7200"})

    assert retry_after(response, longest=timedelta(hours=3)).delay == timedelta(hours=2)
    with pytest.raises(ApplicationError, match="longest must be"):
        retry_after(response, longest=-1)


def test_the_reason_names_the_status() -> None:
    assert retry_after(httpx.Response(429)).reason == "429 Too Many Requests"

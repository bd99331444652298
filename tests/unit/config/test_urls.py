"""Messages about invalid addresses show no part of a password, and still name the mistake."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from integr8s_idem.config import Settings
from integr8s_idem.config.urls import redacted, without_secret

SECRET = "hunter2"

FIELDS = [
    ("store", "url", {}),
    ("store", "url", {"kind": "postgresql"}),
    ("store", "url", {"kind": "mysql"}),
    ("store", "urls", {"kind": "redis-cluster"}),
    ("store", "sentinels", {"kind": "redis-sentinel"}),
    ("store", "endpoint_url", {"kind": "dynamodb"}),
    ("kafka", "bootstrap_servers", {}),
    ("telemetry", "otlp_endpoint", {}),
]
SCHEMES = ["redis", "rediss", "unix", "http", "postgresql", "mysql", "sqlite", "sqlite+pysqlcipher", "kafka", "REDIS"]
HOSTS = ["h", "h:1", "h:99999999", "h:port", "", "[::1", "h/db", "h:6379/0/1", "/foo.db"]
OPTIONS = ["password", "pass%77ord", "sslpassword", "a=1&password", "api_token", "PASSWORD"]

noise = st.text(alphabet="ab1:/@?#,&=%.+-[]", max_size=6)
marked = st.tuples(noise, noise).map(SECRET.join)


@st.composite
def urls_with_a_secret(draw: st.DrawFn) -> str:
    """Return a URL with the secret in its user info or in the value of an option."""
    scheme, host, secret = draw(st.sampled_from(SCHEMES)), draw(st.sampled_from(HOSTS)), draw(marked)
    if draw(st.booleans()):
        return f"{scheme}://{draw(st.sampled_from(['user:', ':', '']))}{secret}@{host}"
    return f"{scheme}://{host}/x?{draw(st.sampled_from(OPTIONS))}={secret}"


def message_of(field: tuple[str, str, dict[str, str]], url: str) -> str:
    """Return the messages about `url` as the value of a setting; empty if it is accepted."""
    section, name, others = field
    try:
        Settings.model_validate({section: {**others, name: url}})
    except ValidationError as error:
        return " ".join(each["msg"] for each in error.errors(include_url=False, include_input=False))
    return ""


@given(st.sampled_from(FIELDS), urls_with_a_secret())
@example(FIELDS[1], f"sqlite+pysqlcipher://:{SECRET}@/foo.db")
@example(FIELDS[5], f"sqlite://user:{SECRET}://b@h")
@example(FIELDS[2], f"http://user:{SECRET}://b@h")
@example(FIELDS[7], f"rediss://user:{SECRET}://b@h")
@example(FIELDS[0], f"redis://h/x?password=p@{SECRET}")
@example(FIELDS[4], f"redis://h/x?password=p@{SECRET}")
@example(FIELDS[6], f"redis://h/x?password=p@{SECRET}")
@example(FIELDS[6], f"user:{SECRET},x@h:9092")
@example(FIELDS[4], f"user:{SECRET},x@h:9092")
@example(FIELDS[0], f"redis://user:12/{SECRET}?x@h")
@example(FIELDS[1], f"postgresql://h/d?password=p&{SECRET}=1")
@example(FIELDS[1], f"postgresql://{SECRET}?x@h")
def test_no_message_shows_a_part_of_a_password(field: tuple[str, str, dict[str, str]], url: str) -> None:
    assert SECRET not in message_of(field, url)
    assert SECRET not in without_secret(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/x?db=1", "redis://h:1/x?db=1"),
        ("redis://u:p@h:1/x?db=1&password=p", "redis://***@h:1/x?db=1&password=***"),
        ("http://u:a://b@h/x", "http://***@h/x"),
        ("user:a://b@h", "***@h"),
        ("redis://h/x?password=p@q", "redis://***"),
        ("localhost:6379", "localhost:6379"),
    ],
)
def test_everything_but_the_password_is_shown(url: str, shown: str) -> None:
    assert without_secret(url) == shown


def test_an_at_sign_in_an_option_of_a_logged_url_hides_the_rest() -> None:
    assert redacted(f"cannot use redis://h/0?password=p@{SECRET} here") == "cannot use redis://*** here"


def test_messages_still_suggest_the_host() -> None:
    assert "write kafka-1:9092" not in message_of(FIELDS[6], "u:p@kafka-1")
    assert "as in kafka-1:9092" in message_of(FIELDS[6], "kafka-1:x")
    assert "write http://***@h" in message_of(FIELDS[7], "ftp://u:p@h/x")
    assert "write s-1:26379" in message_of(FIELDS[4], "redis://u:p@s-1/0")
    assert "write mysql://db:1/idempotency" in message_of(FIELDS[2], "mysql://u:p@db:1")

"""Ports that tests reserve for servers."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.support.ports import reserve_port

BESIDE = 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux only")
def test_a_port_and_the_one_beside_it_are_kept_for_one_server() -> None:
    port = reserve_port(BESIDE)

    for each in (port, port + BESIDE):
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", each))
        with socket.create_server(("127.0.0.1", each)) as server:  # sets SO_REUSEADDR
            assert server.getsockname()[1] == each


def test_a_port_is_not_returned_if_the_one_beside_it_is_used() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        taken = used.getsockname()[1]

        ports = {reserve_port(1) for _ in range(20)}

    assert taken - 1 not in ports
    assert not {port + 1 for port in ports} & ports

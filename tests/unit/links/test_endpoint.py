"""Endpoints as users write them."""

from __future__ import annotations

import pytest

from engine.core.errors import ConfigError
from engine.process.links.endpoint import Endpoint, parse_endpoint


@pytest.mark.parametrize(
    ("text", "endpoint", "is_loopback"),
    [
        ("127.0.0.1:30001", Endpoint("127.0.0.1", 30_001), True),
        (" node-7.example:0 ", Endpoint("node-7.example", 0), False),
        ("[::1]:65535", Endpoint("::1", 65_535), True),
    ],
)
def test_an_endpoint_is_read_and_written(text: str, endpoint: Endpoint, is_loopback: bool) -> None:
    assert parse_endpoint(text, "--join") == endpoint
    assert str(endpoint) == text.strip()
    assert endpoint.is_loopback is is_loopback


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:-1", "host:65536", "::1:5", "host:1x", "host:\u00b2"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--join must be HOST:PORT"):
        parse_endpoint(text, "--join")

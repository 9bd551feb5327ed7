"""Addresses of a shared_cache: what is allowed, and what a refusal shows."""

from __future__ import annotations

import sys

import pytest

from coppice.runtime.tiers.address import check_address, without_password
from coppice.runtime.tiers.shared import SharedStore

GOOD = {
    "redis://host": "redis://host",
    "redis://host:6379/3": "redis://host:6379/3",
    "redis://[::1]:7000": "redis://[::1]:7000",
    "redis://:geheim@host": "redis://***@host",
    "redis://user:ge%40heim@host:1/": "redis://***@host:1/",
    "rediss://u:p@host/0?ssl_cert_reqs=none": "rediss://***@host/0?ssl_cert_reqs=none",
    "redis://host?db=2": "redis://host?db=2",
    "unix:///run/redis.sock": "unix:///run/redis.sock",
    "unix:///run/redis.sock?password=geheim&db=1": "unix:///run/redis.sock?password=***&db=1",
    "unix://user:geheim@/run/redis.sock": "unix://***@/run/redis.sock",
}
BAD = {
    "": "begins otherwise",
    "host:6379": "begins otherwise",
    "http://host": "begins otherwise",
    "memcached://host": "begins otherwise",
    "redis:host": "begins otherwise",
    "redis://": "names no host",
    "redis://:geheim@": "names no host",
    "redis://host:port": "port must be a number",
    "redis://host:70000": "port must be a number",
    "redis://host:0": "1 .. 65535",
    "redis://host/one": "a database is a number",
    "redis://host/-1": "a database is a number",
    "redis://host?db=x": "a database is a number",
    "redis://host?socket_timeout=100": "socket_timeout is not an option",
    "redis://host?ssl_cert_reqs=none": "ssl_cert_reqs is not an option",
    "redis://:geheim#x@host": "%23",
    "redis://:geheim/x@host": "",
    "redis://[::1": "malformed",
    "unix://": "names no socket",
    "unix://run/redis.sock": "begins with /",
}


@pytest.mark.parametrize("url", GOOD)
def test_good_addresses_are_shown_without_their_password(url: str) -> None:
    assert check_address(url) == GOOD[url]
    SharedStore(url, 100).close()  # which does not connect


@pytest.mark.parametrize("url", BAD)
def test_bad_addresses_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"^shared_cache must be redis://") as refused:
        SharedStore(url, 100)
    text = str(refused.value)
    assert BAD[url] in text
    assert repr(without_password(url)) in text
    assert "geheim" not in text


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shared_cache must be .*, got 7"):
        check_address(7)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(
        ValueError, match=r"shared_cache is 'redis://\*\*\*@host'.*pip install"
    ) as no:
        SharedStore("redis://:geheim@host", 100)
    assert "pip install 'coppice[tiers]'" in str(no.value)

"""Requests to a page of this machine, and the data in a page."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(port: int, path: str, method: str = "GET", host: str = "127.0.0.1") -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": host})
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def data_in(html: str) -> dict[str, Any]:
    """Returns the data that a page holds."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data

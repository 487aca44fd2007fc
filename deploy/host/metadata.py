"""The metadata of an EC2 instance, by IMDSv2: every request needs a token, which is requested first."""

from __future__ import annotations

import os
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 2.0
TOKEN_SECONDS = 300


class Metadata:
    """The instance metadata service; tests replace its address by APEX_JAX_METADATA_URL."""

    def __init__(self) -> None:
        self._url = os.environ.get("APEX_JAX_METADATA_URL", "http://169.254.169.254").rstrip("/")

    def get(self, path: str) -> str | None:
        """Returns the text at `path` of /latest/meta-data/, None if there is none.

        Raises OSError if the service does not answer.
        """
        token = self._ask("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)})
        try:
            return self._ask("GET", f"meta-data/{path}", {"X-aws-ec2-metadata-token": token})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._url}/latest/{path}", method=method, headers=headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this address is never behind a proxy
        with direct.open(request, timeout=TIMEOUT_SECONDS) as response:
            return str(response.read(65536).decode())

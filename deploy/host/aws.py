"""AWS clients by botocore, which the project's S3 package installs anyway; boto3 would further restrict its version."""

from __future__ import annotations

from typing import Any


def client(service: str, region: str | None = None) -> Any:
    """Returns a client; botocore looks up credentials, endpoint and, if not given, the region as usual."""
    import botocore.session  # not at the top: a machine outside AWS does not need it

    return botocore.session.get_session().create_client(service, region_name=region)

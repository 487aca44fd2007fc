"""Clients of AWS by botocore, which the project's S3 package brings anyway; boto3 beside it would bind its version."""

from __future__ import annotations

from typing import Any


def client(service: str, region: str | None = None) -> Any:
    """Returns a client; region, credentials and endpoint come from the usual places."""
    import botocore.session  # not at the top: a machine outside of AWS does without

    return botocore.session.get_session().create_client(service, region_name=region)

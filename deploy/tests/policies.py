"""The permissions in the policies of an applied fleet; moto stores policies but does not apply them."""

from __future__ import annotations

from typing import Any

from deploy.tests.applied import NAME

ACCOUNT = "123456789012"  # moto's
REGION = "eu-west-1"  # of the fleet
LOGS = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/apex-jax/{NAME}/*"
OWN_ACCOUNT = {"StringEquals": {"aws:PrincipalAccount": ACCOUNT}}
KEY_POLICY: dict[str, tuple[dict[str, str], set[str], Any]] = {  # who may what with the fleet's key, and when
    "Account": ({"AWS": f"arn:aws:iam::{ACCOUNT}:root"}, {"kms:*"}, None),
    "Logs": (
        {"Service": f"logs.{REGION}.amazonaws.com"},
        {"kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"},
        {"ArnLike": {"kms:EncryptionContext:aws:logs:arn": LOGS}},
    ),
    "Alarms": (
        {"Service": "cloudwatch.amazonaws.com"},
        {"kms:Decrypt", "kms:GenerateDataKey*"},
        {"StringEquals": {"aws:SourceAccount": ACCOUNT}},
    ),
}  # fmt: skip
ENDPOINT_ACTIONS = {
    "logs": {"logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"},
    "monitoring": {"cloudwatch:PutMetricData"},
    "servicediscovery": {"servicediscovery:RegisterInstance", "servicediscovery:GetOperation"},
    "ssm": {"ssm:GetParameter", "ssm:UpdateInstanceInformation"},
    "ssmmessages": {
        f"ssmmessages:{verb}{kind}Channel" for verb in ("Create", "Open") for kind in ("Control", "Data")
    },
    "s3": {
        f"s3:{name}"
        for name in (
            "ListBucket", "GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload", "ListMultipartUploadParts"
        )
    },
}  # fmt: skip


def naming(role: str, service: str, zone: str) -> list[tuple[str, list[str], Any]]:
    """Returns each action by which a role takes its name, with the ARNs it is for, and its condition.

    The keys of the condition, and how a name is written there, are in Route 53's documentation.
    """
    key = "route53:ChangeResourceRecordSets"
    own_record = {f"{key}NormalizedRecordNames": f"{role}.{NAME}.internal", f"{key}RecordTypes": "A"}
    return [
        ("servicediscovery:RegisterInstance", [service], None),
        ("servicediscovery:GetOperation", ["*"], None),
        ("route53:ChangeResourceRecordSets", [zone], {"ForAllValues:StringEquals": own_record}),
        ("route53:GetHostedZone", [zone], None),
        ("route53:ListHostedZonesByName", ["*"], None),
    ]

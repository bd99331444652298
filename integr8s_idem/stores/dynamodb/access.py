"""The IAM policy with the minimum permissions for a worker and for migrations."""

from __future__ import annotations

import json
from typing import Final

from integr8s_idem.config import DynamodbStoreSettings

WORKER: Final = ("GetItem", "PutItem", "UpdateItem", "BatchGetItem", "Scan", "DescribeTable", "DescribeTimeToLive")
"""Permissions of a worker.  DeleteItem is not needed, because a deleted record stays as a tombstone."""

MIGRATE: Final = ("CreateTable", "UpdateTimeToLive", "DescribeTable", "DescribeTimeToLive")

_PARTITIONS: Final = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}
"""AWS partitions by the prefix of their regions; all other regions are in `aws`."""


def policy(settings: DynamodbStoreSettings) -> str:
    """Return an IAM policy as JSON, with one statement for workers and one for `store migrate`."""
    region = settings.region or "*"
    partition = next((name for start, name in _PARTITIONS.items() if region.startswith(start)), "aws")
    table = f"arn:{partition}:dynamodb:{region}:*:table/{settings.table}"
    statements = [
        {
            "Sid": sid,
            "Effect": "Allow",
            "Action": [f"dynamodb:{action}" for action in actions],
            "Resource": table,
        }
        for sid, actions in (("Worker", WORKER), ("Migrate", MIGRATE))
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)

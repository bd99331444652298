"""The least that an identity needs of IAM."""

from __future__ import annotations

import json
from typing import Final

from integr8s_idem.config import DynamodbStoreSettings

WORKER: Final = ("GetItem", "PutItem", "UpdateItem", "BatchGetItem", "Scan", "DescribeTable", "DescribeTimeToLive")
"""For the verbs; for counting and listing; for the look at the table.  Nothing is deleted: a stump stays."""

MIGRATE: Final = ("CreateTable", "UpdateTimeToLive", "DescribeTable", "DescribeTimeToLive")

_PARTITIONS: Final = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}
"""By the beginning of a region; all others are in `aws`."""


def policy(settings: DynamodbStoreSettings) -> str:
    """An IAM policy as JSON, of two statements: what a worker does, and what `store migrate` does."""
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

"""Errors of driver and service as ours.  The only place that knows both."""

from __future__ import annotations

from typing import Any, Final

from botocore.exceptions import (
    BotoCoreError,
    ChecksumError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    MetadataRetrievalError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)
from botocore.exceptions import (
    ConnectionError as DriverConnectionError,
)
from botocore.parsers import ResponseParserError

from integr8s_idem.config.urls import redacted
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError

MIGRATE: Final = "run: integr8s-idem store migrate"

THROTTLED: Final = {
    "ProvisionedThroughputExceededException": "the table, or one partition, has used up its throughput",
    "RequestLimitExceeded": "the account has reached its throughput in this region",
    "ThrottlingException": "DynamoDB throttles us: the table grows into more traffic, or reached its maximum",
    "Throttling": "DynamoDB throttles us",
    "LimitExceededException": "too many tables are made or changed at once",
}
"""Refusals that are answered by asking later."""

_TROUBLED: Final = {
    "InternalServerError": "DynamoDB fails for now",
    "InternalFailure": "DynamoDB fails for now",
    "ServiceUnavailable": "DynamoDB is not available for now",
    "ServiceUnavailableException": "DynamoDB is not available for now",
    "TransactionConflictException": "a transaction holds this record",
    "ReplicatedWriteConflictException": "another region writes this record",
    "ResourceInUseException": "the table is being made or changed",
}

_CREDENTIALS: Final = {
    "UnrecognizedClientException": "AWS does not know this access key: look at the credentials",
    "InvalidClientTokenId": "AWS does not know this access key: look at the credentials",
    "MissingAuthenticationTokenException": "AWS got no credentials with the request",
    "MissingAuthenticationToken": "AWS got no credentials with the request",
    "ExpiredTokenException": "the AWS credentials have expired: get new ones",
    "ExpiredToken": "the AWS credentials have expired: get new ones",
    "IncompleteSignatureException": "AWS cannot read the signature: look at the credentials",
    "InvalidSignatureException": "AWS does not accept the signature: look at the secret access key",
    "SignatureDoesNotMatch": "AWS does not accept the signature: look at the secret access key",
}

_CLOCK: Final = ("signature expired", "signature not yet current", "request expired", "must be within")
_OTHER_KEYS: Final = ("does not match the schema", "Missing the key", "Type mismatch for key", "required keys")
_NO_CREDENTIALS: Final = (
    "no AWS credentials: give them by the environment, a profile, or a role of the container or instance"
)

_STRANGE: Final = "what answers is not DynamoDB, or its answer was damaged"

CONDITION: Final = "ConditionalCheckFailedException"


class StrangeAnswerError(Exception):
    """An answer that is not DynamoDB's: the driver takes any page with status 200 for a success."""


def code_of(error: ClientError) -> str:
    """What DynamoDB calls it."""
    told: dict[str, Any] = error.response.get("Error", {})
    return str(told.get("Code", ""))


def passes(error: ClientError) -> bool:
    """Whether the same call may be answered a moment later."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return code_of(error) in THROTTLED or code_of(error) in _TROUBLED or status >= 500


def of_service(operation: str, error: ClientError, table: str) -> StoreError:
    """Our error for a refusal."""
    code, text = code_of(error), str(error.response.get("Error", {}).get("Message", ""))
    if passes(error):
        return StoreUnavailableError(operation, THROTTLED.get(code) or _TROUBLED.get(code) or "DynamoDB fails for now")
    if not code or code.isdecimal():
        # The driver names what it cannot read by its status; the text may be a record.
        return StoreUnavailableError(operation, _STRANGE)
    if any(words in text.lower() for words in _CLOCK):
        return StoreUnavailableError(
            operation,
            "this machine's clock differs from AWS's by more than AWS allows: set it by NTP",
            Code.CLOCK_SKEW,
        )
    if code == "ResourceNotFoundException":
        missing = f"there is no table {table} in this region and account; {MIGRATE}"
        return StoreConfigurationError(operation, missing, Code.SCHEMA_MISSING)
    if code == "AccessDeniedException":
        denied = f"AWS denies us the table {table}: {_harmless(text)}"
        return StoreConfigurationError(operation, denied, Code.STORE_PERMISSION)
    if said := _CREDENTIALS.get(code):
        return StoreConfigurationError(operation, said, Code.STORE_CREDENTIALS)
    if any(words in text for words in _OTHER_KEYS):
        other = f"the table {table} has other keys than the store's: name another one, and {MIGRATE}"
        return StoreConfigurationError(operation, other, Code.SCHEMA_OTHER)
    return StoreConfigurationError(operation, f"DynamoDB answers {code}: {_harmless(text)}")


def of_driver(operation: str, error: BotoCoreError | ResponseParserError | StrangeAnswerError) -> StoreError:
    """Our error for what the driver met on its way."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return StoreConfigurationError(operation, _NO_CREDENTIALS, Code.STORE_CREDENTIALS)
    if isinstance(error, NoRegionError):
        return StoreConfigurationError(operation, "no AWS region: set region in [store], or AWS_REGION")
    if isinstance(error, DriverConnectionError | HTTPClientError):
        return StoreUnavailableError(operation, f"no connection to DynamoDB: {_harmless(str(error))}")
    if isinstance(error, CredentialRetrievalError | MetadataRetrievalError):
        unfetched = f"AWS credentials cannot be fetched: {_harmless(str(error))}"
        return StoreUnavailableError(operation, unfetched, Code.STORE_CREDENTIALS)
    if isinstance(error, ResponseParserError | ChecksumError | StrangeAnswerError):
        return StoreUnavailableError(operation, _STRANGE)
    return StoreConfigurationError(operation, _harmless(str(error)))


def _harmless(text: str) -> str:
    return redacted(" ".join(text.split()))[:300]

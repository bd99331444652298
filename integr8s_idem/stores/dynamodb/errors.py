"""Translate errors of the driver and of DynamoDB into errors of this library."""

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
    "ProvisionedThroughputExceededException": "the table or one of its partitions has exceeded its throughput",
    "RequestLimitExceeded": "the account has exceeded its throughput in this region",
    "ThrottlingException": "DynamoDB throttles requests: the table is scaling up, or has reached its maximum",
    "Throttling": "DynamoDB throttles requests",
    "LimitExceededException": "too many tables are created or changed at once",
}
"""Errors after which the same request succeeds later."""

_INTERNAL_ERROR: Final = "DynamoDB has a temporary internal error"

_UNAVAILABLE: Final = {
    "InternalServerError": _INTERNAL_ERROR,
    "InternalFailure": _INTERNAL_ERROR,
    "ServiceUnavailable": "DynamoDB is temporarily unavailable",
    "ServiceUnavailableException": "DynamoDB is temporarily unavailable",
    "TransactionConflictException": "a transaction is changing this record",
    "ReplicatedWriteConflictException": "another region is changing this record",
    "ResourceInUseException": "the table is being created or changed",
}

_CREDENTIALS: Final = {
    "UnrecognizedClientException": "AWS does not know this access key: check the credentials",
    "InvalidClientTokenId": "AWS does not know this access key: check the credentials",
    "MissingAuthenticationTokenException": "the request to AWS contained no credentials",
    "MissingAuthenticationToken": "the request to AWS contained no credentials",
    "ExpiredTokenException": "the AWS credentials have expired: get new ones",
    "ExpiredToken": "the AWS credentials have expired: get new ones",
    "IncompleteSignatureException": "AWS cannot read the signature: check the credentials",
    "InvalidSignatureException": "AWS does not accept the signature: check the secret access key",
    "SignatureDoesNotMatch": "AWS does not accept the signature: check the secret access key",
}

_CLOCK: Final = ("signature expired", "signature not yet current", "request expired", "must be within")
_OTHER_KEYS: Final = ("does not match the schema", "Missing the key", "Type mismatch for key", "required keys")
_NO_CREDENTIALS: Final = (
    "no AWS credentials: set them in the environment or a profile, or use a role of the container or instance"
)

_FOREIGN_RESPONSE: Final = "the response is not from DynamoDB, or is corrupt"

CONDITION: Final = "ConditionalCheckFailedException"


class ForeignResponseError(Exception):
    """A response that is not from DynamoDB; the driver accepts any response with status 200."""


def code_of(error: ClientError) -> str:
    """Return DynamoDB's code of the error."""
    details: dict[str, Any] = error.response.get("Error", {})
    return str(details.get("Code", ""))


def is_temporary(error: ClientError) -> bool:
    """Whether the same request may succeed a moment later."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return code_of(error) in THROTTLED or code_of(error) in _UNAVAILABLE or status >= 500


def translate_refusal(operation: str, error: ClientError, table: str) -> StoreError:
    """Translate an error response of DynamoDB."""
    code, text = code_of(error), str(error.response.get("Error", {}).get("Message", ""))
    if is_temporary(error):
        return StoreUnavailableError(operation, THROTTLED.get(code) or _UNAVAILABLE.get(code) or _INTERNAL_ERROR)
    if not code or code.isdecimal():
        # For responses it cannot parse, the driver uses the status as the code; the text could contain a record.
        return StoreUnavailableError(operation, _FOREIGN_RESPONSE)
    if any(words in text.lower() for words in _CLOCK):
        return StoreUnavailableError(
            operation,
            "this machine's clock differs from AWS's by more than AWS allows: synchronize it with NTP",
            Code.CLOCK_SKEW,
        )
    if code == "ResourceNotFoundException":
        missing = f"the table {table} does not exist in this region and account; {MIGRATE}"
        return StoreConfigurationError(operation, missing, Code.SCHEMA_MISSING)
    if code == "AccessDeniedException":
        denied = f"AWS denies access to the table {table}: {_sanitized(text)}"
        return StoreConfigurationError(operation, denied, Code.STORE_PERMISSION)
    if reason := _CREDENTIALS.get(code):
        return StoreConfigurationError(operation, reason, Code.STORE_CREDENTIALS)
    if any(words in text for words in _OTHER_KEYS):
        other = f"the table {table} has other keys than the store needs: choose another table, and {MIGRATE}"
        return StoreConfigurationError(operation, other, Code.SCHEMA_OTHER)
    return StoreConfigurationError(operation, f"DynamoDB reported {code}: {_sanitized(text)}")


def translate_driver_error(
    operation: str, error: BotoCoreError | ResponseParserError | ForeignResponseError
) -> StoreError:
    """Translate an error of the driver."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return StoreConfigurationError(operation, _NO_CREDENTIALS, Code.STORE_CREDENTIALS)
    if isinstance(error, NoRegionError):
        return StoreConfigurationError(operation, "no AWS region: set region in [store], or AWS_REGION")
    if isinstance(error, DriverConnectionError | HTTPClientError):
        return StoreUnavailableError(operation, f"no connection to DynamoDB: {_sanitized(str(error))}")
    if isinstance(error, CredentialRetrievalError | MetadataRetrievalError):
        unfetched = f"AWS credentials cannot be fetched: {_sanitized(str(error))}"
        return StoreUnavailableError(operation, unfetched, Code.STORE_CREDENTIALS)
    if isinstance(error, ResponseParserError | ChecksumError | ForeignResponseError):
        return StoreUnavailableError(operation, _FOREIGN_RESPONSE)
    return StoreConfigurationError(operation, _sanitized(str(error)))


def _sanitized(text: str) -> str:
    return redacted(" ".join(text.split()))[:300]

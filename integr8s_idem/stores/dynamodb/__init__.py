"""Store records in a DynamoDB table, with aiobotocore."""

from integr8s_idem.config.message_text import lacking

try:
    from integr8s_idem.stores.dynamodb.client import dynamo_client
    from integr8s_idem.stores.dynamodb.repository import DynamoIdempotencyRepository
    from integr8s_idem.stores.dynamodb.table import migrate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(lacking(__name__, "dynamodb", error), name=error.name) from error

__all__ = ["DynamoIdempotencyRepository", "dynamo_client", "migrate"]

"""Records in a table of DynamoDB, by aiobotocore."""

from integr8s_idem.stores.dynamodb.client import dynamo_client
from integr8s_idem.stores.dynamodb.repository import DynamoIdempotencyRepository
from integr8s_idem.stores.dynamodb.table import migrate

__all__ = ["DynamoIdempotencyRepository", "dynamo_client", "migrate"]

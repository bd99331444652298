"""Records in Redis or Valkey."""

from integr8s_idem.stores.redis.client import redis_client
from integr8s_idem.stores.redis.repository import RedisIdempotencyRepository

__all__ = ["RedisIdempotencyRepository", "redis_client"]

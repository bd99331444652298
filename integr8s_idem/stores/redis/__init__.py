"""Records in Redis or Valkey: one server, a Redis Cluster, or a primary found through Sentinels."""

from integr8s_idem.stores.redis.client import redis_client, redis_cluster_client, redis_sentinel_client
from integr8s_idem.stores.redis.cluster import RedisClusterClient
from integr8s_idem.stores.redis.repository import RedisClusterIdempotencyRepository, RedisIdempotencyRepository

__all__ = [
    "RedisClusterClient",
    "RedisClusterIdempotencyRepository",
    "RedisIdempotencyRepository",
    "redis_client",
    "redis_cluster_client",
    "redis_sentinel_client",
]

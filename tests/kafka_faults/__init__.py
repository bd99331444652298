"""Campaigns and tools for what goes wrong around Kafka: zombies, rebalances, brokers that die."""

"""Payments through a flaky gateway, with retries that block a partition, and with retries that do not."""

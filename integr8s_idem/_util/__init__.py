"""Private utilities that are independent of idempotency."""

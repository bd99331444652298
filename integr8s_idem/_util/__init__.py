"""Private building blocks that know nothing of idempotency."""

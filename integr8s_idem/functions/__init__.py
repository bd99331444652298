"""The `@idempotent` decorator."""

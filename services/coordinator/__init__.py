"""Admits a limited number of concurrent executions: higher priority first, with a limit per user."""

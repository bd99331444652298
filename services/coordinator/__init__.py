"""Admits executions: a bounded number at once, higher priority first, a limit per user."""

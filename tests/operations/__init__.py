"""Benchmarks of operator commands that need their own program."""

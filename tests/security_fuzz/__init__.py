"""Fuzz tests of trust boundaries: replays, keys, records, HTTP and terminal output."""

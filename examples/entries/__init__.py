"""A small program for each entry point, without a server: `python -m examples.entries.steps`."""

"""One small program for each way in, without a server: `python -m examples.entries.steps`."""

"""Runs the script of each create command, once, and tells how it ended."""

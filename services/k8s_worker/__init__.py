"""Runs the script of each create command once, and publishes its outcome."""

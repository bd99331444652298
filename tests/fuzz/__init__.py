"""Fuzz tests: seeded mutators, properties that must hold for all input, and their campaign."""

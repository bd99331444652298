"""Hostile input in numbers: seeded mutators, what must hold whatever they make, and the campaign over both."""

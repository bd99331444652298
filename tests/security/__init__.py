"""Trust boundaries: tests of the threat model."""

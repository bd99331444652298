"""Trust boundaries: what those who may write somewhere can cause, and what they cannot."""

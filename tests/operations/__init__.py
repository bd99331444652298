"""Proofs about the commands for operators that take a program of their own."""

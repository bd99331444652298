"""Benchmarks of the library, compared with the alternatives: `make bench`, see `benchmarks/README.md`."""

"""What the stores cost, measured beside the driver alone: `make bench`, see `benchmarks/README.md`."""

"""Long-running fault campaigns: many runs of one kind of fault, resumable, with totals in `record/`.

`make faults` runs every campaign up to its target; `make test` runs a small number of the same runs.
"""

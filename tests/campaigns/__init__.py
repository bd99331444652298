"""The long proofs: many runs of one kind of fault, resumable, with the totals kept in `record.json`.

`make faults` runs them all up to their targets; `make test` runs a small number of the same runs.
"""

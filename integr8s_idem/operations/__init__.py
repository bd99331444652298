"""Operations on a running deployment: records, dead letters and workers.

These modules print nothing.  `integr8s_idem.cli` asks for confirmation and prints the results.
"""

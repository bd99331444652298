"""Records as released versions write them, in one folder for each minor version and one file for each store.

A file is written once, by `python -m tests.golden.record`, and never changes: workers of that version, and records that
they wrote, exist somewhere.  `tests/contract/test_golden_records.py` reads all of them with the current code, and
compares what the current code writes with the files of the previous minor version.
"""

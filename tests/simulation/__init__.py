"""Run the real manager, dispatcher and worker on virtual time, with broker and store faults drawn from a seed.

python -m tests.simulation --seed 1234 --trace
"""

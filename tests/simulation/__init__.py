"""The real manager, dispatcher and worker on virtual time, with a broker and a store that misbehave from a seed.

python -m tests.simulation --seed 1234 --trace
"""

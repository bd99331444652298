"""The reservation protocol as a model: every interleaving of a small number of workers, keys and faults.

Read it in this order:

1. `state.py`: what there is: records, deliveries on their way, partitions, faults still to come.
2. `protocol.py`: what we promise to do, as switches, and the bugs that come of turning one.
3. `store.py`: what the store does with one record.
4. `delivery.py`: what a worker does with one delivery.
5. `surroundings.py`: what happens around it: crashes, rebalances, leases that end, records that vanish.
6. `rules.py`: what must never happen.

`explorer.py` walks through all states, shortest ways first. What is modeled and what is not:
docs/decisions/0017-a-model-in-plain-python.md.  `python -m tests.model` runs it.
"""

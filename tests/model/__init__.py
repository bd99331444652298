"""A model of the reservation protocol that explores every interleaving of a few workers, keys and faults.

Read the modules in this order:

1. `state.py`: the state: records, deliveries in progress, partitions, remaining faults.
2. `protocol.py`: the protocol as switches, and the bugs that result from changing one.
3. `store.py`: the steps of the store on a record.
4. `delivery.py`: the steps of a worker on a delivery.
5. `surroundings.py`: the environment: crashes, rebalances, expiring leases, lost records.
6. `rules.py`: the rules that must never be broken.

`explorer.py` visits all states, shortest paths first. docs/decisions/0017-a-model-in-plain-python.md describes what is
modeled and what is not. Run it with `python -m tests.model`.
"""

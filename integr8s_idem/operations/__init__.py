"""What an operator asks of a running deployment, and does to it: keys, dead letters, workers.

Nothing here prints.  `integr8s_idem.cli` asks people before something is changed, and shows what came of it.
"""

"""The reference platform under faults, with a verdict based on observations from outside: `python -m examples.demo`.

__main__.py     the command line
play.py         the order of events: set up, publish, kill, wait, stop, count
scenery.py      servers, settings and topics of one run, and their removal
requests.py     the requests
services.py     the four services as processes
duplicator.py   events that come twice
ledger.py       what the platform's database says
metrics.py      what the services' /metrics say
journal.py      how often each script ran, recorded by the scripts
verdict.py      whether all of that fits together.  Pure
display.py      a live table on a terminal, else plain lines
"""

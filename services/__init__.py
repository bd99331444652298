"""The reference platform's four workers: events, handlers, domain logic.  Not part of the wheel."""

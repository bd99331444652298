"""The decision whether work is done, waited for, answered or refused, and what follows from it."""

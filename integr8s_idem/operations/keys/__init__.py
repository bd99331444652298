"""Find, explain, list, release and purge the records of a store."""

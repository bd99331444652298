"""The records of a store, as operators ask for them: found, explained, listed, released, purged."""

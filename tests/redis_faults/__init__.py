"""Campaign with restarts, stalls, data loss and failovers of Redis under load."""

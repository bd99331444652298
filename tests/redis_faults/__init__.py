"""Redis restarted, emptied, stalled and failed over under load, as often as wanted."""

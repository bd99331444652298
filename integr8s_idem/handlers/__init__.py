"""Route events to handlers, and run each handler once per event."""

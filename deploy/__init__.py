"""What runs, watches and draws the workers elsewhere; never installed."""

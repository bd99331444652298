"""Workers that are stopped while events wait for their handlers: which handlers start on leases that have ended."""

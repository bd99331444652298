"""The dashboard, and what finds it: `python -m deploy.grafana.dashboard` writes `idempotency.json`."""

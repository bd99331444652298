"""Run work once per key: reservation, lease, execution and outcome."""

"""Runs a saga for each execution: creates its pod, and deletes the pod if something fails."""

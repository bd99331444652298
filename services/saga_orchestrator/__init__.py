"""Leads each execution through its pod, and deletes the pod when things go wrong."""

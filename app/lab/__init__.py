"""Workloads, the load generator (its own process) and the statistics of a run. No Qt here."""

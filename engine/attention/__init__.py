"""Attention over paged keys and values: one interface (`base`), a reference (`naive`), fast ones beside it.

A backend plans once a step, on the host, and then runs once a layer. What belongs here reads the KV pool and
block tables; it never allocates blocks and knows nothing of requests.
"""

from engine.attention.base import AttentionBackend, AttentionPlan, Rows, get_backend, names, probe

__all__ = ["AttentionBackend", "AttentionPlan", "Rows", "get_backend", "names", "probe"]

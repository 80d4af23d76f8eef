"""The engine process: models, KV memory, scheduling, sampling, and the server in front of them.

No Qt and no SQLite here, and no import of `app`. What clients need to know travels through `ipc`.
"""

__version__ = "0.1.0"

"""The protocol both processes speak: messages, codec, endpoints, the client side and liveness.

No Qt, no torch, no SQLite here, and no import of `engine` or `app`: either side can use all of it.
"""

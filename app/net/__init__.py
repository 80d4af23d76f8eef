"""The console's side of the wire: the engine process, and the thread that owns the sockets.

No Qt here: the window calls `io_thread.EngineLink.drain` from a timer, and so can a script or a test.
"""

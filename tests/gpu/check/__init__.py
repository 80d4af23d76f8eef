"""The stages of ``packaging/gpu_check.py``, one a file; `tests.gpu.test_gpu_check` runs them.

Each stage is a function of a `context.Context` that returns what is to be kept as JSON. Where a card and a
CPU differ is in `timing` alone; sizes are in `settings`.
"""

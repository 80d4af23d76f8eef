"""The layers of a decoder: linear (in several precisions and implementations), norm, rope, mlp.

What belongs here works on plain tensors. Nothing here knows of requests, blocks or the scheduler.
"""

"""Steps replayed from CUDA graphs: which steps, in which buckets, over what static memory.

A step of few new tokens launches hundreds of small kernels, and launching them from Python takes longer than
they run. A captured graph launches them all at once, with the shapes and the addresses that it was captured
with, so steps are padded to a bucket and what changes lies in memory that stays in place.
"""

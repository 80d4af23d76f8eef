"""Triton kernels of our own for the GPU path, one concept a file, each beside its reference in torch.

Modules with kernels import triton, so ask `engine.kernels.availability.probe` first. Each offers

- ``probe(...)``, where there are sizes and dtypes that it cannot serve: why it cannot, or None;
- functions that prepare a `engine.kernels.launch.Launch` from tensors: nothing is allocated behind the
  caller's back, nothing is synchronized, and what a step changes is data on the device, never the shape of
  the launch, so that launches can be captured in CUDA graphs;
  What a kernel is compiled for follows from the model and from a few classes of numbers of rows (tiles of
  attention and of products), which `engine.kernels.warm` compiles ahead: numbers that change from step to
  step are no constants, and arrays of a few numbers a row may lie anywhere;
- ``reference...``: what each of these launches computes, in plain torch, float64 inside, which tests hold the
  kernel against.

Some modules hold only parts of kernels (`dot`), or kernels that another module launches before its own
(`vocabulary`) or behind it (`attention_parts`): the reference is that of who uses them. `linear` puts
launches together, those of `weight_only_gemm` among others.
"""

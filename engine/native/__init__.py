"""Kernels in C++ for CPUs, compiled once on the machine that runs them. See `engine.native.build`."""

from engine.native.kernels import Kernels, kernels, unavailable

__all__ = ["Kernels", "kernels", "unavailable"]

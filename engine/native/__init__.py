"""Kernels in C++ for CPUs, compiled once on the machine that runs them. See `engine.native.build`."""

from engine.native.kernels import Kernels, forward_pass, kernels, unavailable

__all__ = ["Kernels", "forward_pass", "kernels", "unavailable"]

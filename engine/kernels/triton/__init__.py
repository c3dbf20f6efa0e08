"""Kernels in Triton, for NVIDIA GPUs from compute capability 8.0 on."""

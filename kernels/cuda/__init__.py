"""Triton kernels for NVIDIA GPUs: the ternary matmul and flash attention, and their compilation ahead of time."""

"""The grouped-quantized format, its NumPy reference and packers, and the kernels behind it."""

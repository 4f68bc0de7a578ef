"""The C++ kernels for onnxruntime on the CPU, as a custom-op library."""

"""The target ``coreml``: ONNX graphs as Core ML packages, built with coremltools on any machine."""

"""Checkpoints and architectures in, bundles of ONNX stages out. No torch, no tracing."""

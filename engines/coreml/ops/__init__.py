"""The converters: one function per ONNX op, named as the op, in files by group."""

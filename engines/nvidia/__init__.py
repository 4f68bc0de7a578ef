"""What the targets for NVIDIA GPUs share."""

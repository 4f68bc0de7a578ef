"""Pipelines over engines: text generation, and what it needs (tokenizers, sampling)."""

"""Targets: each lowers a stage, builds an engine from it, and loads the engine."""

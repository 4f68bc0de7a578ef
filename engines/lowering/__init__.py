"""Lowering passes, one a file: from the portable graph to what a target takes."""

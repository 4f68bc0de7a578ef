"""Streaming data: readers, shuffling, tokenization and packing, pictures, and batches with a cursor that is saved."""

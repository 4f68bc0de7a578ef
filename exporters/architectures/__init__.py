"""One file per model family; each ends with ``ARCHITECTURE``."""

"""Other people's implementations, each run in a process of its own by ``bench``."""

"""The Triton kernels of :mod:`intaglio.kernels.cuda` as torch operators; on a CPU they compute the reference."""

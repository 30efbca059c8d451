"""Data-parallel training on MPI, without a compiler."""

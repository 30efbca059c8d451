"""Carries bytes between ranks: MPI communicators, simulated networks, memory shared by a node's ranks.

The lowest stage of the data path. ``mpi.py`` is the only file of the package that imports mpi4py, and does so only
when ``init()`` asks for it.
"""

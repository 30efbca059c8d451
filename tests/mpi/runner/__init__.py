"""Runs the tests of tests/mpi: one mpirun per front end and number of ranks, which holds all of its tests.

``outer`` is a plugin of the pytest that a person starts; it collects the tests, starts the jobs and reports.
``inner`` is a plugin of the pytest that each rank runs; it carries the tests out and writes what happened to a file.
``plan`` is what both agree on: front ends, limits, the folder between them.
"""

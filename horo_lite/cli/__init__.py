"""The command ``horo-lite``: ``run`` starts a job, ``doctor`` tells what is installed and whether it works.

Nothing here initialises MPI in its own process: whatever needs MPI is asked of a child.
"""

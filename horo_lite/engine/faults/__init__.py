"""Never hang, never lie: what a rank does when it fails, ends early, is late, or loses its launcher.

``ending`` makes a failure on one rank the end of the job, ``parent`` that of the launcher the end of the rank.
"""

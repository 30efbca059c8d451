"""What a compressor keeps for each parameter, seen as a part of the optimizer's state.

Residuals and their like belong into checkpoints, so they live in ``optimizer.state[p]`` beside ``exp_avg``, where
plain torch keeps and loads them.
"""

from __future__ import annotations

RANK_OWN = frozenset({"residual", "velocity", "server_residual", "server_start"})
"""Keys of what every rank has its own of; all other state is the same on all ranks."""

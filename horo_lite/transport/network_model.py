"""A network in numbers: what the simulator charges for messages and arithmetic.

The model is LogGP's with one port each way per rank (within a node) and per node (between nodes): a
message waits for the sender's port, occupies it for ``bytes / bandwidth``, takes a latency, and
occupies the receiver's port likewise.

Source: Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: incorporating long messages into the
LogP model", SPAA 1995.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class NetworkModel:
    """Parameters of a cluster; by default, nodes with 10 Gbit/s Ethernet.

    Attributes:
        latency_s: from one node to another, first byte.
        bandwidth: bytes per second of a node's port, each way, shared by its ranks.
        local_latency_s: between two ranks of a node.
        local_bandwidth: bytes per second of a rank's port to others of its node, each way.
        overhead_s: the processor's time per message, on either side.
        eager_bytes: messages up to this size leave before the receiver asks for them.
        reduce_rate: bytes of input per second that a rank can reduce.
        copy_rate: bytes per second that a rank can copy.
        ranks_per_node: consecutive ranks share a node; None puts each rank on a node of its own.
        nodes: the ranks of each node, where nodes are uneven; overrides ``ranks_per_node``.
        slowdown: by what factor a straggler's arithmetic takes longer.
        late_s: when a rank begins, if not at 0.
        dead_s: when a rank dies.
        cut_s: when a link (source, destination) begins to lose all messages.
    """

    latency_s: float = 30e-6
    bandwidth: float = 1.25e9
    local_latency_s: float = 1e-6
    local_bandwidth: float = 8e9
    overhead_s: float = 1e-6
    eager_bytes: int = 16 << 10
    reduce_rate: float = 10e9
    copy_rate: float = 10e9
    ranks_per_node: int | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    slowdown: Mapping[int, float] = dataclasses.field(default_factory=dict)
    late_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    dead_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    cut_s: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)

    @classmethod
    def counting_steps(cls) -> NetworkModel:
        """A network whose only cost is a latency of 1: virtual time is the number of steps."""
        infinite = float("inf")
        return cls(
            latency_s=1.0,
            local_latency_s=1.0,
            bandwidth=infinite,
            local_bandwidth=infinite,
            overhead_s=0.0,
            reduce_rate=infinite,
            copy_rate=infinite,
        )

    def node_of(self, size: int) -> list[int]:
        """Each rank's node."""
        if self.nodes:
            node = {rank: i for i, ranks in enumerate(self.nodes) for rank in ranks}
            return [node[rank] for rank in range(size)]
        return [rank // (self.ranks_per_node or 1) for rank in range(size)]


class Ports:
    """When each port is free again: a rank's for messages within its node, a node's for those to other nodes.

    Attributes:
        crossing_bytes: what has left each node.
    """

    def __init__(self, network: NetworkModel, size: int) -> None:
        self._network = network
        self._size = size
        self._node = network.node_of(size)
        nodes = max(self._node) + 1
        self._out_free_s = [0.0] * (size + nodes)  # the ranks' ports, then the nodes'
        self._in_free_s = [0.0] * (size + nodes)
        self._local_byte_s = 1.0 / network.local_bandwidth
        self._byte_s = 1.0 / network.bandwidth
        self.crossing_bytes = [0] * nodes

    def occupy(self, source: int, target: int, size_bytes: int, ready_s: float) -> tuple[float, float, float]:
        """Send a message from rank to rank as soon as its ports are free.

        Returns:
            when it begins to leave, when it has left, and when it has arrived.
        """
        source_node, target_node = self._node[source], self._node[target]
        if source_node == target_node:
            wire_s, latency_s = size_bytes * self._local_byte_s, self._network.local_latency_s
        else:
            self.crossing_bytes[source_node] += size_bytes
            wire_s, latency_s = size_bytes * self._byte_s, self._network.latency_s
            source, target = self._size + source_node, self._size + target_node
        start_s = max(ready_s, self._out_free_s[source])
        left_s = self._out_free_s[source] = start_s + wire_s
        arrival_s = self._in_free_s[target] = max(start_s + latency_s, self._in_free_s[target]) + wire_s
        return start_s, left_s, arrival_s

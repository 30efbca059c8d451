"""What the engine counts and records: bytes before and after compression, where the time went, the trace."""

from __future__ import annotations

import dataclasses

from horo_lite.engine.timeline import Timeline


@dataclasses.dataclass
class WireStats:
    """What this rank has exchanged since ``init()``.

    Attributes:
        dense_bytes: what was to be reduced, uncompressed.
        payload_bytes: what compression made of it; the same where there is none.
        sent_bytes: what this rank handed to MPI, all messages of all kinds.
        shared_bytes: what this rank read from other ranks' memory on its node, in place of messages.
        encode_s: seconds in compressors before their first request.
        wire_s: seconds until compressors' requests were answered.
        decode_s: seconds in compressors afterwards.
    """

    dense_bytes: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    shared_bytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times smaller the payload is."""
        return self.dense_bytes / self.payload_bytes if self.payload_bytes else 1.0


@dataclasses.dataclass
class Instruments:
    """One per process, seen by all lanes.

    Attributes:
        library: the MPI library's version, as it calls itself.
        timeline: None while nothing is recorded.
    """

    library: str = ""

    stats: WireStats = dataclasses.field(default_factory=WireStats)
    timeline: Timeline | None = None

"""Every error that horo_lite raises, in one tree.

::

    HoroLiteError
    +-- HorovodInternalError (RuntimeError)   the operation failed; scripts written for Horovod catch this
    |   +-- DisagreementError                 ranks asked for different things; the engine stays usable
    |   +-- PeerLostError                     a rank ended, died or stopped answering
    |   +-- ShutDownError                     the operation was still in flight at shutdown()
    +-- HostsUpdatedInterrupt (RuntimeError)  elastic: the set of hosts changed; state is intact
    +-- ArgumentError (ValueError)            a wrong value was passed
    |   +-- NotInitializedError               init() has not been called, or shutdown() has
    +-- ArgumentTypeError (TypeError)         a wrong type was passed
    +-- MPIMissingError (RuntimeError)        no MPI library could be loaded
    +-- LaunchError (RuntimeError)            the launcher and the MPI library do not fit together

Messages say what was given, what was expected and what to do, with rank and tensor name where there are any.
"""

from __future__ import annotations

OWN_FAULT = "This is a fault of horo_lite's own: please report it, with the traceback"


class HoroLiteError(Exception):
    """Root of the tree: ``except hvd.HoroLiteError`` catches whatever this package raises."""


class HorovodInternalError(HoroLiteError, RuntimeError):
    """An operation failed on this rank or on another (the name Horovod's scripts catch)."""


class DisagreementError(HorovodInternalError):
    """Ranks asked for different things under one name; raised on every rank, before data moved."""


class PeerLostError(HorovodInternalError):
    """A rank that the operation needs has ended, died or stopped answering."""


class ShutDownError(HorovodInternalError):
    """The operation was still in flight when ``shutdown()`` was called."""


class HostsUpdatedInterrupt(HoroLiteError, RuntimeError):
    """The set of hosts changed between two steps (elastic training).

    Args:
        skip_sync: True when no rank's state needs to be sent anew.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class ArgumentError(HoroLiteError, ValueError):
    """A wrong value was passed."""


class NotInitializedError(ArgumentError):
    """``init()`` has not been called, or ``shutdown()`` has."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")


class ArgumentTypeError(HoroLiteError, TypeError):
    """A wrong type was passed."""


class MPIMissingError(HoroLiteError, RuntimeError):
    """No MPI library could be loaded; the message says which package to install."""


class LaunchError(HoroLiteError, RuntimeError):
    """The launcher that started this process and the MPI library it loaded do not fit together."""

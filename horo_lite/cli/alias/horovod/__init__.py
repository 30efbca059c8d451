"""What ``import horovod`` finds under ``horo-lite run --horovod``: it hands the name over to horo_lite.

The folder above is put on PYTHONPATH, so that every process of the job sees it: data-loading workers, scripts started
by scripts, whichever way they were started.
"""

from __future__ import annotations

import sys

import horo_lite

del sys.modules[__name__]
horo_lite.install_as_horovod()  # type: ignore[attr-defined]

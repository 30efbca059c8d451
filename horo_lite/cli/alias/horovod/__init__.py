"""What ``import horovod`` finds under ``horo-lite run --horovod``: it hands the name over to horo_lite.

The folder above is put on PYTHONPATH, so that every process of the job sees it: data-loading workers, scripts started
by scripts, whichever way they were started.
"""

from __future__ import annotations

import sys

from horo_lite.horovod_alias import install_as_horovod

del sys.modules[__name__]
install_as_horovod()

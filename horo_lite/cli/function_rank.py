"""One rank of ``horo_lite.run``: ``python -m horo_lite.cli.function_rank FOLDER``.

The function comes over the job's own MPI from rank 0, and the results go there: other hosts do not see the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from horo_lite import context, functions
from horo_lite.function_run import CALL, RESULTS


def main(folder: Path) -> None:
    """Call the function that lies in a folder, and leave what all ranks have returned there."""
    context.init()
    pickled = (folder / CALL).read_bytes() if context.rank() == 0 else None
    call = functions.broadcast_object(pickled, name="horo_lite.run.call")
    context.shutdown()
    func, args, kwargs = cloudpickle.loads(call)
    result = func(*args, **kwargs)
    context.init()
    results = functions.allgather_object(result, name="horo_lite.run.results")
    if context.rank() == 0:
        (folder / RESULTS).write_bytes(cloudpickle.dumps(results))
    context.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

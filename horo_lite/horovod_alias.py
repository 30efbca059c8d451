"""``import horovod.torch as hvd`` finds horo_lite: a script written for Horovod runs as it is.

A finder answers for ``horovod`` and everything below it, with horo_lite's modules where there are such and with small
modules of re-exported names else. Nothing is imported before the script asks for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from horo_lite import built, context, elastic, errors, function_run, functions, process_sets

_VERSION = "0.28.1"  # the interface that is offered

_MODULES = {
    "horovod.torch": "horo_lite.torch",
    "horovod.torch.mpi_ops": "horo_lite.torch.mpi_ops",
    "horovod.torch.functions": "horo_lite.torch.functions",
    "horovod.torch.compression": "horo_lite.torch.compression",
    "horovod.torch.optimizer": "horo_lite.torch.optimizer",
    "horovod.torch.sync_batch_norm": "horo_lite.torch.sync_batch_norm",
    "horovod.torch.elastic": "horo_lite.torch.elastic",
    "horovod.torch.elastic.state": "horo_lite.torch.elastic.state",
    "horovod.torch.elastic.sampler": "horo_lite.torch.elastic.sampler",
    "horovod.tensorflow": "horo_lite.tensorflow",
    "horovod.tensorflow.mpi_ops": "horo_lite.tensorflow",
    "horovod.tensorflow.functions": "horo_lite.tensorflow",
    "horovod.tensorflow.compression": "horo_lite.tensorflow.compression",
    "horovod.tensorflow.elastic": "horo_lite.tensorflow.elastic",
    "horovod.tensorflow.keras": "horo_lite.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "horo_lite.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "horo_lite.keras.elastic",
    "horovod.keras": "horo_lite.keras",
    "horovod.keras.callbacks": "horo_lite.keras.callbacks",
    "horovod.keras.elastic": "horo_lite.keras.elastic",
}


def _names(module: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _contents() -> dict[str, dict[str, Any]]:
    """Horovod's modules that are made of names: their contents."""
    of_process_sets = {
        **_names(process_sets, "ProcessSet", "global_process_set"),
        **_names(context, "add_process_set", "get_process_set_ids_and_ranks", "remove_process_set"),
    }
    exceptions = {
        **_names(errors, "HorovodInternalError", "HostsUpdatedInterrupt"),
        "HorovodVersionMismatchError": errors.HorovodInternalError,
    }
    built_names = {name: getattr(built, name) for name in dir(built) if name.endswith(("_built", "_enabled"))}
    util: dict[str, Any] = {
        "check_extension": lambda *args, **kwargs: None,
        "check_installed_version": lambda *args, **kwargs: None,
        "extension_available": lambda name, *args, **kwargs: _available(name),
        "gpu_available": lambda *args, **kwargs: False,
        **{name: _without_arguments(answer) for name, answer in built_names.items() if name.endswith("_built")},
        "is_iterable": lambda value: hasattr(value, "__iter__"),
        "split_list": _split_list,
        "num_rank_is_power_2": lambda number: number > 0 and number & (number - 1) == 0,
    }
    return {
        "horovod": {"__version__": _VERSION, "run": function_run.run},
        "horovod.common": {},
        "horovod.common.util": util,
        "horovod.common.exceptions": exceptions,
        "horovod.common.process_sets": of_process_sets,
        "horovod.common.basics": built_names,
        "horovod.common.elastic": _names(elastic, "ObjectState", "State", "run_fn"),
        "horovod.common.functions": _names(functions, "allgather_object", "broadcast_object"),
        "horovod.runner": {"run": function_run.run},
        "horovod.runner.common": {},
    }


def _without_arguments(answer: Any) -> Any:
    """Horovod's take ``verbose``."""
    return lambda verbose=False: answer()


def _available(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _split_list(values: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """``parts`` runs of ``values``, the first ones longer by one where it does not divide."""
    size, rest = divmod(len(values), parts)
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return [values[start:stop] for start, stop in itertools.pairwise(starts)]


class _Horovod(ModuleType):
    """A module of names that says of a missing one whose it is."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} (it is horo_lite under that name)")


class _Names(importlib.abc.Loader):
    """Makes a module of names."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self._contents = contents

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module that can have sub-modules."""
        return _Horovod(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Its names."""
        vars(module).update(self._contents)


class _Borrowing(importlib.abc.Loader):
    """Puts a module of ours into ``sys.modules`` under Horovod's name, its own attributes untouched."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """An empty module, which ``exec_module`` replaces: import would rename ours."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """What the import statement returns is what then stands in ``sys.modules``."""
        sys.modules[module.__name__] = importlib.import_module(_MODULES[module.__name__])


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for ``horovod`` and its sub-modules, before any installed Horovod."""

    def __init__(self) -> None:
        self._contents = _contents()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for the names that are known; others do not exist."""
        if fullname.split(".")[0] != "horovod":
            return None
        if fullname in _MODULES:
            return importlib.machinery.ModuleSpec(fullname, _Borrowing(), is_package=True)
        if fullname in self._contents:
            return importlib.machinery.ModuleSpec(fullname, _Names(self._contents[fullname]), is_package=True)
        return None


def install_as_horovod() -> None:
    """Let ``import horovod`` and everything below it mean horo_lite, in this process; a second call does nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    importlib.import_module("horovod")

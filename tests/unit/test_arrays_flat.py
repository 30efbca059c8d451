"""Whatever an array's layout, its flat buffer is row-major and writing back reaches the caller."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from horo_lite.arrays import Flat, as_bytes, device_name, item_bytes, numpy_dtype, type_name
from horo_lite.arrays.types import ITEM_BYTES, MOVED_BYTES
from horo_lite.errors import ArgumentError, ArgumentTypeError


def grid():
    return np.arange(24, dtype=np.float32)


NUMPY_LAYOUTS = {
    "contiguous": (lambda: grid().reshape(2, 3, 4), True),
    "0-d": (lambda: np.array(7, np.float32), True),
    "zero-size": (lambda: np.zeros((3, 0, 2), np.float32), True),
    "single elements": (lambda: np.ones((1, 2, 2), np.float32), True),
    "transposed": (lambda: grid().reshape(4, 6).T, False),
    "fortran": (lambda: np.asfortranarray(grid().reshape(4, 6)), False),
    "strided": (lambda: grid()[::2], False),
    "reversed": (lambda: grid()[::-1], False),
    "foreign byte order": (lambda: grid().astype(">f4"), False),
    "subclass": (lambda: grid().reshape(4, 6).view(np.recarray), True),
}


@pytest.mark.parametrize("layout", NUMPY_LAYOUTS)
def test_numpy_layouts(layout):
    make, is_view = NUMPY_LAYOUTS[layout]
    array = make()
    flat = Flat(array, writable=True)
    assert flat.is_view is is_view
    assert type(flat.buffer) is np.ndarray
    assert flat.buffer.flags.c_contiguous
    assert flat.buffer.dtype == np.dtype(np.float32)
    assert flat.buffer.tolist() == [float(value) for value in array.ravel(order="C")]
    flat.buffer[:] = np.arange(flat.buffer.size) + 100
    flat.write_back()
    assert array.ravel(order="C").tolist() == [100.0 + k for k in range(array.size)]


def test_read_only_arrays_are_read_but_not_written():
    array = np.broadcast_to(np.float32(3), (2, 2))
    assert Flat(array).buffer.tolist() == [3, 3, 3, 3]
    assert Flat(np.float32(2)).buffer.tolist() == [2]
    for unwritable in (array, np.float32(2)):
        with pytest.raises(ArgumentError, match="read-only"):
            Flat(unwritable, writable=True)


@pytest.mark.parametrize("name", [*ITEM_BYTES, *MOVED_BYTES])
def test_names_sizes_and_bytes(name):
    array = np.zeros(3, numpy_dtype(name))
    assert type_name(array) == name
    assert item_bytes(name) == array.itemsize
    assert len(as_bytes(array)) == 3 * array.itemsize
    assert device_name(array) == "cpu"
    torch = pytest.importorskip("torch")
    assert type_name(torch.zeros(3, dtype=getattr(torch, name))) == name


@pytest.mark.parametrize("array", [np.zeros(2, np.longdouble), np.array(["a"]), np.zeros(2, "V3")])
def test_unsupported_types_are_named(array):
    with pytest.raises(ArgumentTypeError, match=str(array.dtype.name)):
        Flat(array)


def test_what_is_no_array_is_refused():
    with pytest.raises(ArgumentTypeError, match="list"):
        Flat([1, 2])


def torch_layouts(torch, dtype):
    values = torch.arange(24).to(dtype)
    image = values.reshape(1, 2, 3, 4)
    return {
        "contiguous": (values.reshape(2, 3, 4).clone(), True),
        "0-d": (torch.tensor(7).to(dtype), True),
        "zero-size": (torch.zeros(3, 0, dtype=dtype), True),
        "transposed": (values.reshape(4, 6).clone().T, False),
        "channels_last": (image.clone(memory_format=torch.channels_last), False),
        "strided": (values.clone()[::2], False),
        "offset": (values.clone()[5:], True),
    }


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "complex64", *MOVED_BYTES])
def test_torch_layouts(name):
    torch = pytest.importorskip("torch")
    for layout, (tensor, is_view) in torch_layouts(torch, getattr(torch, name)).items():
        flat = Flat(tensor, writable=True)
        assert flat.is_view is is_view, layout
        assert flat.buffer.dtype == numpy_dtype(name)
        assert flat.buffer.tolist() == tensor.flatten().tolist(), layout
        flat.buffer[:] = 1
        flat.write_back()
        assert tensor.flatten().tolist() == [1] * tensor.numel(), layout


def test_parameters_keep_their_graph_role():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2, 3).T)
    flat = Flat(parameter, writable=True)
    flat.buffer[:] = 5
    flat.write_back()
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.tolist() == [[5, 5]] * 3


def test_lazily_conjugated_tensors():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    flat = Flat(tensor.conj(), writable=True)
    assert flat.buffer.tolist() == [1 - 2j, 3 + 1j]
    flat.buffer[:] = 2j
    flat.write_back()
    assert tensor.tolist() == [-2j, -2j]


def test_sparse_and_unsupported_tensors_are_named():
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentTypeError, match="sparse"):
        Flat(torch.eye(3).to_sparse())
    with pytest.raises(ArgumentTypeError, match="complex32"):
        Flat(torch.zeros(2, dtype=torch.complex32))


def test_torch_is_never_imported_and_ml_dtypes_late():
    code = """
import sys
import numpy
from horo_lite import arrays
from horo_lite.interfaces import Reduction

ones = numpy.ones(9, "f4")
arrays.kernel("float32", Reduction.SUM, 2).combine(ones, [ones, ones])
sys.exit(" ".join({"torch", "ml_dtypes", "mpi4py"} & set(sys.modules)) or None)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

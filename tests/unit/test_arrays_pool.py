"""Pooled scratch is used again only after the last array that sees it is gone."""

from __future__ import annotations

import gc
import threading

import numpy as np

from horo_lite.arrays.pool import Pool

SMALL_BYTES = 1 << 16
FLOAT32 = np.dtype(np.float32)


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_for_the_same_size():
    pool = Pool(SMALL_BYTES)
    first = pool.empty(1 << 20, FLOAT32)
    place = address(first)
    del first
    assert address(pool.empty(1 << 20, FLOAT32)) == place


def test_a_slice_of_a_slice_keeps_the_memory():
    pool = Pool(SMALL_BYTES)
    first = pool.empty(1 << 20, FLOAT32)
    part = first[100:][50:60].view(np.int32)
    part[:] = 7
    del first
    gc.collect()
    pool.empty(1 << 20, FLOAT32)[:] = 0
    assert part.tolist() == [7] * 10


def test_arrays_in_use_never_share():
    pool = Pool(SMALL_BYTES)
    arrays = [pool.empty(1 << 17, FLOAT32) for _ in range(20)]
    assert len({address(array) for array in arrays}) == 20


def test_a_much_larger_buffer_is_not_spent_on_a_small_array():
    pool = Pool(SMALL_BYTES)
    large = pool.empty(1 << 22, FLOAT32)
    place = address(large)
    del large
    assert address(pool.empty(1 << 17, FLOAT32)) != place


def test_the_shelf_is_bounded():
    pool = Pool(SMALL_BYTES, shelf_bytes=4 << 20)
    arrays = [pool.empty((1 << 18) + 1000 * k, FLOAT32) for k in range(30)]
    del arrays
    pool.empty(1 << 20, FLOAT32)
    assert sum(memory.nbytes for memory in pool._shelf) <= 4 << 20


def test_lengths_and_types():
    pool = Pool(SMALL_BYTES)
    for elements in (0, 1, 1000, 16384, 16385, 100_003):
        for name in ("bool", "float16", "complex128"):
            array = pool.empty(elements, np.dtype(name))
            assert array.shape == (elements,)
            assert array.dtype == np.dtype(name)
            assert array.flags.writeable


def test_threads_share_one_pool():
    pool = Pool(SMALL_BYTES)
    failures = []

    def work(number):
        for _ in range(200):
            array = pool.empty(1 << 15, FLOAT32)
            array[:] = number
            if not (array == number).all():
                failures.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_small_arrays_are_left_to_malloc():
    pool = Pool(SMALL_BYTES)
    assert pool.empty((SMALL_BYTES >> 2) - 1, FLOAT32).base is None
    assert pool.empty(SMALL_BYTES >> 2, FLOAT32).base is not None

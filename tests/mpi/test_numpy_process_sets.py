"""Process sets: from lists and from communicators, at init() and later; collectives, gradients and errors in them."""

from __future__ import annotations

import numpy as np
import pytest

from horo_lite.gradients import GradientBuckets

pytestmark = pytest.mark.openmpi  # whose communicators differ from MPICH's: split ones lack attributes


@pytest.fixture
def again(hvd):
    """A function that initialises anew; afterwards the world is as other tests expect it."""

    def init(**arguments):
        hvd.shutdown()
        hvd.init(**arguments)
        return hvd

    yield init
    hvd.shutdown()
    hvd.init()


@pytest.fixture
def dynamic(again):
    return again(process_sets="dynamic")


def sum_over(hvd, process_set):
    """What its members get for rank + 1, checked; None elsewhere."""
    if not process_set.included():
        return None
    got = hvd.allreduce(np.array([hvd.rank() + 1.0]), op=hvd.Sum, process_set=process_set)
    assert got.tolist() == [sum(rank + 1.0 for rank in process_set.ranks)]
    return got


@pytest.mark.ranks(3, 4)
def test_sets_given_to_init(again, hvd):
    from horo_lite import ProcessSet

    pair, rest = ProcessSet([2, 1]), ProcessSet([0, *range(3, hvd.size())])
    again(process_sets=[pair, rest])
    assert (pair.process_set_id, rest.process_set_id) == (1, 2)
    assert pair.ranks == [1, 2]
    assert pair.size() == 2
    assert pair.rank() == {1: 0, 2: 1}.get(hvd.rank(), -1)
    assert pair.included() == (hvd.rank() in (1, 2))
    assert hvd.get_process_set_ids_and_ranks() == {0: list(range(hvd.size())), 1: [1, 2], 2: rest.ranks}
    for _ in range(3):
        sum_over(hvd, pair)
        sum_over(hvd, rest)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [hvd.size()]
    with pytest.raises(ValueError, match="dynamic"):
        hvd.add_process_set([0, 1])


@pytest.mark.ranks(3)
def test_every_collective_in_a_set_whose_first_member_is_not_rank_0(dynamic):
    hvd = dynamic
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        rank, place = hvd.rank(), hvd.rank() - 1
        assert hvd.allreduce(np.array([2.0 * rank]), process_set=pair).tolist() == [3.0]
        assert hvd.allgather(np.full(rank, rank), process_set=pair).tolist() == [1, 2, 2]
        assert hvd.broadcast(np.array([rank]), 2, process_set=pair).tolist() == [2]
        assert hvd.broadcast_object({"rank": rank}, 1, process_set=pair) == {"rank": 1}
        assert hvd.allgather_object(rank, process_set=pair) == [1, 2]
        assert hvd.alltoall(np.array([10, 20]) + rank, process_set=pair).tolist() == [10 * place + 11, 10 * place + 12]
        assert hvd.reducescatter(np.array([1.0, 2.0]), op=hvd.Sum, process_set=pair).tolist() == [2.0 * place + 2]
        assert hvd.allreduce(np.ones(3), op=hvd.Adasum, process_set=pair).tolist() == [1.0] * 3
        hvd.barrier(process_set=pair)
        with pytest.raises(ValueError, match=r"root_rank=0.*\[1, 2\]"):
            hvd.broadcast(np.ones(1), 0, process_set=pair)
        with pytest.raises(ValueError, match="root_rank=0"):
            hvd.broadcast_object(1, 0, process_set=pair)
        with pytest.raises(hvd.DisagreementError, match=r"rank 1: \(1,\); rank 2: \(2,\)"):
            hvd.allreduce(np.ones(rank), process_set=pair)
    else:
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.allreduce_async):
            with pytest.raises(ValueError, match="rank 0 is not in"):
                call(np.ones(2), process_set=pair)
        with pytest.raises(ValueError, match="rank 0 is not in"):
            GradientBuckets([("w", (2,), "float32")], process_set=pair)
    sum_over(hvd, pair)
    assert hvd.remove_process_set(pair)


@pytest.mark.ranks(3, 4)
def test_many_sets_and_the_world_at_once(dynamic):
    hvd = dynamic
    sets = [hvd.add_process_set([first, second]) for first in range(hvd.size()) for second in range(first)]
    handles = []
    mine = [group for group in sets if group.included()]
    for group in mine if hvd.rank() % 2 else reversed(mine):
        value = np.array([hvd.rank() + 1.0])
        handles.append((group, hvd.allreduce_async(value, op=hvd.Sum, name="x", process_set=group)))
    everyone = hvd.allreduce(np.array([1.0]), op=hvd.Sum, name="x")
    assert everyone.tolist() == [hvd.size()]
    for group, handle in handles:
        assert hvd.synchronize(handle).tolist() == [sum(group.ranks) + 2.0]
    for group in sets:
        assert hvd.remove_process_set(group)
        assert group.process_set_id is None


@pytest.mark.ranks(2, 3)
def test_adding_and_removing_again_and_again(dynamic):
    hvd = dynamic
    for _ in range(30):
        group = hvd.add_process_set([0])
        sum_over(hvd, group)
        assert hvd.remove_process_set(group)
        assert not hvd.remove_process_set(group)
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(np.ones(1), process_set=group)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert list(hvd.get_process_set_ids_and_ranks()) == [0]


@pytest.mark.ranks(2, 3)
def test_a_set_is_removed_while_operations_of_others_are_under_way(dynamic):
    hvd = dynamic
    group = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.add_process_set([1])
    sum_over(hvd, group)
    handles = [hvd.allreduce_async(np.full(50_000, float(k)), name=f"beside.{k}") for k in range(5)]
    hvd.remove_process_set(group)
    assert [float(hvd.synchronize(handle)[-1]) for handle in handles] == pytest.approx([0, 1, 2, 3, 4])


@pytest.mark.ranks(2, 3, 4)
def test_sets_from_communicators(again, hvd):
    from mpi4py import MPI

    from horo_lite import ProcessSet

    halves = MPI.COMM_WORLD.Split(hvd.rank() % 2, -hvd.rank())
    own = ProcessSet(halves)
    again(process_sets=[own])
    same_parity = [rank for rank in range(hvd.size()) if rank % 2 == hvd.rank() % 2]
    assert own.ranks == same_parity
    assert own.included()
    assert own.rank() == same_parity.index(hvd.rank())
    sum_over(hvd, own)
    assert sorted(hvd.get_process_set_ids_and_ranks()) == [0, 1, 2]
    halves.Free()
    sum_over(hvd, own)


@pytest.mark.ranks(2, 3)
def test_init_on_part_of_the_ranks_and_on_a_communicator(again, hvd):
    from mpi4py import MPI

    size = hvd.size()
    backwards = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.Get_rank())
    again(comm=backwards)
    assert hvd.rank() == size - 1 - MPI.COMM_WORLD.Get_rank()
    assert hvd.allgather(np.array([MPI.COMM_WORLD.Get_rank()])).tolist() == list(range(size))[::-1]
    backwards.Free()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [size]
    hvd.shutdown()
    if MPI.COMM_WORLD.Get_rank() == 1:
        with pytest.raises(ValueError, match="not in the list"):
            hvd.init(comm=[0, *range(2, size)])
    else:
        hvd.init(comm=[0, *range(2, size)])
        assert hvd.size() == size - 1
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [size - 1]


@pytest.mark.ranks(3)
def test_wrong_sets_are_refused_on_all_ranks_and_leave_all_usable(dynamic):
    hvd = dynamic
    group = hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set([1, 0, 1])
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(list(range(hvd.size())))
    with pytest.raises(ValueError, match="got none"):
        hvd.add_process_set([])
    with pytest.raises(ValueError, match=r"got \[99\]"):
        hvd.add_process_set([0, 99])
    with pytest.raises(hvd.DisagreementError, match="same process set"):
        hvd.add_process_set([hvd.rank()])
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match=r"got \[99\]"):
            hvd.add_process_set([99])
    else:
        with pytest.raises(hvd.DisagreementError, match="rank 1 could not register"):
            hvd.add_process_set([1])
    sum_over(hvd, group)
    hvd.barrier()


@pytest.mark.ranks(2)
def test_init_with_the_same_set_twice_starts_nothing(again, hvd):
    from horo_lite import ProcessSet

    with pytest.raises(ValueError, match="registered already"):
        again(process_sets=[ProcessSet([0]), ProcessSet([0])])
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()


@pytest.mark.ranks(3)
def test_gradients_in_two_sets_at_once(dynamic):
    hvd = dynamic
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
    buckets = {
        group: GradientBuckets([("w", (5,), "float32"), ("b", (70_000,), "float32")], process_set=group, op=hvd.Sum)
        for group in sets
        if group.included()
    }
    for step in range(4):
        for group, own in buckets.items():
            for index in range(2):
                own.views[index][:] = (hvd.rank() + 1) * (step + 1)
                own.ready(index)
            assert own.finish() == [True, True]
            assert own.views[1].tolist() == [sum(rank + 1 for rank in group.ranks) * (step + 1)] * 70_000
    hvd.barrier()

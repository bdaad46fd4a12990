"""What a member has sent or got in an iteration is kept, as far as there is room."""

from decod.protocol.core.messages.server_messages import Leg
from decod.protocol.strategy.servers.placement import KeptTensors, Kind
from tests.unit.protocol.cast import B1A, F1A, configured, freed, mb, sent, settle
from tests.unit.protocol.servers_cast import Bench, activation, gradient, stage

M, N = mb(0), mb(1)


def test_a_kept_tensor_outlives_the_way_of_the_other_reference() -> None:
    bench = Bench(F1A, stage())
    tensor = bench.new()
    bench.kept.keep(Kind.ENTRY, M, tensor)
    assert freed(bench.context.tensors.release(tensor)) == []
    assert bench.kept.get(Kind.ENTRY, M) == tensor
    assert bench.kept.get(Kind.OUTPUT, M) is None
    assert freed(bench.kept.drop(Kind.ENTRY, M)) == [tensor]
    assert bench.kept.drop(Kind.ENTRY, M) == []


def test_the_first_of_its_kind_stays() -> None:
    bench = Bench(F1A, stage())
    first, second = bench.new(), bench.new()
    bench.kept.keep(Kind.ENTRY, M, first)
    bench.kept.keep(Kind.ENTRY, M, second)
    assert bench.kept.get(Kind.ENTRY, M) == first
    assert freed(bench.context.tensors.release(second)) == [second]


def test_all_parts_of_a_node_share_one_room() -> None:
    bench = Bench(F1A, stage())
    other = KeptTensors(bench.context, bench.room)
    settle(bench.context, protocol=configured(keep_max_bytes=16))
    for kept, microbatch in ((bench.kept, M), (other, M), (other, N)):
        kept.keep(Kind.ENTRY, microbatch, bench.new())
    assert other.get(Kind.ENTRY, N) is None
    bench.kept.clear()
    other.keep(Kind.ENTRY, N, bench.new())
    assert other.get(Kind.ENTRY, N) is not None


def test_tensors_for_this_node_stay_here() -> None:
    bench = Bench(F1A, stage())
    effects = bench.courier.activation(F1A, M, Leg.TASK, bench.new())
    effects += bench.courier.gradient(F1A, M, Leg.RESULT, bench.new(), 2)
    assert sent(effects) == []
    assert bench.own == [activation(M, Leg.TASK), gradient(M, Leg.RESULT, attempt=2)]


def test_tensors_for_others_are_sent_and_those_for_nobody_freed() -> None:
    bench = Bench(F1A, stage())
    assert sent(bench.courier.activation(B1A, M, Leg.RESULT, bench.new())) == [
        (B1A, activation(M, Leg.RESULT))
    ]
    assert len(freed(bench.courier.gradient(None, M, Leg.ONWARD, bench.new()))) == 1

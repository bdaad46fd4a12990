"""From whom a relay and a data node take activations and gradients."""

from dataclasses import replace

import pytest

from decod.ids import NodeId
from decod.protocol.core.jobs import EmbedBackward, Forward
from decod.protocol.core.messages import BackwardGradient
from tests.unit.protocol.cast import D0, R1A, R1B, R2A, R2B, flow, freed, jobs_of, tensor, view_of
from tests.unit.protocol.test_microbatch import FORWARD, PATH, Data, M, Relay


@pytest.mark.parametrize("sender", [R1B, R2A, R2B])
def test_an_activation_on_a_changed_path_is_only_taken_from_the_node_before(
    sender: NodeId,
) -> None:
    """Whoever it is from stands in its path, and is of the stage before."""
    relay = Relay()
    relay.context.view = view_of("d0", "r1a", "r1b", "r2a", "r2b")
    changed = replace(FORWARD, path_version=1)
    assert jobs_of(relay.machine.activation(sender, changed, tensor(1))) == []
    assert relay.machine.held == {}
    assert jobs_of(relay.machine.activation(D0, changed, tensor(2))) == [Forward(M)]


def test_a_data_node_takes_what_comes_home_only_from_the_ends_of_the_path() -> None:
    """Any other of their stages could send what is false, and the path's would be blamed."""
    data = Data(num_microbatches=1)
    data.embed(data.begin(), M)
    refused = data.machine.activation(R2B, data.message(M), tensor(8))
    assert (freed(refused), jobs_of(refused)) == ([8], [])
    data.home(M)
    gradient = BackwardGradient(data.context.iteration, M, flow(0), PATH)
    refused = data.machine.gradient(R1B, gradient, tensor(9))
    assert (freed(refused), jobs_of(refused)) == ([9], [])
    accepted = data.machine.gradient(R1A, gradient, tensor(10))
    assert jobs_of(accepted) == [EmbedBackward(M)]

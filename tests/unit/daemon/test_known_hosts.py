"""What a leader tells of hosts and links, for `decod lab plan run --running`."""

from pathlib import Path
from typing import Any

import pytest

from decod.config.needs import layer_flops
from decod.config.schema import activation_size_bytes
from decod.daemon.known_hosts import describe_hosts, describe_links
from decod.errors import NotRunningError
from decod.ids import NodeId
from decod.lab.files.hosts_file import run_hosts_of
from decod.planner.cost import Link
from decod.protocol.core.link_table import LinkTable, RemoteLinks, Terms
from decod.protocol.core.messages.routing_messages import Hop
from decod.protocol.core.view import Duty, Member, Role, View
from decod.protocol.flows.routing import FlowId, KnownFlow
from decod.run.run_config import RunConfig
from tests.unit.daemon.nodes import make_node

ME, A, B, C = (NodeId(letter * 8) for letter in "mabc")
RUN = RunConfig()


class Known:
    """What of `NodeFacts` counts here."""

    def __init__(self, view: View, links: LinkTable, remote: RemoteLinks) -> None:
        self.node_id, self.own_stage, self.in_view = ME, 0, True
        self.flows: list[KnownFlow] = []
        self.view, self.links, self.remote_links = view, links, remote


def member(node_id: NodeId, stage: int, **values: Any) -> Member:
    role = Role.RELAY if stage else Role.DATA
    return Member(node_id, "h:1", role, stage, capacity=3, **values)


def facts() -> Any:
    links = LinkTable(activation_size_bytes=activation_size_bytes(RUN), compute_s=0.5)
    links.measured(A, latency_s=0.01, bandwidth_bytes_per_s=1e6)
    links.reported(A, Terms(Link(0.02, 2e6), 0.25))
    remote = RemoteLinks()
    size = activation_size_bytes(RUN)
    # Half of both passes, the typical latency, and the transfer.
    cost_s = (0.25 + 0.75) / 2 + 0.01 + size / 4e6
    remote.heard([Hop(node_id=B, compute_s=0.75, costs=(), inward=((A, cost_s),))])
    members = (
        member(ME, 0, data_node_index=0, name="home"),
        member(A, 1, name="same"),
        member(B, 2, name="same", duty=Duty.FRONTAL),
        member(C, 2),
    )
    view = View(version=1, leader=ME, term=1, num_stages=3, members=members)
    return Known(view, links, remote)


def test_what_was_measured_is_told_and_the_rest_is_counted() -> None:
    answer = describe_hosts(RUN, facts())
    hosts = {host["id"]: host for host in answer["hosts"]["hosts"]}
    assert list(hosts) == ["home", "same-aaaaaaaa", "same-bbbbbbbb", "cccccccc"]
    assert hosts["home"] == {"id": "home", "kind": "data"}
    assert [host["kind"] for host in hosts.values()][1:] == ["unreliable", "reliable", "unreliable"]
    blocks = RUN.model.num_hidden_layers / 2
    expected = blocks * layer_flops(RUN) / (2 * 0.25) / 1e12
    assert hosts["same-aaaaaaaa"]["tflops"] == pytest.approx(expected)
    assert answer["speeds_unknown"] == ["cccccccc"]
    links = {(link["from"], link["to"]): link for link in answer["hosts"]["links"]}
    assert links["home", "same-aaaaaaaa"]["bandwidth_bytes_per_s"] == 1e6
    assert links["same-aaaaaaaa", "home"]["latency_s"] == 0.02
    between = links["same-aaaaaaaa", "same-bbbbbbbb"]
    assert between["bandwidth_bytes_per_s"] == pytest.approx(4e6)
    assert (answer["num_links"], answer["num_links_measured"]) == (12, len(links)) == (12, 3)
    assert answer["hosts"]["work"]["head_s"] == 2 * 0.5


def test_the_answer_is_a_file_of_hosts(tmp_path: Path) -> None:
    problem = run_hosts_of(tmp_path, describe_hosts(RUN, facts())["hosts"], RUN)
    assert len(problem.hosts) == 4
    speeds = [host.speed_layers_per_s for host in problem.hosts[1:]]
    blocks = RUN.model.num_hidden_layers / 2
    assert speeds[:2] == pytest.approx([blocks / 0.5, blocks / 1.5])


async def test_nothing_is_told_before_anything_was_measured(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        with pytest.raises(NotRunningError) as caught:
            await node.answer({"command": "plan"})
        assert caught.value.code == "E-RUN-047"


def test_links_in_use_are_told_once_with_their_flows_and_speed() -> None:
    known = facts()
    for slot in (0, 1):
        known.flows.append(KnownFlow(FlowId(ME, slot), (ME, A, B, ME), (0.1, 0.2, 0.3)))
    known.flows.append(KnownFlow(FlowId(ME, 2), (ME, A, C, ME), (0.1, 0.4, 0.5)))
    links = {(link["from"], link["to"]): link for link in describe_links(RUN, known)}
    assert {hop: link["num_flows"] for hop, link in links.items()} == {
        (ME, A): 3,
        (A, B): 2,
        (B, ME): 2,
        (A, C): 1,
        (C, ME): 1,
    }
    assert links[ME, A]["bandwidth_bytes_per_s"] == 1e6
    assert links[A, B]["cost_s"] == 0.2
    # Nobody has measured these.
    assert links[A, C]["latency_s"] is links[C, ME]["bandwidth_bytes_per_s"] is None


def test_a_nodes_own_links_are_told_even_if_no_flow_takes_them() -> None:
    (link,) = describe_links(RUN, facts())
    assert (link["from"], link["to"], link["num_flows"], link["cost_s"]) == (ME, A, 0, None)

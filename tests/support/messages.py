"""One message of every kind, for tests of the code that carries them."""

from decod.ids import AveragingId, FlowId, Iteration, MicrobatchId, NodeId
from decod.limits import PROOF_BYTES
from decod.protocol.core import messages as m
from decod.protocol.core.durations import IterationTimes
from decod.protocol.core.fingerprints import SKETCH_BYTES
from decod.protocol.core.messages import decision_messages as em
from decod.protocol.core.messages import routing_messages as gwtf
from decod.protocol.core.messages import routing_messages as routing
from decod.protocol.core.messages import server_messages as servers
from decod.protocol.core.messages.audit_messages import AuditCase, AuditedWork, Finding
from decod.protocol.core.messages.membership_messages import Average, Follow, Followed
from decod.protocol.core.messages.scopes import Passed
from decod.protocol.core.residual import Walk
from decod.protocol.core.view import Member, Opening, Role, View
from tests.support.round_messages import round_messages
from tests.support.servers_messages import servers_messages

ALICE, BOB = NodeId("a" * 52), NodeId("b" * 52)
ITERATION = Iteration(1, 1)
SKETCH, PROOF = bytes(SKETCH_BYTES), bytes(PROOF_BYTES)
MICROBATCH = MicrobatchId(1, 0, 0)
FLOW = FlowId(ALICE, 0)
_LOAD = m.NodeLoad(ALICE, 1, 1, 1, "busy", times=IterationTimes(1.0, 2.0, 0.5), device="CPU")


def _draft_messages() -> list[m.Message]:
    """Return one message of every kind about drafts."""
    places = ((ALICE, True), (BOB, False))
    hops = (routing.Hop(BOB, ((ALICE, 0.5),)),)
    return [
        routing.DraftOffer(1, 1, 2, 0.5),
        routing.RequestUnits(1, 1, 2),
        routing.UnitsAnswer(1, 1, 2),
        routing.DraftUnits(1, outward=True, link_version=1, units=2, agreed=False),
        routing.ResidualWalk(1, 1, exit=False, walk=Walk(places, (0.0, -0.5), 2)),
        routing.RequestChange(1, 1, places, True, 2),
        routing.ChangeAnswer(1, 1, 2, -0.5),
        routing.ChangeDecision(1, 1, 2),
        routing.Claim(1, 1, FLOW, hops),
        routing.Claimed(1, 1, FLOW, hops),
        routing.Claims(1, 1, 2, ((BOB, 0.5),), (hops, hops)),
        routing.Settle(1, 1),
        routing.Routes(1, 1, (routing.SettledFlow((BOB,), (0.1, 0.2)),)),
        routing.Install(1, 1, FLOW, (BOB,)),
        routing.Installed(1, 1),
    ]


def _gwtf_messages() -> list[m.Message]:
    """Return one message of every kind of GWTF's own search."""
    following, use = gwtf.NextHop(BOB, 1), gwtf.LinkUse(0.5, 1)
    flow = gwtf.PeerFlow(1, 1, ALICE, ALICE, 0.5, following, open=True)
    return [
        gwtf.PeerQuery(1),
        gwtf.PeerFlows(1, (flow,), ((BOB, 0.5),)),
        gwtf.ExchangeHops(1, 1, ALICE, 1, following, BOB, 1, 1, following, use, use),
        gwtf.RequestRedirect(1, 1, ALICE, 1, BOB, 1, 1, ALICE, following, (use, use)),
        gwtf.HopsAnswer(1, 1, agreed=True),
        gwtf.HopsDecision(1, 1, made=True),
    ]


def _audit_messages() -> list[m.Message]:
    averaging = AveragingId(ITERATION, 1)
    findings = (Finding(AuditedWork.MEAN, 0.5), Finding(AuditedWork.PASSES, 2.0, (BOB,)))
    return [
        m.StandOut(averaging, (ALICE, BOB)),
        m.Audit(averaging, (AuditCase(ALICE, (BOB,)),)),
        m.AuditedTensor(averaging, ALICE, 1, MICROBATCH, True, PROOF),
        m.Unusable(ITERATION, MICROBATCH, True, PROOF),
        m.AuditedPart(averaging, ALICE, 1, 0, 1, 1, SKETCH),
        m.AuditedShares(averaging, ALICE, 1, ((ALICE, b""), (BOB, SKETCH))),
        m.AuditedPass(averaging, ALICE, 1, MICROBATCH, findings, True, (SKETCH, b"")),
        m.AuditResult(averaging, ALICE, 1, 4, "", findings),
    ]


def control_messages() -> list[m.Message]:
    """Return one message of every kind without a tensor."""
    member = Member(ALICE, "h:1", Role.DATA, 0, 1, 0)
    view = View.of([member], version=1, leader=ALICE, term=1, num_stages=2)
    opening = Opening(ITERATION, ITERATION, view)
    found: list[m.Message] = [
        m.Join("h:1", Role.RELAY, 1, None, "0" * 64, 5, "brave-otter"),
        m.Assign(1, -1, "it lacks nodes", begun=True),
        m.Refuse("full", again_s=2.0),
        m.Refuse("the run is over", over=True),
        m.Prepared(1, "0" * 64),
        Follow(1, 1, "h:1"),
        Followed(1, 1, ITERATION, "busy"),
        m.Heartbeat(ITERATION, 1, 2),
        m.Bans(1, b"signed"),
        m.Suspect(BOB, "silent"),
        Passed(3, arrived=False),
        m.Ping(1),
        m.Pong(1),
        m.Leave("bye", at_once=True),
        m.Capacity(1, 0),
        m.CapacityAnswer(1, "it would stop"),
        m.CatchUp(ITERATION),
        m.LinkReport(1, 0.05, 1e7, 0.5, ((ALICE, 1e6), (BOB, 1e7))),
        m.FlowCost(1, ALICE, float("inf"), 0, 0.5),
        m.RequestFlow(1, 1, ALICE, 0.5),
        m.FlowAnswer(1, 1, FLOW, 0.5, 1),
        m.Withdraw(1, 1),
        m.Complete(ITERATION, MICROBATCH, 0.1),
        m.Deny(ITERATION, MICROBATCH, FLOW, "no"),
        m.Report(ITERATION, 1, 1, 1, 1.0, 1, 1),
        m.BeginAggregation(AveragingId(ITERATION, 1), 1, 1),
        m.ReducePart(AveragingId(ITERATION, 1), 0, 0, 0),
        m.ReducedPart(AveragingId(ITERATION, 1), 0, 0.5),
        m.GradientSquares(AveragingId(ITERATION, 1), ((0, 0.5), (1, 0.0))),
        m.GradientNorm(AveragingId(ITERATION, 1), 0.5),
        m.Ready(
            AveragingId(ITERATION, 1), ((1, "0" * 64),), votes=((ALICE, "0" * 64), (BOB, "1" * 64))
        ),
        *_audit_messages(),
        m.Differs(4, (ALICE, BOB)),
        m.Open(ITERATION, m.Outcome.COMMITTED, opening, loss=1.0, num_tokens=1),
        m.Open(ITERATION, m.Outcome.REPEATED, opening, "lost", ((1, "0" * 64),)),
        m.Mend(ITERATION, view, "lost"),
        m.Reroute(ITERATION, MICROBATCH, FLOW, (BOB,), 2, (BOB,)),
        m.Mended(ITERATION, MICROBATCH),
        m.CanTake(ITERATION),
        m.UtilisationQuery(1, ITERATION),
        m.UtilisationAnswer(
            1,
            ITERATION,
            (m.NodeLoad(ALICE, 1, 1, 1, "busy", times=IterationTimes(1, 2, 0.5), device="CPU"),),
        ),
        em.Canvass(1, ITERATION, 1),
        em.CanvassAnswer(1, ITERATION, 1, silent=True),
        em.Candidacy(2, 1, ITERATION, 1),
        em.Vote(2, True, 1, ITERATION, 1, ((1, "0" * 64),), confirmed_term=2),
        em.Confirm(2, 1, ITERATION, 1),
        em.LeaderIs(2, ALICE, "h:1"),
        *_draft_messages(),
        *_gwtf_messages(),
        *servers_messages(ITERATION, ALICE),
        *round_messages(AveragingId(ITERATION, 1), ALICE, BOB),
    ]
    tensor_only = {m.ForwardActivation, m.BackwardGradient, Average, m.LinkProbe}
    tensor_only |= {servers.StageActivation, servers.StageGradient}
    assert {type(message) for message in found} == set(m.MESSAGES) - tensor_only
    return found

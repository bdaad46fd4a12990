from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_DATA: _ClassVar[Role]
    ROLE_RELAY: _ClassVar[Role]
    ROLE_CLIENT: _ClassVar[Role]

class Duty(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DUTY_UNSPECIFIED: _ClassVar[Duty]
    DUTY_NONE: _ClassVar[Duty]
    DUTY_FRONTAL: _ClassVar[Duty]
    DUTY_BACKWARD: _ClassVar[Duty]

class Reach(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REACH_UNSPECIFIED: _ClassVar[Reach]
    REACH_DIALLED: _ClassVar[Reach]
    REACH_PASSES_ON: _ClassVar[Reach]
    REACH_OUTBOUND: _ClassVar[Reach]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_BEGUN: _ClassVar[Outcome]
    OUTCOME_COMMITTED: _ClassVar[Outcome]
    OUTCOME_REPEATED: _ClassVar[Outcome]
    OUTCOME_ROLLED_BACK: _ClassVar[Outcome]
    OUTCOME_ENDED: _ClassVar[Outcome]

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_ONWARD: _ClassVar[Leg]
    LEG_TASK: _ClassVar[Leg]
    LEG_RESULT: _ClassVar[Leg]

class AuditedWork(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUDITED_WORK_UNSPECIFIED: _ClassVar[AuditedWork]
    AUDITED_WORK_PASSES: _ClassVar[AuditedWork]
    AUDITED_WORK_CONTRIBUTION: _ClassVar[AuditedWork]
    AUDITED_WORK_MEAN: _ClassVar[AuditedWork]
    AUDITED_WORK_WORD: _ClassVar[AuditedWork]
    AUDITED_WORK_SILENCE: _ClassVar[AuditedWork]
    AUDITED_WORK_GIFT: _ClassVar[AuditedWork]

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_KEPT: _ClassVar[Source]
    SOURCE_CHECKPOINT: _ClassVar[Source]
    SOURCE_START: _ClassVar[Source]
    SOURCE_NEIGHBOURS: _ClassVar[Source]
ROLE_UNSPECIFIED: Role
ROLE_DATA: Role
ROLE_RELAY: Role
ROLE_CLIENT: Role
DUTY_UNSPECIFIED: Duty
DUTY_NONE: Duty
DUTY_FRONTAL: Duty
DUTY_BACKWARD: Duty
REACH_UNSPECIFIED: Reach
REACH_DIALLED: Reach
REACH_PASSES_ON: Reach
REACH_OUTBOUND: Reach
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_BEGUN: Outcome
OUTCOME_COMMITTED: Outcome
OUTCOME_REPEATED: Outcome
OUTCOME_ROLLED_BACK: Outcome
OUTCOME_ENDED: Outcome
LEG_UNSPECIFIED: Leg
LEG_ONWARD: Leg
LEG_TASK: Leg
LEG_RESULT: Leg
AUDITED_WORK_UNSPECIFIED: AuditedWork
AUDITED_WORK_PASSES: AuditedWork
AUDITED_WORK_CONTRIBUTION: AuditedWork
AUDITED_WORK_MEAN: AuditedWork
AUDITED_WORK_WORD: AuditedWork
AUDITED_WORK_SILENCE: AuditedWork
AUDITED_WORK_GIFT: AuditedWork
SOURCE_UNSPECIFIED: Source
SOURCE_KEPT: Source
SOURCE_CHECKPOINT: Source
SOURCE_START: Source
SOURCE_NEIGHBOURS: Source

class DeliverRequest(_message.Message):
    __slots__ = ("envelopes",)
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    envelopes: _containers.RepeatedCompositeFieldContainer[Envelope]
    def __init__(self, envelopes: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ...) -> None: ...

class DeliverResponse(_message.Message):
    __slots__ = ("num_dropped",)
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_dropped: int
    def __init__(self, num_dropped: _Optional[int] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("run_id", "sender_id", "term", "sequence", "goal_id", "origin_id", "ticket", "proof", "join", "assign", "refuse", "prepared", "heartbeat", "bans", "suspect", "ping", "pong", "leave", "capacity", "capacity_answer", "catch_up", "follow", "followed", "average", "link_report", "link_probe", "flow_cost", "request_flow", "flow_answer", "withdraw", "draft_offer", "request_units", "units_answer", "draft_units", "residual_walk", "request_change", "change_answer", "change_decision", "settle", "claim", "claimed", "claims", "routes", "install", "installed", "peer_query", "peer_flows", "exchange_hops", "request_redirect", "hops_answer", "hops_decision", "forward_activation", "backward_gradient", "unusable", "complete", "deny", "reroute", "mended", "can_take", "report", "begin_aggregation", "reduce_part", "reduced_part", "gradient_squares", "gradient_norm", "ready", "differs", "audit", "stand_out", "audited_tensor", "audited_part", "audited_shares", "audited_pass", "audit_result", "open", "mend", "utilisation_query", "utilisation_answer", "canvass", "canvass_answer", "candidacy", "vote", "confirm", "leader_is", "passed", "stage_activation", "stage_gradient", "offer", "given", "taken", "fetch", "folded", "revoke", "unable", "missing", "holding", "settled", "greeting", "roll", "standing", "progress", "close_round", "round_closed", "begin_round", "round_ready", "commit_round", "farewell")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GOAL_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    LINK_REPORT_FIELD_NUMBER: _ClassVar[int]
    LINK_PROBE_FIELD_NUMBER: _ClassVar[int]
    FLOW_COST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FLOW_FIELD_NUMBER: _ClassVar[int]
    FLOW_ANSWER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    DRAFT_OFFER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_UNITS_FIELD_NUMBER: _ClassVar[int]
    UNITS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_UNITS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_WALK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHANGE_DECISION_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    PEER_QUERY_FIELD_NUMBER: _ClassVar[int]
    PEER_FLOWS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_HOPS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_REDIRECT_FIELD_NUMBER: _ClassVar[int]
    HOPS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    HOPS_DECISION_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    DENY_FIELD_NUMBER: _ClassVar[int]
    REROUTE_FIELD_NUMBER: _ClassVar[int]
    MENDED_FIELD_NUMBER: _ClassVar[int]
    CAN_TAKE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    REDUCE_PART_FIELD_NUMBER: _ClassVar[int]
    REDUCED_PART_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SQUARES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    STAND_OUT_FIELD_NUMBER: _ClassVar[int]
    AUDITED_TENSOR_FIELD_NUMBER: _ClassVar[int]
    AUDITED_PART_FIELD_NUMBER: _ClassVar[int]
    AUDITED_SHARES_FIELD_NUMBER: _ClassVar[int]
    AUDITED_PASS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_RESULT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MEND_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_QUERY_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CANVASS_FIELD_NUMBER: _ClassVar[int]
    CANVASS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CANDIDACY_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    LEADER_IS_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    STAGE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    FOLDED_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    UNABLE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    GREETING_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_CLOSED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_READY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ROUND_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    term: int
    sequence: int
    goal_id: str
    origin_id: str
    ticket: int
    proof: bytes
    join: Join
    assign: Assign
    refuse: Refuse
    prepared: Prepared
    heartbeat: Heartbeat
    bans: Bans
    suspect: Suspect
    ping: Ping
    pong: Pong
    leave: Leave
    capacity: Capacity
    capacity_answer: CapacityAnswer
    catch_up: CatchUp
    follow: Follow
    followed: Followed
    average: Average
    link_report: LinkReport
    link_probe: LinkProbe
    flow_cost: FlowCost
    request_flow: RequestFlow
    flow_answer: FlowAnswer
    withdraw: Withdraw
    draft_offer: DraftOffer
    request_units: RequestUnits
    units_answer: UnitsAnswer
    draft_units: DraftUnits
    residual_walk: ResidualWalk
    request_change: RequestChange
    change_answer: ChangeAnswer
    change_decision: ChangeDecision
    settle: Settle
    claim: Claim
    claimed: Claimed
    claims: Claims
    routes: Routes
    install: Install
    installed: Installed
    peer_query: PeerQuery
    peer_flows: PeerFlows
    exchange_hops: ExchangeHops
    request_redirect: RequestRedirect
    hops_answer: HopsAnswer
    hops_decision: HopsDecision
    forward_activation: ForwardActivation
    backward_gradient: BackwardGradient
    unusable: Unusable
    complete: Complete
    deny: Deny
    reroute: Reroute
    mended: Mended
    can_take: CanTake
    report: Report
    begin_aggregation: BeginAggregation
    reduce_part: ReducePart
    reduced_part: ReducedPart
    gradient_squares: GradientSquares
    gradient_norm: GradientNorm
    ready: Ready
    differs: Differs
    audit: Audit
    stand_out: StandOut
    audited_tensor: AuditedTensor
    audited_part: AuditedPart
    audited_shares: AuditedShares
    audited_pass: AuditedPass
    audit_result: AuditResult
    open: Open
    mend: Mend
    utilisation_query: UtilisationQuery
    utilisation_answer: UtilisationAnswer
    canvass: Canvass
    canvass_answer: CanvassAnswer
    candidacy: Candidacy
    vote: Vote
    confirm: Confirm
    leader_is: LeaderIs
    passed: Passed
    stage_activation: StageActivation
    stage_gradient: StageGradient
    offer: Offer
    given: Given
    taken: Taken
    fetch: Fetch
    folded: Folded
    revoke: Revoke
    unable: Unable
    missing: Missing
    holding: Holding
    settled: Settled
    greeting: Greeting
    roll: Roll
    standing: Standing
    progress: Progress
    close_round: CloseRound
    round_closed: RoundClosed
    begin_round: BeginRound
    round_ready: RoundReady
    commit_round: CommitRound
    farewell: Farewell
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., term: _Optional[int] = ..., sequence: _Optional[int] = ..., goal_id: _Optional[str] = ..., origin_id: _Optional[str] = ..., ticket: _Optional[int] = ..., proof: _Optional[bytes] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., bans: _Optional[_Union[Bans, _Mapping]] = ..., suspect: _Optional[_Union[Suspect, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., capacity_answer: _Optional[_Union[CapacityAnswer, _Mapping]] = ..., catch_up: _Optional[_Union[CatchUp, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., followed: _Optional[_Union[Followed, _Mapping]] = ..., average: _Optional[_Union[Average, _Mapping]] = ..., link_report: _Optional[_Union[LinkReport, _Mapping]] = ..., link_probe: _Optional[_Union[LinkProbe, _Mapping]] = ..., flow_cost: _Optional[_Union[FlowCost, _Mapping]] = ..., request_flow: _Optional[_Union[RequestFlow, _Mapping]] = ..., flow_answer: _Optional[_Union[FlowAnswer, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., draft_offer: _Optional[_Union[DraftOffer, _Mapping]] = ..., request_units: _Optional[_Union[RequestUnits, _Mapping]] = ..., units_answer: _Optional[_Union[UnitsAnswer, _Mapping]] = ..., draft_units: _Optional[_Union[DraftUnits, _Mapping]] = ..., residual_walk: _Optional[_Union[ResidualWalk, _Mapping]] = ..., request_change: _Optional[_Union[RequestChange, _Mapping]] = ..., change_answer: _Optional[_Union[ChangeAnswer, _Mapping]] = ..., change_decision: _Optional[_Union[ChangeDecision, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., claimed: _Optional[_Union[Claimed, _Mapping]] = ..., claims: _Optional[_Union[Claims, _Mapping]] = ..., routes: _Optional[_Union[Routes, _Mapping]] = ..., install: _Optional[_Union[Install, _Mapping]] = ..., installed: _Optional[_Union[Installed, _Mapping]] = ..., peer_query: _Optional[_Union[PeerQuery, _Mapping]] = ..., peer_flows: _Optional[_Union[PeerFlows, _Mapping]] = ..., exchange_hops: _Optional[_Union[ExchangeHops, _Mapping]] = ..., request_redirect: _Optional[_Union[RequestRedirect, _Mapping]] = ..., hops_answer: _Optional[_Union[HopsAnswer, _Mapping]] = ..., hops_decision: _Optional[_Union[HopsDecision, _Mapping]] = ..., forward_activation: _Optional[_Union[ForwardActivation, _Mapping]] = ..., backward_gradient: _Optional[_Union[BackwardGradient, _Mapping]] = ..., unusable: _Optional[_Union[Unusable, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., deny: _Optional[_Union[Deny, _Mapping]] = ..., reroute: _Optional[_Union[Reroute, _Mapping]] = ..., mended: _Optional[_Union[Mended, _Mapping]] = ..., can_take: _Optional[_Union[CanTake, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., begin_aggregation: _Optional[_Union[BeginAggregation, _Mapping]] = ..., reduce_part: _Optional[_Union[ReducePart, _Mapping]] = ..., reduced_part: _Optional[_Union[ReducedPart, _Mapping]] = ..., gradient_squares: _Optional[_Union[GradientSquares, _Mapping]] = ..., gradient_norm: _Optional[_Union[GradientNorm, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., differs: _Optional[_Union[Differs, _Mapping]] = ..., audit: _Optional[_Union[Audit, _Mapping]] = ..., stand_out: _Optional[_Union[StandOut, _Mapping]] = ..., audited_tensor: _Optional[_Union[AuditedTensor, _Mapping]] = ..., audited_part: _Optional[_Union[AuditedPart, _Mapping]] = ..., audited_shares: _Optional[_Union[AuditedShares, _Mapping]] = ..., audited_pass: _Optional[_Union[AuditedPass, _Mapping]] = ..., audit_result: _Optional[_Union[AuditResult, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., mend: _Optional[_Union[Mend, _Mapping]] = ..., utilisation_query: _Optional[_Union[UtilisationQuery, _Mapping]] = ..., utilisation_answer: _Optional[_Union[UtilisationAnswer, _Mapping]] = ..., canvass: _Optional[_Union[Canvass, _Mapping]] = ..., canvass_answer: _Optional[_Union[CanvassAnswer, _Mapping]] = ..., candidacy: _Optional[_Union[Candidacy, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., leader_is: _Optional[_Union[LeaderIs, _Mapping]] = ..., passed: _Optional[_Union[Passed, _Mapping]] = ..., stage_activation: _Optional[_Union[StageActivation, _Mapping]] = ..., stage_gradient: _Optional[_Union[StageGradient, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., given: _Optional[_Union[Given, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., folded: _Optional[_Union[Folded, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., unable: _Optional[_Union[Unable, _Mapping]] = ..., missing: _Optional[_Union[Missing, _Mapping]] = ..., holding: _Optional[_Union[Holding, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., greeting: _Optional[_Union[Greeting, _Mapping]] = ..., roll: _Optional[_Union[Roll, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., close_round: _Optional[_Union[CloseRound, _Mapping]] = ..., round_closed: _Optional[_Union[RoundClosed, _Mapping]] = ..., begin_round: _Optional[_Union[BeginRound, _Mapping]] = ..., round_ready: _Optional[_Union[RoundReady, _Mapping]] = ..., commit_round: _Optional[_Union[CommitRound, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("address", "role", "capacity", "stage_index", "manifest_sha256", "incarnation", "name", "kept", "duty", "reach")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    DUTY_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    address: str
    role: Role
    capacity: int
    stage_index: int
    manifest_sha256: str
    incarnation: int
    name: str
    kept: _containers.RepeatedCompositeFieldContainer[Kept]
    duty: Duty
    reach: Reach
    def __init__(self, address: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., capacity: _Optional[int] = ..., stage_index: _Optional[int] = ..., manifest_sha256: _Optional[str] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., kept: _Optional[_Iterable[_Union[Kept, _Mapping]]] = ..., duty: _Optional[_Union[Duty, str]] = ..., reach: _Optional[_Union[Reach, str]] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("stage_index", "data_node_index", "reason", "begun", "donors", "view_term", "view_version", "cut")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    VIEW_TERM_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    data_node_index: int
    reason: str
    begun: bool
    donors: _containers.RepeatedCompositeFieldContainer[Member]
    view_term: int
    view_version: int
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage_index: _Optional[int] = ..., data_node_index: _Optional[int] = ..., reason: _Optional[str] = ..., begun: _Optional[bool] = ..., donors: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., view_term: _Optional[int] = ..., view_version: _Optional[int] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("reason", "again_s", "over")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_S_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    again_s: float
    over: bool
    def __init__(self, reason: _Optional[str] = ..., again_s: _Optional[float] = ..., over: _Optional[bool] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("stage_index", "parameter_hash", "state_at", "cut")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_HASH_FIELD_NUMBER: _ClassVar[int]
    STATE_AT_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    parameter_hash: str
    state_at: Iteration
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage_index: _Optional[int] = ..., parameter_hash: _Optional[str] = ..., state_at: _Optional[_Union[Iteration, _Mapping]] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("iteration", "bans", "view_version")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    bans: int
    view_version: int
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., bans: _Optional[int] = ..., view_version: _Optional[int] = ...) -> None: ...

class Bans(_message.Message):
    __slots__ = ("version", "statement")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    version: int
    statement: bytes
    def __init__(self, version: _Optional[int] = ..., statement: _Optional[bytes] = ...) -> None: ...

class Suspect(_message.Message):
    __slots__ = ("node_id", "reason", "slack")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SLACK_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    reason: str
    slack: float
    def __init__(self, node_id: _Optional[str] = ..., reason: _Optional[str] = ..., slack: _Optional[float] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "at_once")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    at_once: bool
    def __init__(self, reason: _Optional[str] = ..., at_once: _Optional[bool] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("request_id", "capacity")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    capacity: int
    def __init__(self, request_id: _Optional[int] = ..., capacity: _Optional[int] = ...) -> None: ...

class CapacityAnswer(_message.Message):
    __slots__ = ("request_id", "refusal")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    refusal: str
    def __init__(self, request_id: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class CatchUp(_message.Message):
    __slots__ = ("iteration", "view_hash")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_HASH_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    view_hash: str
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view_hash: _Optional[str] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("request_id", "stage_index", "address", "reach")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    stage_index: int
    address: str
    reach: Reach
    def __init__(self, request_id: _Optional[int] = ..., stage_index: _Optional[int] = ..., address: _Optional[str] = ..., reach: _Optional[_Union[Reach, str]] = ...) -> None: ...

class Followed(_message.Message):
    __slots__ = ("request_id", "stage_index", "committed", "refusal")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    stage_index: int
    committed: Iteration
    refusal: str
    def __init__(self, request_id: _Optional[int] = ..., stage_index: _Optional[int] = ..., committed: _Optional[_Union[Iteration, _Mapping]] = ..., refusal: _Optional[str] = ...) -> None: ...

class Average(_message.Message):
    __slots__ = ("averaging", "part", "num_parts", "num_microbatches", "base_hash", "gradient_norm", "num_local", "num_ahead", "spec", "ahead_spec", "num_targets")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    AHEAD_SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    part: int
    num_parts: int
    num_microbatches: int
    base_hash: str
    gradient_norm: float
    num_local: int
    num_ahead: int
    spec: AverageSpec
    ahead_spec: AverageSpec
    num_targets: int
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., part: _Optional[int] = ..., num_parts: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., base_hash: _Optional[str] = ..., gradient_norm: _Optional[float] = ..., num_local: _Optional[int] = ..., num_ahead: _Optional[int] = ..., spec: _Optional[_Union[AverageSpec, _Mapping]] = ..., ahead_spec: _Optional[_Union[AverageSpec, _Mapping]] = ..., num_targets: _Optional[int] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("view_version", "latency_s", "bandwidth_bytes_per_s", "compute_s", "byways")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    BYWAYS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    latency_s: float
    bandwidth_bytes_per_s: float
    compute_s: float
    byways: _containers.RepeatedCompositeFieldContainer[Byway]
    def __init__(self, view_version: _Optional[int] = ..., latency_s: _Optional[float] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., byways: _Optional[_Iterable[_Union[Byway, _Mapping]]] = ...) -> None: ...

class LinkProbe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlowCost(_message.Message):
    __slots__ = ("view_version", "data_node", "cost_s", "num_unpaired", "compute_s")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPAIRED_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    data_node: str
    cost_s: float
    num_unpaired: int
    compute_s: float
    def __init__(self, view_version: _Optional[int] = ..., data_node: _Optional[str] = ..., cost_s: _Optional[float] = ..., num_unpaired: _Optional[int] = ..., compute_s: _Optional[float] = ...) -> None: ...

class RequestFlow(_message.Message):
    __slots__ = ("view_version", "request_id", "data_node", "cost_s")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    request_id: int
    data_node: str
    cost_s: float
    def __init__(self, view_version: _Optional[int] = ..., request_id: _Optional[int] = ..., data_node: _Optional[str] = ..., cost_s: _Optional[float] = ...) -> None: ...

class FlowAnswer(_message.Message):
    __slots__ = ("view_version", "request_id", "flow_id", "cost_s", "num_unpaired", "path")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPAIRED_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    request_id: int
    flow_id: FlowId
    cost_s: float
    num_unpaired: int
    path: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, view_version: _Optional[int] = ..., request_id: _Optional[int] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., cost_s: _Optional[float] = ..., num_unpaired: _Optional[int] = ..., path: _Optional[_Iterable[str]] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("view_version", "request_id")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    request_id: int
    def __init__(self, view_version: _Optional[int] = ..., request_id: _Optional[int] = ...) -> None: ...

class DraftOffer(_message.Message):
    __slots__ = ("view_version", "sequence", "units", "cost")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    sequence: int
    units: int
    cost: float
    def __init__(self, view_version: _Optional[int] = ..., sequence: _Optional[int] = ..., units: _Optional[int] = ..., cost: _Optional[float] = ...) -> None: ...

class RequestUnits(_message.Message):
    __slots__ = ("view_version", "request_id", "units")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    request_id: int
    units: int
    def __init__(self, view_version: _Optional[int] = ..., request_id: _Optional[int] = ..., units: _Optional[int] = ...) -> None: ...

class UnitsAnswer(_message.Message):
    __slots__ = ("view_version", "request_id", "units")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    request_id: int
    units: int
    def __init__(self, view_version: _Optional[int] = ..., request_id: _Optional[int] = ..., units: _Optional[int] = ...) -> None: ...

class DraftUnits(_message.Message):
    __slots__ = ("view_version", "outward", "link_version", "units", "agreed")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTWARD_FIELD_NUMBER: _ClassVar[int]
    LINK_VERSION_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    outward: bool
    link_version: int
    units: int
    agreed: bool
    def __init__(self, view_version: _Optional[int] = ..., outward: _Optional[bool] = ..., link_version: _Optional[int] = ..., units: _Optional[int] = ..., agreed: _Optional[bool] = ...) -> None: ...

class ResidualWalk(_message.Message):
    __slots__ = ("view_version", "sequence", "exit", "walk")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    WALK_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    sequence: int
    exit: bool
    walk: WalkSteps
    def __init__(self, view_version: _Optional[int] = ..., sequence: _Optional[int] = ..., exit: _Optional[bool] = ..., walk: _Optional[_Union[WalkSteps, _Mapping]] = ...) -> None: ...

class RequestChange(_message.Message):
    __slots__ = ("view_version", "change_id", "places", "is_closed", "units")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    IS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    change_id: int
    places: _containers.RepeatedCompositeFieldContainer[WalkPlace]
    is_closed: bool
    units: int
    def __init__(self, view_version: _Optional[int] = ..., change_id: _Optional[int] = ..., places: _Optional[_Iterable[_Union[WalkPlace, _Mapping]]] = ..., is_closed: _Optional[bool] = ..., units: _Optional[int] = ...) -> None: ...

class ChangeAnswer(_message.Message):
    __slots__ = ("view_version", "change_id", "units", "cost")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    change_id: int
    units: int
    cost: float
    def __init__(self, view_version: _Optional[int] = ..., change_id: _Optional[int] = ..., units: _Optional[int] = ..., cost: _Optional[float] = ...) -> None: ...

class ChangeDecision(_message.Message):
    __slots__ = ("view_version", "change_id", "units")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    change_id: int
    units: int
    def __init__(self, view_version: _Optional[int] = ..., change_id: _Optional[int] = ..., units: _Optional[int] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("view_version", "epoch")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("view_version", "epoch", "flow_id", "hops")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    flow_id: FlowId
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("view_version", "epoch", "flow_id", "hops")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    flow_id: FlowId
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ...) -> None: ...

class Claims(_message.Message):
    __slots__ = ("view_version", "epoch", "capacity", "costs", "claims", "inward", "compute_s")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    INWARD_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    capacity: int
    costs: _containers.RepeatedCompositeFieldContainer[LinkCost]
    claims: ClaimTable
    inward: _containers.RepeatedCompositeFieldContainer[LinkCost]
    compute_s: float
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ..., capacity: _Optional[int] = ..., costs: _Optional[_Iterable[_Union[LinkCost, _Mapping]]] = ..., claims: _Optional[_Union[ClaimTable, _Mapping]] = ..., inward: _Optional[_Iterable[_Union[LinkCost, _Mapping]]] = ..., compute_s: _Optional[float] = ...) -> None: ...

class Routes(_message.Message):
    __slots__ = ("view_version", "epoch", "routes")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    routes: _containers.RepeatedCompositeFieldContainer[SettledFlow]
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ..., routes: _Optional[_Iterable[_Union[SettledFlow, _Mapping]]] = ...) -> None: ...

class Install(_message.Message):
    __slots__ = ("view_version", "epoch", "flow_id", "path")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    flow_id: FlowId
    path: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., path: _Optional[_Iterable[str]] = ...) -> None: ...

class Installed(_message.Message):
    __slots__ = ("view_version", "epoch")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    epoch: int
    def __init__(self, view_version: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class PeerQuery(_message.Message):
    __slots__ = ("view_version",)
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    def __init__(self, view_version: _Optional[int] = ...) -> None: ...

class PeerFlows(_message.Message):
    __slots__ = ("view_version", "flows", "costs")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    flows: _containers.RepeatedCompositeFieldContainer[PeerFlow]
    costs: _containers.RepeatedCompositeFieldContainer[LinkCost]
    def __init__(self, view_version: _Optional[int] = ..., flows: _Optional[_Iterable[_Union[PeerFlow, _Mapping]]] = ..., costs: _Optional[_Iterable[_Union[LinkCost, _Mapping]]] = ...) -> None: ...

class ExchangeHops(_message.Message):
    __slots__ = ("view_version", "change_id", "data_node", "number", "next", "other", "other_number", "other_version", "other_next", "less", "more")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    OTHER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    OTHER_VERSION_FIELD_NUMBER: _ClassVar[int]
    OTHER_NEXT_FIELD_NUMBER: _ClassVar[int]
    LESS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    change_id: int
    data_node: str
    number: int
    next: NextHop
    other: str
    other_number: int
    other_version: int
    other_next: NextHop
    less: LinkUse
    more: LinkUse
    def __init__(self, view_version: _Optional[int] = ..., change_id: _Optional[int] = ..., data_node: _Optional[str] = ..., number: _Optional[int] = ..., next: _Optional[_Union[NextHop, _Mapping]] = ..., other: _Optional[str] = ..., other_number: _Optional[int] = ..., other_version: _Optional[int] = ..., other_next: _Optional[_Union[NextHop, _Mapping]] = ..., less: _Optional[_Union[LinkUse, _Mapping]] = ..., more: _Optional[_Union[LinkUse, _Mapping]] = ...) -> None: ...

class RequestRedirect(_message.Message):
    __slots__ = ("view_version", "change_id", "data_node", "number", "other", "other_number", "other_version", "upstream", "next", "more")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    OTHER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    OTHER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    change_id: int
    data_node: str
    number: int
    other: str
    other_number: int
    other_version: int
    upstream: str
    next: NextHop
    more: _containers.RepeatedCompositeFieldContainer[LinkUse]
    def __init__(self, view_version: _Optional[int] = ..., change_id: _Optional[int] = ..., data_node: _Optional[str] = ..., number: _Optional[int] = ..., other: _Optional[str] = ..., other_number: _Optional[int] = ..., other_version: _Optional[int] = ..., upstream: _Optional[str] = ..., next: _Optional[_Union[NextHop, _Mapping]] = ..., more: _Optional[_Iterable[_Union[LinkUse, _Mapping]]] = ...) -> None: ...

class HopsAnswer(_message.Message):
    __slots__ = ("view_version", "change_id", "agreed")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    change_id: int
    agreed: bool
    def __init__(self, view_version: _Optional[int] = ..., change_id: _Optional[int] = ..., agreed: _Optional[bool] = ...) -> None: ...

class HopsDecision(_message.Message):
    __slots__ = ("view_version", "change_id", "made")
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    view_version: int
    change_id: int
    made: bool
    def __init__(self, view_version: _Optional[int] = ..., change_id: _Optional[int] = ..., made: _Optional[bool] = ...) -> None: ...

class ForwardActivation(_message.Message):
    __slots__ = ("iteration", "microbatch", "flow_id", "path", "path_version", "proof")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    path: _containers.RepeatedScalarFieldContainer[str]
    path_version: int
    proof: bytes
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., path: _Optional[_Iterable[str]] = ..., path_version: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class BackwardGradient(_message.Message):
    __slots__ = ("iteration", "microbatch", "flow_id", "path", "path_version", "proof")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    path: _containers.RepeatedScalarFieldContainer[str]
    path_version: int
    proof: bytes
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., path: _Optional[_Iterable[str]] = ..., path_version: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Unusable(_message.Message):
    __slots__ = ("iteration", "microbatch", "is_gradient", "proof")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    IS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    microbatch: MicrobatchId
    is_gradient: bool
    proof: bytes
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., is_gradient: _Optional[bool] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("iteration", "microbatch", "compute_s")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    microbatch: MicrobatchId
    compute_s: float
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., compute_s: _Optional[float] = ...) -> None: ...

class Deny(_message.Message):
    __slots__ = ("iteration", "microbatch", "flow_id", "reason")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    reason: str
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Reroute(_message.Message):
    __slots__ = ("iteration", "microbatch", "flow_id", "path", "path_version", "owing")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    FLOW_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    OWING_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    microbatch: MicrobatchId
    flow_id: FlowId
    path: _containers.RepeatedScalarFieldContainer[str]
    path_version: int
    owing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., flow_id: _Optional[_Union[FlowId, _Mapping]] = ..., path: _Optional[_Iterable[str]] = ..., path_version: _Optional[int] = ..., owing: _Optional[_Iterable[str]] = ...) -> None: ...

class Mended(_message.Message):
    __slots__ = ("iteration", "microbatch")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    microbatch: MicrobatchId
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ...) -> None: ...

class CanTake(_message.Message):
    __slots__ = ("iteration",)
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("iteration", "num_committed", "digest", "num_deferred", "loss_sum", "num_tokens", "view_version", "failure", "num_reread")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_DEFERRED_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_REREAD_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    num_committed: int
    digest: int
    num_deferred: int
    loss_sum: float
    num_tokens: int
    view_version: int
    failure: str
    num_reread: int
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., num_committed: _Optional[int] = ..., digest: _Optional[int] = ..., num_deferred: _Optional[int] = ..., loss_sum: _Optional[float] = ..., num_tokens: _Optional[int] = ..., view_version: _Optional[int] = ..., failure: _Optional[str] = ..., num_reread: _Optional[int] = ...) -> None: ...

class BeginAggregation(_message.Message):
    __slots__ = ("averaging", "num_committed", "digest", "loss_sum", "num_tokens", "num_deferred", "num_reread", "seal")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEFERRED_FIELD_NUMBER: _ClassVar[int]
    NUM_REREAD_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    num_committed: int
    digest: int
    loss_sum: float
    num_tokens: int
    num_deferred: int
    num_reread: int
    seal: bytes
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., num_committed: _Optional[int] = ..., digest: _Optional[int] = ..., loss_sum: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_deferred: _Optional[int] = ..., num_reread: _Optional[int] = ..., seal: _Optional[bytes] = ...) -> None: ...

class ReducePart(_message.Message):
    __slots__ = ("averaging", "part", "num_microbatches", "digest", "overlapped", "phase")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OVERLAPPED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    part: int
    num_microbatches: int
    digest: int
    overlapped: bool
    phase: int
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., part: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., digest: _Optional[int] = ..., overlapped: _Optional[bool] = ..., phase: _Optional[int] = ...) -> None: ...

class ReducedPart(_message.Message):
    __slots__ = ("averaging", "part", "square_sum", "overlapped", "num_microbatches", "phase", "missing")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SQUARE_SUM_FIELD_NUMBER: _ClassVar[int]
    OVERLAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    part: int
    square_sum: float
    overlapped: bool
    num_microbatches: int
    phase: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., part: _Optional[int] = ..., square_sum: _Optional[float] = ..., overlapped: _Optional[bool] = ..., num_microbatches: _Optional[int] = ..., phase: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class GradientSquares(_message.Message):
    __slots__ = ("averaging", "square_sums")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    SQUARE_SUMS_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    square_sums: _containers.RepeatedCompositeFieldContainer[StageSquares]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., square_sums: _Optional[_Iterable[_Union[StageSquares, _Mapping]]] = ...) -> None: ...

class GradientNorm(_message.Message):
    __slots__ = ("averaging", "gradient_norm", "seal")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    gradient_norm: float
    seal: bytes
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., gradient_norm: _Optional[float] = ..., seal: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("averaging", "hashes", "failure", "votes", "averages", "folded", "slow", "rates", "travelled")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    AVERAGES_FIELD_NUMBER: _ClassVar[int]
    FOLDED_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    TRAVELLED_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    hashes: _containers.RepeatedCompositeFieldContainer[StageHash]
    failure: str
    votes: _containers.RepeatedCompositeFieldContainer[MemberHash]
    averages: _containers.RepeatedCompositeFieldContainer[StageAverages]
    folded: _containers.RepeatedCompositeFieldContainer[StageShare]
    slow: _containers.RepeatedCompositeFieldContainer[SlowShare]
    rates: _containers.RepeatedCompositeFieldContainer[MemberRate]
    travelled: _containers.RepeatedCompositeFieldContainer[StageVersion]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., hashes: _Optional[_Iterable[_Union[StageHash, _Mapping]]] = ..., failure: _Optional[str] = ..., votes: _Optional[_Iterable[_Union[MemberHash, _Mapping]]] = ..., averages: _Optional[_Iterable[_Union[StageAverages, _Mapping]]] = ..., folded: _Optional[_Iterable[_Union[StageShare, _Mapping]]] = ..., slow: _Optional[_Iterable[_Union[SlowShare, _Mapping]]] = ..., rates: _Optional[_Iterable[_Union[MemberRate, _Mapping]]] = ..., travelled: _Optional[_Iterable[_Union[StageVersion, _Mapping]]] = ...) -> None: ...

class Differs(_message.Message):
    __slots__ = ("base", "nodes")
    BASE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    base: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, base: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("averaging", "cases", "seal")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    CASES_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    cases: _containers.RepeatedCompositeFieldContainer[AuditCase]
    seal: bytes
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., cases: _Optional[_Iterable[_Union[AuditCase, _Mapping]]] = ..., seal: _Optional[bytes] = ...) -> None: ...

class StandOut(_message.Message):
    __slots__ = ("averaging", "nodes")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class AuditedTensor(_message.Message):
    __slots__ = ("averaging", "relay", "opinion", "microbatch", "is_gradient", "proof")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    OPINION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    IS_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    relay: str
    opinion: int
    microbatch: MicrobatchId
    is_gradient: bool
    proof: bytes
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., relay: _Optional[str] = ..., opinion: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., is_gradient: _Optional[bool] = ..., proof: _Optional[bytes] = ...) -> None: ...

class AuditedPart(_message.Message):
    __slots__ = ("averaging", "relay", "opinion", "part", "num_microbatches", "digest", "sketch")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    OPINION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    relay: str
    opinion: int
    part: int
    num_microbatches: int
    digest: int
    sketch: bytes
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., relay: _Optional[str] = ..., opinion: _Optional[int] = ..., part: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., digest: _Optional[int] = ..., sketch: _Optional[bytes] = ...) -> None: ...

class AuditedShares(_message.Message):
    __slots__ = ("averaging", "relay", "opinion", "shares")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    OPINION_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    relay: str
    opinion: int
    shares: _containers.RepeatedCompositeFieldContainer[AuditShare]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., relay: _Optional[str] = ..., opinion: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[AuditShare, _Mapping]]] = ...) -> None: ...

class AuditedPass(_message.Message):
    __slots__ = ("averaging", "relay", "opinion", "microbatch", "findings", "doubted", "sketches", "failure")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    OPINION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_FIELD_NUMBER: _ClassVar[int]
    SKETCHES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    relay: str
    opinion: int
    microbatch: MicrobatchId
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    doubted: bool
    sketches: _containers.RepeatedScalarFieldContainer[bytes]
    failure: str
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., relay: _Optional[str] = ..., opinion: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., doubted: _Optional[bool] = ..., sketches: _Optional[_Iterable[bytes]] = ..., failure: _Optional[str] = ...) -> None: ...

class AuditResult(_message.Message):
    __slots__ = ("averaging", "relay", "opinion", "num_microbatches", "failure", "findings")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    OPINION_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    relay: str
    opinion: int
    num_microbatches: int
    failure: str
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., relay: _Optional[str] = ..., opinion: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., failure: _Optional[str] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("closed", "outcome", "opening", "reason", "hashes", "loss", "num_tokens", "view_version", "view_term", "failed", "change", "seal")
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    VIEW_TERM_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    closed: Iteration
    outcome: Outcome
    opening: Opening
    reason: str
    hashes: _containers.RepeatedCompositeFieldContainer[StageHash]
    loss: float
    num_tokens: int
    view_version: int
    view_term: int
    failed: bool
    change: ViewChange
    seal: bytes
    def __init__(self, closed: _Optional[_Union[Iteration, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., reason: _Optional[str] = ..., hashes: _Optional[_Iterable[_Union[StageHash, _Mapping]]] = ..., loss: _Optional[float] = ..., num_tokens: _Optional[int] = ..., view_version: _Optional[int] = ..., view_term: _Optional[int] = ..., failed: _Optional[bool] = ..., change: _Optional[_Union[ViewChange, _Mapping]] = ..., seal: _Optional[bytes] = ...) -> None: ...

class Mend(_message.Message):
    __slots__ = ("iteration", "view", "reason", "change", "seal")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    view: View
    reason: str
    change: ViewChange
    seal: bytes
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., reason: _Optional[str] = ..., change: _Optional[_Union[ViewChange, _Mapping]] = ..., seal: _Optional[bytes] = ...) -> None: ...

class UtilisationQuery(_message.Message):
    __slots__ = ("query_id", "iteration", "with_kept", "seal")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    WITH_KEPT_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    iteration: Iteration
    with_kept: bool
    seal: bytes
    def __init__(self, query_id: _Optional[int] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., with_kept: _Optional[bool] = ..., seal: _Optional[bytes] = ...) -> None: ...

class UtilisationAnswer(_message.Message):
    __slots__ = ("query_id", "iteration", "loads")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    iteration: Iteration
    loads: _containers.RepeatedCompositeFieldContainer[NodeLoad]
    def __init__(self, query_id: _Optional[int] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., loads: _Optional[_Iterable[_Union[NodeLoad, _Mapping]]] = ...) -> None: ...

class Canvass(_message.Message):
    __slots__ = ("view_term", "iteration", "view_version")
    VIEW_TERM_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    view_term: int
    iteration: Iteration
    view_version: int
    def __init__(self, view_term: _Optional[int] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view_version: _Optional[int] = ...) -> None: ...

class CanvassAnswer(_message.Message):
    __slots__ = ("view_term", "iteration", "view_version", "silent")
    VIEW_TERM_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    view_term: int
    iteration: Iteration
    view_version: int
    silent: bool
    def __init__(self, view_term: _Optional[int] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view_version: _Optional[int] = ..., silent: _Optional[bool] = ...) -> None: ...

class Candidacy(_message.Message):
    __slots__ = ("term", "view_term", "iteration", "view_version")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VIEW_TERM_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    term: int
    view_term: int
    iteration: Iteration
    view_version: int
    def __init__(self, term: _Optional[int] = ..., view_term: _Optional[int] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view_version: _Optional[int] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("term", "granted", "view_term", "iteration", "view_version", "hashes", "confirmed_term")
    TERM_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    VIEW_TERM_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    granted: bool
    view_term: int
    iteration: Iteration
    view_version: int
    hashes: _containers.RepeatedCompositeFieldContainer[StageHash]
    confirmed_term: int
    def __init__(self, term: _Optional[int] = ..., granted: _Optional[bool] = ..., view_term: _Optional[int] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view_version: _Optional[int] = ..., hashes: _Optional[_Iterable[_Union[StageHash, _Mapping]]] = ..., confirmed_term: _Optional[int] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("term", "view_term", "iteration", "view_version")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VIEW_TERM_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    term: int
    view_term: int
    iteration: Iteration
    view_version: int
    def __init__(self, term: _Optional[int] = ..., view_term: _Optional[int] = ..., iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view_version: _Optional[int] = ...) -> None: ...

class LeaderIs(_message.Message):
    __slots__ = ("term", "leader", "address")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    term: int
    leader: str
    address: str
    def __init__(self, term: _Optional[int] = ..., leader: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Passed(_message.Message):
    __slots__ = ("ticket", "arrived")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    arrived: bool
    def __init__(self, ticket: _Optional[int] = ..., arrived: _Optional[bool] = ...) -> None: ...

class StageActivation(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch", "leg")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    leg: Leg
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., leg: _Optional[_Union[Leg, str]] = ...) -> None: ...

class StageGradient(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch", "leg", "attempt")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    leg: Leg
    attempt: int
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., leg: _Optional[_Union[Leg, str]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("iteration", "path_version", "window", "pass_s", "idle")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    window: int
    pass_s: float
    idle: bool
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., window: _Optional[int] = ..., pass_s: _Optional[float] = ..., idle: _Optional[bool] = ...) -> None: ...

class Given(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch", "worker")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    worker: str
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., worker: _Optional[str] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch", "worker")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    worker: str
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., worker: _Optional[str] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ...) -> None: ...

class Folded(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch", "attempt")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    attempt: int
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Unable(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch", "reason", "attempt")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    reason: str
    attempt: int
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., reason: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("iteration", "path_version", "microbatch")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_VERSION_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    path_version: int
    microbatch: MicrobatchId
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., path_version: _Optional[int] = ..., microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("averaging", "made", "folding", "folded")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    FOLDING_FIELD_NUMBER: _ClassVar[int]
    FOLDED_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    made: _containers.RepeatedCompositeFieldContainer[MicrobatchId]
    folding: _containers.RepeatedCompositeFieldContainer[MicrobatchId]
    folded: _containers.RepeatedCompositeFieldContainer[MicrobatchId]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., made: _Optional[_Iterable[_Union[MicrobatchId, _Mapping]]] = ..., folding: _Optional[_Iterable[_Union[MicrobatchId, _Mapping]]] = ..., folded: _Optional[_Iterable[_Union[MicrobatchId, _Mapping]]] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("averaging", "num_microbatches", "digest")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    num_microbatches: int
    digest: int
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., num_microbatches: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("address", "height", "past", "num_peers", "coordinator", "coordinator_address", "name")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    NUM_PEERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    address: str
    height: Height
    past: _containers.RepeatedScalarFieldContainer[str]
    num_peers: int
    coordinator: str
    coordinator_address: str
    name: str
    def __init__(self, address: _Optional[str] = ..., height: _Optional[_Union[Height, _Mapping]] = ..., past: _Optional[_Iterable[str]] = ..., num_peers: _Optional[int] = ..., coordinator: _Optional[str] = ..., coordinator_address: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Roll(_message.Message):
    __slots__ = ("term", "version", "height", "past", "peers")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    height: Height
    past: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedCompositeFieldContainer[PeerEntry]
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., height: _Optional[_Union[Height, _Mapping]] = ..., past: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[_Union[PeerEntry, _Mapping]]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("term", "version", "height", "committed", "num_samples", "samples_per_s", "averaging")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    height: Height
    committed: AveragingId
    num_samples: int
    samples_per_s: float
    averaging: bool
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., height: _Optional[_Union[Height, _Mapping]] = ..., committed: _Optional[_Union[AveragingId, _Mapping]] = ..., num_samples: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., averaging: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("term", "version", "height", "num_samples", "samples_per_s", "step_s", "awaited")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    height: Height
    num_samples: int
    samples_per_s: float
    step_s: float
    awaited: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., height: _Optional[_Union[Height, _Mapping]] = ..., num_samples: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., awaited: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseRound(_message.Message):
    __slots__ = ("averaging",)
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ...) -> None: ...

class RoundClosed(_message.Message):
    __slots__ = ("averaging", "num_samples", "digest")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    num_samples: int
    digest: int
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., num_samples: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class BeginRound(_message.Message):
    __slots__ = ("averaging", "height", "roster", "weights", "digests", "num_rows", "listeners")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    height: Height
    roster: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    num_rows: int
    listeners: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., height: _Optional[_Union[Height, _Mapping]] = ..., roster: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., num_rows: _Optional[int] = ..., listeners: _Optional[_Iterable[str]] = ...) -> None: ...

class RoundReady(_message.Message):
    __slots__ = ("averaging", "average_hash", "failure", "lost")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_HASH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    average_hash: str
    failure: str
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., average_hash: _Optional[str] = ..., failure: _Optional[str] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitRound(_message.Message):
    __slots__ = ("averaging", "average_hash")
    AVERAGING_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_HASH_FIELD_NUMBER: _ClassVar[int]
    averaging: AveragingId
    average_hash: str
    def __init__(self, averaging: _Optional[_Union[AveragingId, _Mapping]] = ..., average_hash: _Optional[str] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("successor", "successor_address")
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    successor: str
    successor_address: str
    def __init__(self, successor: _Optional[str] = ..., successor_address: _Optional[str] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("stage_index", "iteration", "parameter_hash")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_HASH_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    iteration: int
    parameter_hash: str
    def __init__(self, stage_index: _Optional[int] = ..., iteration: _Optional[int] = ..., parameter_hash: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("node_id", "address", "role", "stage_index", "capacity", "data_node_index", "since_iteration", "name", "duty", "reach")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SINCE_ITERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DUTY_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    role: Role
    stage_index: int
    capacity: int
    data_node_index: int
    since_iteration: int
    name: str
    duty: Duty
    reach: Reach
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., stage_index: _Optional[int] = ..., capacity: _Optional[int] = ..., data_node_index: _Optional[int] = ..., since_iteration: _Optional[int] = ..., name: _Optional[str] = ..., duty: _Optional[_Union[Duty, str]] = ..., reach: _Optional[_Union[Reach, str]] = ...) -> None: ...

class Iteration(_message.Message):
    __slots__ = ("number", "attempt", "era")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ERA_FIELD_NUMBER: _ClassVar[int]
    number: int
    attempt: int
    era: int
    def __init__(self, number: _Optional[int] = ..., attempt: _Optional[int] = ..., era: _Optional[int] = ...) -> None: ...

class AveragingId(_message.Message):
    __slots__ = ("iteration", "view_version")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    view_version: int
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., view_version: _Optional[int] = ...) -> None: ...

class AverageSpec(_message.Message):
    __slots__ = ("fragment", "rank", "bits")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    rank: int
    bits: int
    def __init__(self, fragment: _Optional[int] = ..., rank: _Optional[int] = ..., bits: _Optional[int] = ...) -> None: ...

class Byway(_message.Message):
    __slots__ = ("node_id", "bandwidth_bytes_per_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    bandwidth_bytes_per_s: float
    def __init__(self, node_id: _Optional[str] = ..., bandwidth_bytes_per_s: _Optional[float] = ...) -> None: ...

class FlowId(_message.Message):
    __slots__ = ("data_node", "slot")
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    data_node: str
    slot: int
    def __init__(self, data_node: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class WalkSteps(_message.Message):
    __slots__ = ("steps", "units")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[WalkStep]
    units: int
    def __init__(self, steps: _Optional[_Iterable[_Union[WalkStep, _Mapping]]] = ..., units: _Optional[int] = ...) -> None: ...

class WalkPlace(_message.Message):
    __slots__ = ("node_id", "exit")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    exit: bool
    def __init__(self, node_id: _Optional[str] = ..., exit: _Optional[bool] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("node_id", "costs", "inward", "compute_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    INWARD_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    costs: _containers.RepeatedCompositeFieldContainer[LinkCost]
    inward: _containers.RepeatedCompositeFieldContainer[LinkCost]
    compute_s: float
    def __init__(self, node_id: _Optional[str] = ..., costs: _Optional[_Iterable[_Union[LinkCost, _Mapping]]] = ..., inward: _Optional[_Iterable[_Union[LinkCost, _Mapping]]] = ..., compute_s: _Optional[float] = ...) -> None: ...

class LinkCost(_message.Message):
    __slots__ = ("node_id", "cost")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    cost: float
    def __init__(self, node_id: _Optional[str] = ..., cost: _Optional[float] = ...) -> None: ...

class ClaimTable(_message.Message):
    __slots__ = ("node_ids", "hops", "claims")
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    hops: _containers.RepeatedCompositeFieldContainer[IndexedHop]
    claims: _containers.RepeatedCompositeFieldContainer[IndexedClaim]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ..., hops: _Optional[_Iterable[_Union[IndexedHop, _Mapping]]] = ..., claims: _Optional[_Iterable[_Union[IndexedClaim, _Mapping]]] = ...) -> None: ...

class SettledFlow(_message.Message):
    __slots__ = ("path", "costs")
    PATH_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[str]
    costs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, path: _Optional[_Iterable[str]] = ..., costs: _Optional[_Iterable[float]] = ...) -> None: ...

class PeerFlow(_message.Message):
    __slots__ = ("number", "version", "data_node", "upstream", "upstream_cost", "next", "open")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_COST_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    data_node: str
    upstream: str
    upstream_cost: float
    next: NextHop
    open: bool
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ..., data_node: _Optional[str] = ..., upstream: _Optional[str] = ..., upstream_cost: _Optional[float] = ..., next: _Optional[_Union[NextHop, _Mapping]] = ..., open: _Optional[bool] = ...) -> None: ...

class NextHop(_message.Message):
    __slots__ = ("peer", "number")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    number: int
    def __init__(self, peer: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class LinkUse(_message.Message):
    __slots__ = ("cost", "num_flows")
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_FLOWS_FIELD_NUMBER: _ClassVar[int]
    cost: float
    num_flows: int
    def __init__(self, cost: _Optional[float] = ..., num_flows: _Optional[int] = ...) -> None: ...

class MicrobatchId(_message.Message):
    __slots__ = ("iteration", "data_node_index", "index")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    DATA_NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    data_node_index: int
    index: int
    def __init__(self, iteration: _Optional[int] = ..., data_node_index: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class StageSquares(_message.Message):
    __slots__ = ("stage_index", "square_sum")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SQUARE_SUM_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    square_sum: float
    def __init__(self, stage_index: _Optional[int] = ..., square_sum: _Optional[float] = ...) -> None: ...

class StageHash(_message.Message):
    __slots__ = ("stage_index", "parameter_hash")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_HASH_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    parameter_hash: str
    def __init__(self, stage_index: _Optional[int] = ..., parameter_hash: _Optional[str] = ...) -> None: ...

class MemberHash(_message.Message):
    __slots__ = ("node_id", "parameter_hash")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_HASH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    parameter_hash: str
    def __init__(self, node_id: _Optional[str] = ..., parameter_hash: _Optional[str] = ...) -> None: ...

class StageAverages(_message.Message):
    __slots__ = ("stage_index", "num_microbatches", "effective_rank", "travel_s", "num_late")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_RANK_FIELD_NUMBER: _ClassVar[int]
    TRAVEL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    num_microbatches: int
    effective_rank: float
    travel_s: float
    num_late: int
    def __init__(self, stage_index: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., effective_rank: _Optional[float] = ..., travel_s: _Optional[float] = ..., num_late: _Optional[int] = ...) -> None: ...

class StageShare(_message.Message):
    __slots__ = ("stage_index", "num_microbatches", "digest")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    num_microbatches: int
    digest: int
    def __init__(self, stage_index: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class SlowShare(_message.Message):
    __slots__ = ("node_id", "share")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    share: int
    def __init__(self, node_id: _Optional[str] = ..., share: _Optional[int] = ...) -> None: ...

class MemberRate(_message.Message):
    __slots__ = ("node_id", "bytes_per_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    bytes_per_s: float
    def __init__(self, node_id: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class StageVersion(_message.Message):
    __slots__ = ("stage_index", "version")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    version: int
    def __init__(self, stage_index: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class AuditCase(_message.Message):
    __slots__ = ("relay", "auditors", "opinion", "seed", "closes")
    RELAY_FIELD_NUMBER: _ClassVar[int]
    AUDITORS_FIELD_NUMBER: _ClassVar[int]
    OPINION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    relay: str
    auditors: _containers.RepeatedScalarFieldContainer[str]
    opinion: int
    seed: bytes
    closes: bool
    def __init__(self, relay: _Optional[str] = ..., auditors: _Optional[_Iterable[str]] = ..., opinion: _Optional[int] = ..., seed: _Optional[bytes] = ..., closes: _Optional[bool] = ...) -> None: ...

class AuditShare(_message.Message):
    __slots__ = ("contributor", "sketch")
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    contributor: str
    sketch: bytes
    def __init__(self, contributor: _Optional[str] = ..., sketch: _Optional[bytes] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("work", "error", "suspects")
    WORK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    work: AuditedWork
    error: float
    suspects: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, work: _Optional[_Union[AuditedWork, str]] = ..., error: _Optional[float] = ..., suspects: _Optional[_Iterable[str]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("iteration", "committed", "view", "paused", "epoch", "electors", "marks", "origin", "averaged", "due", "spec", "travelling", "slow", "travelled")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ELECTORS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TRAVELLING_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    TRAVELLED_FIELD_NUMBER: _ClassVar[int]
    iteration: Iteration
    committed: Iteration
    view: View
    paused: bool
    epoch: int
    electors: _containers.RepeatedScalarFieldContainer[str]
    marks: _containers.RepeatedCompositeFieldContainer[Mark]
    origin: Origin
    averaged: Iteration
    due: int
    spec: AverageSpec
    travelling: AverageSpec
    slow: _containers.RepeatedCompositeFieldContainer[SlowShare]
    travelled: _containers.RepeatedCompositeFieldContainer[StageVersion]
    def __init__(self, iteration: _Optional[_Union[Iteration, _Mapping]] = ..., committed: _Optional[_Union[Iteration, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., paused: _Optional[bool] = ..., epoch: _Optional[int] = ..., electors: _Optional[_Iterable[str]] = ..., marks: _Optional[_Iterable[_Union[Mark, _Mapping]]] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., averaged: _Optional[_Union[Iteration, _Mapping]] = ..., due: _Optional[int] = ..., spec: _Optional[_Union[AverageSpec, _Mapping]] = ..., travelling: _Optional[_Union[AverageSpec, _Mapping]] = ..., slow: _Optional[_Iterable[_Union[SlowShare, _Mapping]]] = ..., travelled: _Optional[_Iterable[_Union[StageVersion, _Mapping]]] = ...) -> None: ...

class ViewChange(_message.Message):
    __slots__ = ("base", "result", "gone", "changed", "electors")
    BASE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    ELECTORS_FIELD_NUMBER: _ClassVar[int]
    base: str
    result: str
    gone: _containers.RepeatedScalarFieldContainer[str]
    changed: _containers.RepeatedCompositeFieldContainer[Member]
    electors: ElectorChange
    def __init__(self, base: _Optional[str] = ..., result: _Optional[str] = ..., gone: _Optional[_Iterable[str]] = ..., changed: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., electors: _Optional[_Union[ElectorChange, _Mapping]] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("version", "leader", "term", "num_stages", "members", "cut")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    version: int
    leader: str
    term: int
    num_stages: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., leader: _Optional[str] = ..., term: _Optional[int] = ..., num_stages: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("node_id", "num_flows", "capacity", "num_microbatches", "state", "kept", "awaited", "times", "device", "memory_bytes", "decod_version")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_FLOWS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    NUM_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECOD_VERSION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    num_flows: int
    capacity: int
    num_microbatches: int
    state: str
    kept: _containers.RepeatedCompositeFieldContainer[Kept]
    awaited: _containers.RepeatedScalarFieldContainer[str]
    times: IterationTimes
    device: str
    memory_bytes: int
    decod_version: str
    def __init__(self, node_id: _Optional[str] = ..., num_flows: _Optional[int] = ..., capacity: _Optional[int] = ..., num_microbatches: _Optional[int] = ..., state: _Optional[str] = ..., kept: _Optional[_Iterable[_Union[Kept, _Mapping]]] = ..., awaited: _Optional[_Iterable[str]] = ..., times: _Optional[_Union[IterationTimes, _Mapping]] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., decod_version: _Optional[str] = ...) -> None: ...

class Height(_message.Message):
    __slots__ = ("round", "state_id")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    round: int
    state_id: str
    def __init__(self, round: _Optional[int] = ..., state_id: _Optional[str] = ...) -> None: ...

class PeerEntry(_message.Message):
    __slots__ = ("node_id", "address", "level", "name")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    level: bool
    name: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., level: _Optional[bool] = ..., name: _Optional[str] = ...) -> None: ...

class WalkStep(_message.Message):
    __slots__ = ("node_id", "exit", "cost")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    exit: bool
    cost: float
    def __init__(self, node_id: _Optional[str] = ..., exit: _Optional[bool] = ..., cost: _Optional[float] = ...) -> None: ...

class IndexedHop(_message.Message):
    __slots__ = ("node_index", "costs", "inward", "compute_s")
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    INWARD_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    node_index: int
    costs: _containers.RepeatedCompositeFieldContainer[IndexedCost]
    inward: _containers.RepeatedCompositeFieldContainer[IndexedCost]
    compute_s: float
    def __init__(self, node_index: _Optional[int] = ..., costs: _Optional[_Iterable[_Union[IndexedCost, _Mapping]]] = ..., inward: _Optional[_Iterable[_Union[IndexedCost, _Mapping]]] = ..., compute_s: _Optional[float] = ...) -> None: ...

class IndexedClaim(_message.Message):
    __slots__ = ("hop_indexes",)
    HOP_INDEXES_FIELD_NUMBER: _ClassVar[int]
    hop_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hop_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("iteration", "hashes", "cut", "mirrored")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    hashes: _containers.RepeatedCompositeFieldContainer[StageHash]
    cut: _containers.RepeatedScalarFieldContainer[int]
    mirrored: bool
    def __init__(self, iteration: _Optional[int] = ..., hashes: _Optional[_Iterable[_Union[StageHash, _Mapping]]] = ..., cut: _Optional[_Iterable[int]] = ..., mirrored: _Optional[bool] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("source", "lost", "num_repeated", "holders", "cut")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    NUM_REPEATED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    source: Source
    lost: _containers.RepeatedScalarFieldContainer[int]
    num_repeated: int
    holders: _containers.RepeatedCompositeFieldContainer[StateHolders]
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source: _Optional[_Union[Source, str]] = ..., lost: _Optional[_Iterable[int]] = ..., num_repeated: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[StateHolders, _Mapping]]] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

class ElectorChange(_message.Message):
    __slots__ = ("first", "without_vote", "former")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_VOTE_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    first: str
    without_vote: _containers.RepeatedScalarFieldContainer[str]
    former: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, first: _Optional[str] = ..., without_vote: _Optional[_Iterable[str]] = ..., former: _Optional[_Iterable[str]] = ...) -> None: ...

class IterationTimes(_message.Message):
    __slots__ = ("computing_s", "waiting_s", "sending_s")
    COMPUTING_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    SENDING_S_FIELD_NUMBER: _ClassVar[int]
    computing_s: float
    waiting_s: float
    sending_s: float
    def __init__(self, computing_s: _Optional[float] = ..., waiting_s: _Optional[float] = ..., sending_s: _Optional[float] = ...) -> None: ...

class IndexedCost(_message.Message):
    __slots__ = ("node_index", "cost")
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    node_index: int
    cost: float
    def __init__(self, node_index: _Optional[int] = ..., cost: _Optional[float] = ...) -> None: ...

class StateHolders(_message.Message):
    __slots__ = ("stage_index", "nodes")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stage_index: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

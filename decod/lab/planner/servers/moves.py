"""Small changes of a layout, drawn at random: the steps of every search.

An `Arrangement` is a layout with its idle hosts. Each kind of move returns a new arrangement, or
None if it found nothing to change. Moves keep the rules of `layout.broken_rules`, except that a
server may get more layers than it can hold. Such a layout takes infinitely long.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from decod.lab.planner.hosts import HostKind, TrainingProblem
from decod.lab.planner.servers.servers_layout import Draft, DraftStage


class Arrangement(NamedTuple):
    """A layout, and the hosts that have nothing to do."""

    stages: Draft
    idle_servers: tuple[int, ...]
    idle_clients: tuple[int, ...]


def arranged(problem: TrainingProblem, draft: Draft) -> Arrangement:
    """Return a draft with its idle hosts."""
    used = {host for stage in draft for host in (*stage.servers, *stage.clients)}
    idle = [
        tuple(host for host in problem.indexes(kind) if host not in used)
        for kind in (HostKind.RELIABLE, HostKind.UNRELIABLE)
    ]
    return Arrangement(draft, *idle)


def with_server(stage: DraftStage, server: int, *, frontal: bool) -> DraftStage:
    """Return a stage with one more server. If it had one, that one keeps the other duty."""
    first, second = stage.frontal, stage.backward
    if first == second:
        first, second = ((server,), second) if frontal else (first, (server,))
    elif frontal:
        first = (*first, server)
    else:
        second = (*second, server)
    return replace(stage, frontal=first, backward=second)


def without_server(stage: DraftStage, server: int) -> DraftStage:
    """Return a stage without one of its several servers. No duty becomes empty."""
    first = tuple(other for other in stage.frontal if other != server)
    second = tuple(other for other in stage.backward if other != server)
    if not first:
        first, second = (second[:1], second[1:] or second)
    elif not second:
        first, second = (first[:-1] or first, first[-1:])
    return replace(stage, frontal=first, backward=second)


def with_clients(
    stage: DraftStage, *, add: Sequence[int] = (), drop: Sequence[int] = ()
) -> DraftStage:
    """Return a stage with some clients more and some fewer."""
    kept = [client for client in stage.clients if client not in drop]
    return replace(stage, clients=tuple(sorted((*kept, *add))))


class Mover:
    """Draws moves. They change the number of stages only if it is open."""

    def __init__(self, rng: random.Random, *, num_stages_open: bool) -> None:
        self._rng = rng
        # The numbers are weights: how often each kind of move is drawn.
        self._kinds: dict[Callable[[Arrangement, int], Arrangement | None], int] = {
            self._move_client: 5,
            self._swap_clients: 3,
            self._move_layers: 5,
            self._move_server: 3,
            self._swap_servers: 3,
            self._reorder: 2,
            self._swap_stages: 1,
            self._use_server: 2,
            self._drop_server: 1,
            self._split: int(num_stages_open),
            self._merge: int(num_stages_open),
        }
        self._names, self._weights = list(self._kinds), list(self._kinds.values())

    def propose(self, now: Arrangement, busy: int) -> Arrangement | None:
        """Return a changed arrangement, or None.

        Args:
            now: The present arrangement. Not changed.
            busy: The index of the stage that decides the time. Half of the moves concern it.
        """
        move = self._rng.choices(self._names, self._weights)[0]
        stage = busy if self._rng.random() < 0.5 else self._rng.randrange(len(now.stages))
        return move(now, stage)

    # --- clients ------------------------------------------------------------------------------

    def _move_client(self, now: Arrangement, here: int) -> Arrangement | None:
        """Move a client to or from a stage. Idle clients count as one more stage."""
        idle = len(now.stages)
        there = self._rng.randrange(idle + 1)
        if there == here:
            return None
        begin, end = (here, there) if self._rng.random() < 0.5 else (there, here)
        pool = now.idle_clients if begin == idle else now.stages[begin].clients
        if not pool:
            return None
        client = self._rng.choice(pool)
        stages, spare = list(now.stages), now.idle_clients
        if begin == idle:
            spare = tuple(other for other in spare if other != client)
        else:
            stages[begin] = with_clients(stages[begin], drop=(client,))
        if end == idle:
            spare = (*spare, client)
        else:
            stages[end] = with_clients(stages[end], add=(client,))
        return Arrangement(tuple(stages), now.idle_servers, spare)

    def _swap_clients(self, now: Arrangement, here: int) -> Arrangement | None:
        there = self._rng.randrange(len(now.stages) + 1)
        mine = now.stages[here].clients
        idle = there == len(now.stages)
        theirs = now.idle_clients if idle else now.stages[there].clients
        if there == here or not mine or not theirs:
            return None
        a, b = self._rng.choice(mine), self._rng.choice(theirs)
        stages, spare = list(now.stages), now.idle_clients
        stages[here] = with_clients(stages[here], add=(b,), drop=(a,))
        if idle:
            spare = (*(other for other in spare if other != b), a)
        else:
            stages[there] = with_clients(stages[there], add=(a,), drop=(b,))
        return Arrangement(tuple(stages), now.idle_servers, spare)

    # --- servers ------------------------------------------------------------------------------

    def _move_server(self, now: Arrangement, here: int) -> Arrangement | None:
        begin, end = here, self._rng.randrange(len(now.stages))
        if self._rng.random() < 0.5:
            begin, end = end, begin
        if begin == end or len(now.stages[begin].servers) < 2:
            return None
        stages = list(now.stages)
        server = self._rng.choice(stages[begin].servers)
        stages[begin] = without_server(stages[begin], server)
        stages[end] = self._placed(stages[end], server)
        return now._replace(stages=tuple(stages))

    def _swap_servers(self, now: Arrangement, here: int) -> Arrangement | None:
        """Exchange two servers of different stages, or a server and an idle host."""
        there = self._rng.randrange(len(now.stages) + 1)
        idle = there == len(now.stages)
        others = now.idle_servers if idle else now.stages[there].servers
        if there == here or not others:
            return None
        a, b = self._rng.choice(now.stages[here].servers), self._rng.choice(others)
        stages, spare = list(now.stages), now.idle_servers
        stages[here] = _renamed(stages[here], a, b)
        if idle:
            spare = tuple(a if other == b else other for other in spare)
        else:
            stages[there] = _renamed(stages[there], b, a)
        return Arrangement(tuple(stages), spare, now.idle_clients)

    def _reorder(self, now: Arrangement, here: int) -> Arrangement | None:
        """Give a server the other duty, or exchange the places of two servers of a stage."""
        stage = now.stages[here]
        if len(stage.servers) < 2:
            return None
        server = self._rng.choice(stage.servers)
        if self._rng.random() < 0.5:
            duty = stage.frontal if server in stage.frontal else stage.backward
            if len(duty) < 2:
                return None
            frontal = server not in stage.frontal
            changed = with_server(without_server(stage, server), server, frontal=frontal)
        else:
            other = self._rng.choice(stage.servers)
            if other == server:
                return None
            changed = _exchanged(stage, server, other)
        return now._replace(stages=_with(now.stages, here, changed))

    def _use_server(self, now: Arrangement, here: int) -> Arrangement | None:
        if not now.idle_servers:
            return None
        server = self._rng.choice(now.idle_servers)
        spare = tuple(other for other in now.idle_servers if other != server)
        stages = _with(now.stages, here, self._placed(now.stages[here], server))
        return Arrangement(stages, spare, now.idle_clients)

    def _drop_server(self, now: Arrangement, here: int) -> Arrangement | None:
        stage = now.stages[here]
        if len(stage.servers) < 2:
            return None
        server = self._rng.choice(stage.servers)
        stages = _with(now.stages, here, without_server(stage, server))
        return Arrangement(stages, (*now.idle_servers, server), now.idle_clients)

    def _placed(self, stage: DraftStage, server: int) -> DraftStage:
        """Return a stage with one more server, at a random duty."""
        return with_server(stage, server, frontal=self._rng.random() < 0.5)

    # --- layers and stages --------------------------------------------------------------------

    def _move_layers(self, now: Arrangement, here: int) -> Arrangement | None:
        begin, end = here, self._rng.randrange(len(now.stages))
        if self._rng.random() < 0.25:
            begin, end = end, begin
        most = now.stages[begin].num_layers - 1
        if begin == end or not most:
            return None
        number = 1 if self._rng.random() < 0.7 else self._rng.randint(1, most)
        stages = list(now.stages)
        stages[begin] = replace(stages[begin], num_layers=stages[begin].num_layers - number)
        stages[end] = replace(stages[end], num_layers=stages[end].num_layers + number)
        return now._replace(stages=tuple(stages))

    def _swap_stages(self, now: Arrangement, here: int) -> Arrangement | None:
        """Reverse a part of the order of the stages."""
        there = self._rng.randrange(len(now.stages))
        if here == there:
            return None
        i, j = min(here, there), max(here, there)
        turned = (*now.stages[:i], *now.stages[i : j + 1][::-1], *now.stages[j + 1 :])
        return now._replace(stages=turned)

    def _split(self, now: Arrangement, here: int) -> Arrangement | None:
        """Make two stages of one. The second gets an idle server, or one of the first."""
        stage = now.stages[here]
        if stage.num_layers < 2 or (len(stage.servers) < 2 and not now.idle_servers):
            return None
        spare, rest = now.idle_servers, stage
        if len(stage.servers) < 2 or (spare and self._rng.random() < 0.5):
            server = self._rng.choice(spare)
            spare = tuple(other for other in spare if other != server)
        else:
            server = self._rng.choice(stage.servers)
            rest = without_server(stage, server)
        number = self._rng.randint(1, stage.num_layers - 1)
        moved = tuple(client for client in stage.clients if self._rng.random() < 0.5)
        first = replace(with_clients(rest, drop=moved), num_layers=stage.num_layers - number)
        second = DraftStage(number, (server,), (server,), moved)
        pair = (first, second) if self._rng.random() < 0.5 else (second, first)
        stages = (*now.stages[:here], *pair, *now.stages[here + 1 :])
        return Arrangement(stages, spare, now.idle_clients)

    def _merge(self, now: Arrangement, here: int) -> Arrangement | None:
        """Make one stage of two neighbours. The servers of one of them may become idle."""
        if here + 1 >= len(now.stages):
            return None
        first, second = now.stages[here : here + 2]
        if self._rng.random() < 0.5:
            first, second = second, first
        merged = replace(first, num_layers=first.num_layers + second.num_layers)
        merged = with_clients(merged, add=second.clients)
        spare = now.idle_servers
        if self._rng.random() < 0.5:
            spare = (*spare, *second.servers)
        else:
            for server in second.servers:
                merged = self._placed(merged, server)
        stages = (*now.stages[:here], merged, *now.stages[here + 2 :])
        return Arrangement(stages, spare, now.idle_clients)


def _with(stages: Draft, index: int, stage: DraftStage) -> Draft:
    return (*stages[:index], stage, *stages[index + 1 :])


def _renamed(stage: DraftStage, old: int, new: int) -> DraftStage:
    """Return a stage with another host in a server's place."""
    return replace(
        stage,
        frontal=tuple(new if server == old else server for server in stage.frontal),
        backward=tuple(new if server == old else server for server in stage.backward),
    )


def _exchanged(stage: DraftStage, a: int, b: int) -> DraftStage:
    """Return a stage with two of its servers in each other's places."""
    names = {a: b, b: a}
    return replace(
        stage,
        frontal=tuple(names.get(server, server) for server in stage.frontal),
        backward=tuple(names.get(server, server) for server in stage.backward),
    )

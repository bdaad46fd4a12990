"""When data nodes tell each other of join tokens, and what their operators hear if that fails."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from decod.clocks import wall_clock
from decod.daemon import invitations as module
from decod.daemon.invitations import Invitations, TokenRegister
from decod.daemon.succession import RunContacts
from decod.membership.papers import Membership
from decod.membership.registrar import Registrar
from decod.protocol.core.view import Role
from decod.tasks import beside
from tests.support.members import data_node, registrar_of
from tests.support.peers import RUN
from tests.unit.net.test_enrolment import Door, at_door
from tests.waiting import wait_until

OTHER = data_node("other")


class Contacts:
    """Who leads, and where: this node, or one at an address."""

    def __init__(self, address: str, *, leads: bool) -> None:
        self._address, self._leads = address, leads
        self.own = OTHER.node_id

    def leads(self) -> bool:
        return self._leads

    def leads_elsewhere(self) -> str | None:
        return None if self._leads else self._address

    def admitting(self) -> tuple[str, ...]:
        return (self._address,)

    def addresses(self) -> tuple[str, ...]:
        return ("127.0.0.1:7",)


class Here:
    """A data node whose register is under test."""

    def __init__(self, address: str, *, leads: bool) -> None:
        member = Membership(OTHER.root, OTHER.host, OTHER.papers)
        self.registrar: Registrar = registrar_of(member)
        self.contacts = cast("RunContacts", Contacts(address, leads=leads))
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.register = TokenRegister(self.registrar, RUN, self.contacts, self.note)

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))

    def create(self) -> str:
        tokens = self.registrar.tokens
        return tokens.create(Role.RELAY, now_s=wall_clock(), life_s=60.0, uses=1).id


def beside_another(test: Callable[[Here, Door], Awaitable[None]], *, leads: bool) -> None:
    """Runs a test while a register keeps level with another data node, which listens."""

    async def within(door: Door) -> None:
        here = Here(door.address, leads=leads)
        async with beside(here.register.keep_level()):
            await asyncio.sleep(0)
            await test(here, door)

    at_door(within)


@pytest.mark.parametrize("leads", [True, False])
def test_a_change_is_told_at_once(leads: bool) -> None:
    async def test(here: Here, door: Door) -> None:
        token = here.create()
        await wait_until(lambda: door.registrar.tokens.find(token))
        here.registrar.tokens.revoke(token)

        def revoked() -> bool:
            found = door.registrar.tokens.find(token)
            return found is not None and found.revoked

        await wait_until(revoked)

    beside_another(test, leads=leads)


def test_who_does_not_lead_asks_the_leader_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)

    async def test(here: Here, door: Door) -> None:
        token = door.token().id
        await wait_until(lambda: here.registrar.tokens.find(token))

    beside_another(test, leads=False)


async def test_who_can_not_be_told_is_noted_once() -> None:
    here = Here("127.0.0.1:1", leads=False)
    for _ in range(3):
        assert "no answer from 127.0.0.1:1" in await here.register.level()
    ((event, fields),) = here.notes
    assert (event, fields["address"]) == ("tokens.unshared", "127.0.0.1:1")
    assert await Here("", leads=False).register.level() == "the leader's address is not known"


async def test_the_operator_hears_that_the_leader_does_not_know_yet() -> None:
    here = Here("127.0.0.1:1", leads=False)
    invitations = Invitations(here.registrar, here.contacts, RUN, here.note)
    commands = invitations.commands()
    made = await commands["token_create"]({})
    assert made["join_string"].startswith("decod1-v-")
    assert "no answer" in made["unshared"]
    (record,) = here.registrar.tokens.all()
    assert "no answer" in (await commands["token_revoke"]({"id": record.id}))["unshared"]
    assert record.id in [each["id"] for each in (await commands["token_list"]({}))["tokens"]]


async def test_the_leader_does_not_wait_for_others() -> None:
    here = Here("127.0.0.1:1", leads=True)
    invitations = Invitations(here.registrar, here.contacts, RUN, here.note)
    assert (await invitations.commands()["token_create"]({}))["unshared"] == ""
    assert here.notes == []


def test_a_volunteer_has_nothing_to_keep_level() -> None:
    here = Here("127.0.0.1:1", leads=False)
    asyncio.run(Invitations(None, here.contacts, RUN, here.note).keep_level())
    assert here.notes == []

"""A node's way to its papers: it founds a run, shows a join token, or renews what it has.

The papers lie in the state folder. So a node shows its token once, and an old join string leads a
former member back, even after its token has expired.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from decod.clocks import wall_clock
from decod.daemon.host import Say
from decod.daemon.node_folder import KnownPeers
from decod.errors import ConfigError, DecodError, NetworkError, PeerError, RejectedError
from decod.membership.certificates import expiry_s
from decod.membership.identity import HostKey, load_identity, load_or_create_identity
from decod.membership.papers import (
    RENEWS_AFTER,
    TERMS,
    Membership,
    Papers,
    PaperTerms,
    certified,
    keep_papers,
    load_papers,
    membership_folder,
)
from decod.membership.registrar import founder_papers
from decod.membership.tokens import Token
from decod.net.channel import UnansweredError
from decod.net.enrolment import AskLeaderError, Enrollee, UnknownTokenError, enroll
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role

ROOT_FILE = "root.key"

_PAUSE_S = 60.0
_PAUSE_LEAST_S = 1.0
"""Waits between two looks at the clock, which may jump, and between two attempts."""


def root_folder(state_dir: Path, run_name: str) -> Path:
    """Return where the organiser's host keeps the root of the runs of this name."""
    return state_dir / "roots" / run_name


def found(state_dir: Path, run_name: str, host: HostKey, terms: PaperTerms) -> Membership:
    """Return the organiser's membership in a run that this host starts or resumes.

    All runs of one name on this host have one root. So the members of a run find it again after it
    was resumed.

    Raises:
        ConfigError: The root's key or the papers can't be read or written.
    """
    root = load_or_create_identity(root_folder(state_dir, run_name), ROOT_FILE)
    folder = membership_folder(state_dir, root.public)
    papers = founder_papers(root, host, terms, wall_clock())
    keep_papers(folder, papers)
    return Membership(root.public, host, papers, folder, root_key=root)


def known_membership(
    state_dir: Path, host: HostKey, root: bytes, *, keeps: bool = True
) -> Membership | None:
    """Return this node's membership as its state folder holds it; None if it holds none.

    Whether the papers have expired is not checked.

    Args:
        state_dir: The state folder.
        host: This node's identity.
        root: The public key of the run's root.
        keeps: Whether renewed papers are kept in the folder.
    """
    folder = membership_folder(state_dir, root)
    papers = load_papers(folder, host, root)
    if papers is None:
        return None
    root_key = _root_key(state_dir, root)
    return Membership(root, host, papers, folder if keeps else None, root_key=root_key)


def _root_key(state_dir: Path, root: bytes) -> HostKey | None:
    """Return the root's own key, if this host has started the run."""
    for path in (state_dir / "roots").glob(f"*/{ROOT_FILE}"):
        with suppress(ConfigError, FileNotFoundError):
            key = load_identity(path.parent, ROOT_FILE)
            if key.public == root:
                return key
    return None


async def enter(join: JoinString, role: Role, state_dir: Path, host: HostKey) -> Membership:
    """Return this node's membership in the run of a join string. It is asked for if need be.

    Args:
        join: The join string.
        role: The role that the command needs.
        state_dir: The state folder.
        host: This node's identity.

    Raises:
        RejectedError: This node is not admitted (E-REJ-009 to E-REJ-014).
        NetworkError: Nobody who could admit it answers.
        PeerError: An answer breaks the protocol.
        ConfigError: The papers can't be kept (E-CFG-037).
    """
    known = await usable_membership(join, role, state_dir, host)
    if known is not None:
        return known
    former = known_membership(state_dir, host, join.root)
    if join.token is None and former is not None and former.role is not role:
        raise _other_command(former.role, "it leads this host back to the run as")
    addresses = KnownPeers(state_dir).addresses_of(join)
    enrollee = Enrollee.with_token(join.root, host, token_for(role, join))
    papers = await _first_answer(addresses, enrollee, TERMS)
    folder = membership_folder(state_dir, join.root)
    keep_papers(folder, papers)
    return Membership(join.root, host, papers, folder)


async def usable_membership(
    join: JoinString, role: Role, state_dir: Path, host: HostKey, *, keeps: bool = True
) -> Membership | None:
    """Return the membership that this node has already; None if it must show a token.

    Args:
        join: The join string.
        role: The role that the command needs.
        state_dir: The state folder.
        host: This node's identity.
        keeps: Whether renewed papers are kept in the state folder.

    Raises:
        DecodError: As in `enter`.
    """
    known = known_membership(state_dir, host, join.root, keeps=keeps)
    if known is None or known.role is not role:
        return None
    try:
        await make_usable(known, KnownPeers(state_dir).addresses_of(join))
    except RejectedError:
        if join.token is None:
            raise
        return None
    return known


def token_for(role: Role, join: JoinString) -> Token:
    """Return the token of a join string that is to let a node in.

    Args:
        role: The role that the command needs.
        join: The join string.

    Raises:
        RejectedError: It has none (E-REJ-014), or one for another command (E-REJ-013).
    """
    token = join.token
    if token is None:
        raise RejectedError(
            "this host is not a member of the run",
            why="the join string has no token: it only leads members back",
            fix="ask the organiser for a join string with a token",
            code="E-REJ-014",
        )
    if token.role is not role:
        raise _other_command(token.role, "its token admits")
    return token


def _other_command(role: Role, who: str) -> RejectedError:
    """Return the error for a join string that is not for the command that it was given to.

    Args:
        role: The role for which it is.
        who: The beginning of the reason.
    """
    if role is Role.DATA:
        return RejectedError(
            "this join string is for a data node",
            why=f"{who} a node that is started with `decod leader RUN.toml --join`, which reads the"
            " data and can lead",
            fix="type `decod leader RUN.toml --join JOINSTRING`, with this string, at a host that"
            " has the organiser's run file and the same prepared data. To lend a device only, ask"
            " for the line that begins with `join string:`",
            code="E-REJ-013",
        )
    return RejectedError(
        "this join string is for a volunteer",
        why=f"{who} a node that is started with `decod join`, which gets a stage from the leader",
        fix="type `decod join JOINSTRING`, with this string. For a further data node, ask for the"
        " line `join string for a data node:`, or for `decod token create --role data` at the host"
        " that has started the run",
        code="E-REJ-013",
    )


async def make_usable(known: Membership, addresses: tuple[str, ...]) -> None:
    """Renew the papers of a membership if they have expired.

    Args:
        known: The membership, from an earlier time in the run.
        addresses: Nodes to ask.

    Raises:
        RejectedError: They are not renewed, or it is too late for that (E-REJ-014).
        DecodError: As in `enter`.
    """
    now_s = wall_clock()
    if now_s < known.papers.expires_s:
        return
    if known.root_key is None and now_s > expiry_s(known.papers.renewal_chain):
        raise RejectedError(
            "this host's membership has expired",
            why="it was away for too long",
            fix="ask the organiser for a new join string",
            code="E-REJ-014",
        )
    known.adopt(await _next_papers(known, addresses, TERMS))


async def _first_answer(
    addresses: tuple[str, ...], enrollee: Enrollee, terms: PaperTerms
) -> Papers:
    """Return the first papers that a node gives. A node that does not lead says who does."""
    errors = list[DecodError]()
    waiting, asked = list(addresses), set[str]()
    while waiting:
        address = waiting.pop(0)
        if address in asked:
            continue
        asked.add(address)
        try:
            return await enroll(address, enrollee, now_s=wall_clock(), terms=terms)
        except AskLeaderError as error:
            errors.append(error)
            if error.leader_address:
                waiting.insert(0, error.leader_address)
        except (NetworkError, RejectedError, PeerError) as error:
            errors.append(error)
    if not errors:
        raise NetworkError(
            "no data node's address is known",
            why="only a data node can renew this node's membership",
            fix="nothing: it is tried again",
            code="E-NET-027",
        )
    raise most_telling(errors)


def most_telling(errors: list[DecodError]) -> DecodError:
    """Return the error of several nodes that says most to the operator, the first among equals.

    A refusal says more than silence does. But a token that one node does not know, another one may
    know that will answer later.
    """

    def rank(error: DecodError) -> int:
        if isinstance(error, UnansweredError):
            return 1
        if isinstance(error, UnknownTokenError):
            return 2
        return 0 if isinstance(error, RejectedError) else 3

    return min(errors, key=rank)


async def keep_renewed(
    membership: Membership,
    addresses: Callable[[], tuple[str, ...]],
    terms: PaperTerms,
    note: Callable[..., None],
    say: Say,
    renewed: Callable[[], None],
) -> None:
    """Renew a membership whenever two thirds of its life are over. Never returns.

    Args:
        membership: This node's.
        addresses: Returns the data nodes to ask, the leader first.
        terms: How long papers last, as far as this node issues them to itself.
        note: Takes the name of an event, and its fields as keywords.
        say: Takes lines for the operator's terminal.
        renewed: Called after each renewal.
    """
    membership.on_renewed.append(renewed)
    try:
        while True:
            papers = membership.papers
            # Not all of it at once: a host may sleep meanwhile, or its clock be set.
            await asyncio.sleep(min(max(papers.renews_s - wall_clock(), _PAUSE_LEAST_S), _PAUSE_S))
            if wall_clock() < papers.renews_s:
                continue
            try:
                membership.adopt(await _next_papers(membership, addresses(), terms))
                note("member.renewed", until_s=round(membership.papers.expires_s))
            except ConfigError as error:
                say(str(error))
            except (NetworkError, RejectedError, PeerError) as error:
                left_s = papers.expires_s - wall_clock()
                note("member.unrenewed", reason=error.what, left_s=round(left_s))
                await asyncio.sleep(min(max(left_s / 4, _PAUSE_LEAST_S), _PAUSE_S))
    finally:
        membership.on_renewed.remove(renewed)


async def _next_papers(
    membership: Membership, addresses: tuple[str, ...], terms: PaperTerms
) -> Papers:
    """Return new papers: from this node itself as long as it may issue them."""
    papers, now_s = membership.papers, wall_clock()
    if membership.root_key is not None:
        return founder_papers(membership.root_key, membership.host, terms, now_s)
    issuer = papers.issuer
    if issuer is not None:
        left_s = expiry_s(issuer.certificate) - now_s
        if left_s > (1 - RENEWS_AFTER) * terms.issuing_s:
            return certified(issuer, papers.credential, terms, now_s, papers.tls_key)
    shown = membership.tls if now_s < papers.expires_s else membership.renewal_tls
    return await _first_answer(addresses, Enrollee.renewing(membership, shown), terms)

"""Papers on disk: kept whole, only for their owner, and never taken for another node's."""

import json
from pathlib import Path

import pytest

from decod.membership.certificates import Purpose, caller_of, first_of
from decod.membership.papers import RENEWS_AFTER, Papers, PaperTerms, keep_papers, load_papers
from decod.protocol.core.view import Role
from tests.support.members import ROOT, data_node, host_key, new_volunteer, volunteer


@pytest.mark.parametrize("role", Role)
def test_papers_survive_their_file(tmp_path: Path, role: Role) -> None:
    membership = (data_node if role is Role.DATA else volunteer)("node")
    keep_papers(tmp_path, membership.papers)
    assert (tmp_path / "papers.json").stat().st_mode & 0o077 == 0
    found = load_papers(tmp_path, membership.host, ROOT.public)
    assert found is not None
    assert (found.chain, found.renewal_chain) == (
        membership.papers.chain,
        membership.papers.renewal_chain,
    )
    assert found.credential == membership.papers.credential
    assert (found.issuer is not None) == (role is Role.DATA)
    assert load_papers(tmp_path, host_key("another"), ROOT.public) is None
    assert load_papers(tmp_path, membership.host, host_key("another").public) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda fields: [],
        lambda fields: fields | {"tls_key": "x"},
        lambda fields: fields | {"credential": "00"},
        lambda fields: fields | {"chain": ""},
        lambda fields: fields | {"issued_s": "soon"},
        lambda fields: {key: fields[key] for key in ("chain", "credential")},
        lambda fields: fields | {"issuing_key": fields["tls_key"]},
    ],
)
def test_a_damaged_file_holds_no_papers(tmp_path: Path, damage: object) -> None:
    membership = volunteer("node")
    assert load_papers(tmp_path, membership.host, ROOT.public) is None
    keep_papers(tmp_path, membership.papers)
    file = tmp_path / "papers.json"
    assert callable(damage)
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    assert load_papers(tmp_path, membership.host, ROOT.public) is None
    file.write_text("{")
    assert load_papers(tmp_path, membership.host, ROOT.public) is None


def caller(papers: Papers, chain: bytes) -> tuple[Purpose, bool]:
    found = caller_of(first_of(chain))
    assert found.node_id == papers.credential.node_id
    return found.purpose, found.is_data


def test_a_certificate_says_what_it_is_for() -> None:
    for membership, is_data in ((data_node("a"), True), (volunteer("b"), False)):
        papers = membership.papers
        assert caller(papers, papers.chain) == (Purpose.PEER, is_data)
        assert caller(papers, papers.renewal_chain) == (Purpose.RENEWAL, is_data)


def test_papers_are_renewed_after_two_thirds_of_their_life() -> None:
    terms = PaperTerms(certificate_s=600.0)
    papers = new_volunteer("node", terms=terms, now_s=1000.0).papers
    assert papers.expires_s == 1600.0
    assert papers.renews_s == pytest.approx(1000.0 + RENEWS_AFTER * 600.0)

"""A proof holds its signer to one tensor, and nobody can make another's."""

from dataclasses import replace

import pytest

from decod.ids import Iteration, MicrobatchId, RunId
from decod.limits import DIGEST_BYTES, PROOF_BYTES
from decod.membership.identity import new_identity
from decod.membership.statements import TensorProofs
from decod.protocol.core.proofs import Subject, digest_in

RUN = RunId("r" * 26)
DIGEST = bytes(range(DIGEST_BYTES))
SUBJECT = Subject(Iteration(3, 2, 1), MicrobatchId(3, 0, 7), is_gradient=True)
SIGNER, OTHER = new_identity(), new_identity()
PROOF = TensorProofs(SIGNER, RUN).proof_of(DIGEST, SUBJECT)


def test_a_proof_tells_its_signer_and_the_digest() -> None:
    assert len(PROOF) == PROOF_BYTES
    assert digest_in(PROOF) == DIGEST
    assert TensorProofs(OTHER, RUN).signer_of(PROOF, SUBJECT) == SIGNER.node_id


def test_who_signs_again_makes_the_same_proof() -> None:
    assert TensorProofs(SIGNER, RUN).proof_of(DIGEST, SUBJECT) == PROOF


@pytest.mark.parametrize(
    "subject",
    [
        replace(SUBJECT, is_gradient=False),
        replace(SUBJECT, iteration=Iteration(3, 3, 1)),
        replace(SUBJECT, iteration=Iteration(3, 2, 0)),
        replace(SUBJECT, microbatch=MicrobatchId(3, 0, 8)),
    ],
)
def test_a_proof_is_of_one_thing(subject: Subject) -> None:
    assert TensorProofs(OTHER, RUN).signer_of(PROOF, subject) is None


def test_a_proof_is_of_one_run() -> None:
    assert TensorProofs(OTHER, RunId("s" * 26)).signer_of(PROOF, SUBJECT) is None


@pytest.mark.parametrize("place", range(0, PROOF_BYTES, 9))
def test_an_altered_proof_is_nobodys(place: int) -> None:
    altered = bytearray(PROOF)
    altered[place] ^= 1
    assert TensorProofs(OTHER, RUN).signer_of(bytes(altered), SUBJECT) is None


@pytest.mark.parametrize("proof", [b"", PROOF[:-1], PROOF + b"\0", b"\1" * PROOF_BYTES])
def test_other_bytes_are_nobodys_proof(proof: bytes) -> None:
    assert TensorProofs(OTHER, RUN).signer_of(proof, SUBJECT) is None

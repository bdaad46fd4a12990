"""Values of the fields of messages about audits, for tests of the wire."""

from typing import Any

from hypothesis import strategies as st

from decod.protocol.core.messages.audits import AuditCase, AuditedWork, Finding
from decod.protocol.core.proofs import PROOF_BYTES
from decod.protocol.core.sketch import ERROR_MAX, SEED_BYTES, SKETCH_BYTES


def of_audits(node_ids: st.SearchStrategy[Any], counts: st.SearchStrategy[int]) -> dict[str, Any]:
    """Return what fields may hold, by their names."""
    sketches = st.just(b"") | st.binary(min_size=SKETCH_BYTES, max_size=SKETCH_BYTES)
    proofs = st.just(b"") | st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES)
    errors = st.floats(0, ERROR_MAX)
    return {
        "cases": st.lists(
            st.builds(
                AuditCase,
                node_ids,
                st.lists(node_ids, min_size=1, max_size=4, unique=True).map(tuple),
                counts,
                st.binary(min_size=SEED_BYTES, max_size=SEED_BYTES),
                st.booleans(),
            ),
            min_size=1,
            unique_by=lambda case: case.relay,
        ).map(tuple),
        "relay": node_ids,
        "shares": st.dictionaries(node_ids, sketches, max_size=4).map(lambda of: tuple(of.items())),
        "opinion": counts,
        "is_gradient": st.booleans(),
        "sketch": sketches,
        "sketches": st.lists(sketches, max_size=4).map(tuple),
        "doubted": st.booleans(),
        "proof": proofs,
        "findings": st.lists(
            st.builds(
                Finding,
                st.sampled_from(AuditedWork),
                errors,
                st.lists(node_ids, max_size=3, unique=True).map(tuple),
            ),
            max_size=2,
            unique_by=lambda each: (each.work, each.suspects),
        ).map(tuple),
    }

"""Timeouts for simulated runs whose iterations last for hours, and in which nobody hangs."""

from decod.run.protocol_config import ProtocolConfig

_PATIENCE_S = 36_000.0


def patient_protocol(min_nodes_per_stage: int) -> ProtocolConfig:
    """Return timeouts that no slow link reaches, for members that keep all activations."""
    return ProtocolConfig(
        min_nodes_per_stage=min_nodes_per_stage,
        complete_timeout_s=_PATIENCE_S,
        iteration_timeout_s=2 * _PATIENCE_S,
        heartbeat_interval_s=10.0,
        heartbeat_timeout_s=30.0,
        election_timeout_s=60.0,
        utilisation_interval_s=60.0,
        keep_max_bytes=1 << 43,
        snapshot_every_iterations=0,
    )

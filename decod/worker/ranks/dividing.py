"""How a host's devices divide what its compute process is told: rows, threads and memory."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from decod.run.training_config import BatchConfig
from decod.train.executor_config import rows_of_devices
from decod.worker.configure import num_threads_of, parse_dataclass
from decod.worker.device import CPU


def divided(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the `configure` messages of all ranks, from the one that the node has sent.

    A single device gets the message as it is.

    Raises:
        ConfigError: A microbatch has fewer sequences than there are devices.
    """
    devices = str(message.get("device", CPU)).split(",")
    if len(devices) == 1:
        return [dict(message)]
    batch = parse_dataclass(BatchConfig, "batch", message.get("batch"))
    rows = rows_of_devices(batch, len(devices))
    shared = dict(message) | {"num_threads": share_of_threads(message, len(devices))}
    return [
        {**shared, "device": device, "rows": list(astuple(own))}
        for device, own in zip(devices, rows, strict=True)
    ]


def share_of_threads(message: Mapping[str, Any], num_devices: int) -> int:
    """Return the threads of each rank: its part of those that the node may use, at least one."""
    return max(1, num_threads_of(message) // num_devices)


def facts_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the node is told of all devices, from what is known of each.

    The memory is that of the smallest device. Ranks on one device have equal parts of it.
    """
    names = Counter(each["device"] for each in facts)
    texts = "; ".join(each["device_text"] for each in facts)
    return {
        **facts[0],
        "device": ",".join(each["device"] for each in facts),
        "device_text": f"{len(facts)} devices: {texts}",
        "memory_bytes": min(each["memory_bytes"] // names[each["device"]] for each in facts),
        "ranks": [{"device_uuid": each["device_uuid"], "pid": each["pid"]} for each in facts[1:]],
    }

"""A `decod` whose compute process sends one tensor that no receiver can compute with.

    python -m tests.support.spoiling activation 5 join JOINSTRING ...

From the given iteration on it replaces the first scale of an `activation` or a `gradient` by NaN,
once. Everything else about it is real. The run's activations are compressed to `int8`.
"""

import math
import re
from typing import TYPE_CHECKING, Any

from tests.support import faulty_compute

if TYPE_CHECKING:
    from torch import Tensor


def _spoil(kind: str, iteration: str) -> None:
    """Spoil the first tensor of that kind."""
    import torch

    from decod.train.passes import ActivationCodec

    send, spoiled = ActivationCodec.sent, list[str]()
    what = re.compile(rf"{kind} of microbatch (\d+)/")

    def spoiling(
        codec: ActivationCodec, value_BTD: "Tensor", name: str, *how: Any, **named: Any
    ) -> "Tensor":
        sent = send(codec, value_BTD, name, *how, **named)
        found = what.match(name)
        if found and int(found[1]) >= int(iteration) and not spoiled:
            spoiled.append(name)
            sent[:4].view(torch.float32)[0] = math.nan
        return sent

    ActivationCodec.sent = spoiling  # type: ignore[method-assign]


if __name__ == "__main__":
    faulty_compute.run("tests.support.spoiling", 2, _spoil)

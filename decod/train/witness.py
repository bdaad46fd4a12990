"""What a member can tell of others' work.

A member keeps a sketch of each activation and gradient that it has used in an iteration. If another
member's work is audited, those who have got something from it tell the auditors their sketches. The
auditors compute the same tensors, and compare.
"""

from torch import Tensor

from decod.errors import TrainingError
from decod.ids import MicrobatchId
from decod.protocol.core.sketch import Sketch
from decod.train.sketch import Sketcher, new_seed


class Witness:
    """The sketches of what a member has used in one iteration.

    Args:
        keeps: Whether to keep any: nothing is audited otherwise.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.clear()

    def clear(self) -> None:
        """Forget the iteration."""
        self._sketcher = Sketcher(new_seed())
        self._passes: dict[tuple[MicrobatchId, bool], Sketch] = {}

    def used_activation(self, mb: MicrobatchId, activation: Tensor) -> None:
        """Keep the sketch of what the stage before has computed."""
        if self._keeps:
            self._passes[mb, False] = self._sketcher.sketch(activation)

    def used_gradient(self, mb: MicrobatchId, gradient: Tensor) -> None:
        """Keep the sketch of what the stage behind has computed."""
        if self._keeps:
            self._passes[mb, True] = self._sketcher.sketch(gradient)

    def of_pass(self, mb: MicrobatchId, *, is_gradient: bool) -> Sketch:
        """Return the sketch of what another stage has computed of a microbatch.

        Raises:
            TrainingError: This member has used no such tensor.
        """
        sketch = self._passes.get((mb, is_gradient))
        if sketch is None:
            raise TrainingError(
                f"nothing is known of microbatch {mb}",
                why="an audit asks for what this member has not used in the iteration",
                fix="nothing: the audit goes on without it",
            )
        return sketch

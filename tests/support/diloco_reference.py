"""DiLoCo by hand, in one process: the oracle for runs whose members step by themselves.

It is written with torch's optimizers alone. A replica of a stage is a dictionary of tensors. Each
microbatch is computed with the replicas that it met in the run under test.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decod.compression.plan import StagePlans
from decod.model.shape import LORA_A, LORA_B, trained_shapes, whole_matrices
from decod.model.stage import empty_model, initial_weight
from decod.run.adapter_config import NO_ADAPTER, AdapterConfig
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import OptimizerConfig, SyncConfig
from decod.train.optimizers import learning_rate
from tests.support.reference import Steppers, make_stepper, plain_autograd

Path = tuple[str, ...]
"""The node that served a microbatch at each stage, stage 0 first."""


@dataclass
class Replica:
    """One member's own weights, and its inner optimizer."""

    stage: int
    weights: dict[str, Tensor]
    start: dict[str, Tensor]
    """The weights with which its local phase began."""
    inner: torch.optim.Optimizer | Steppers
    num_now: int = 0
    """Microbatches of the iteration."""
    num_learnt: Counter[str] = field(default_factory=Counter)
    """Microbatches since the last average, for each parameter."""


@dataclass
class Stage:
    """What the replicas of a stage have in common."""

    anchor: dict[str, Tensor]
    outer: torch.optim.SGD
    fragments: list[list[str]]
    """Names of the parameters that are averaged together, in turn."""
    delayed: dict[str, Tensor] | None = None
    """With overlap: the average that the next outer step takes."""
    replicas: list[Replica] = field(default_factory=list)


class Reference:
    """The same training in plain torch, in float64.

    Args:
        model: The model.
        stages: How it is cut.
        optimizer: The inner optimizer.
        sync: The outer optimizer.
        seed: Of the initial weights.
        adapter: What is trained, if it is not the whole model.
        base: The weights that are not trained, by name.
    """

    def __init__(
        self,
        model: ModelConfig,
        stages: StagesConfig,
        optimizer: OptimizerConfig,
        sync: SyncConfig,
        *,
        seed: int,
        adapter: AdapterConfig = NO_ADAPTER,
        base: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._adapter, self._base = adapter, base or {}
        self._model, self._optimizer, self._sync, self._seed = model, optimizer, sync, seed
        self._module = empty_model(model)
        by_name = self._module.parameters_by_name()
        inside = {id(parameter): name for name, parameter in self._module.named_parameters()}
        self._names = {name: inside[id(parameter)] for name, parameter in by_name.items()}
        """The module's own names."""
        run = RunConfig(model=model, stages=stages, adapter=adapter, optimizer=optimizer)
        indexes = range(stages.num_relay_stages + 1)
        self._shapes = [trained_shapes(run, k) for k in indexes]
        self._hidden = [whole_matrices(run, k) for k in indexes]
        self.replicas: dict[str, Replica] = {}
        self.stages = [self._stage(k) for k in range(len(self._shapes))]

    def _initial(self, stage: int) -> dict[str, Tensor]:
        return {
            name: initial_weight(self._model, seed=self._seed, name=name, shape=shape)
            .double()
            .requires_grad_()
            for name, shape in self._shapes[stage].items()
        }

    def _stage(self, index: int) -> Stage:
        anchor = self._initial(index)
        outer = torch.optim.SGD(
            # The optimizer takes no empty list.
            [*anchor.values()] or [torch.zeros(1, requires_grad=True)],
            lr=self._sync.outer_lr,
            momentum=self._sync.outer_momentum,
            nesterov=self._sync.outer_momentum > 0,
        )
        shapes = dict(sorted(self._shapes[index].items()))
        plans = StagePlans([*shapes.values()], self._sync.fragments)
        names = iter(shapes)
        fragments = [[next(names) for _ in each.shapes] for each in plans.fragments[1:]]
        return Stage(anchor, outer, fragments)

    def add(self, node: str, stage: int) -> None:
        """Let a member begin from the anchor."""
        weights = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in self.stages[stage].anchor.items()
        }
        start = {name: tensor.detach().clone() for name, tensor in weights.items()}
        hidden = [weights[name] for name in sorted(self._hidden[stage])]
        stepper = make_stepper(weights.values(), self._optimizer, hidden)
        replica = Replica(stage, weights, start, stepper)
        self.replicas[node] = replica
        self.stages[stage].replicas.append(replica)

    def iterate(
        self,
        iteration: int,
        batch: Sequence[tuple[np.ndarray, Path]],
        *,
        arrival: bool = False,
        last: bool = False,
    ) -> None:
        """Train on the microbatches of an iteration, each along its path.

        An arrival uses the average that has travelled. So does the end of a local phase, if it is
        not used yet. The last iteration of a run uses all that has been averaged.
        """
        for tokens, path in batch:
            met = [self.replicas[node] for node in path]
            trained = {name: w for replica in met for name, w in replica.weights.items()}
            weights = {self._names[name]: w for name, w in self._merged(trained).items()}
            whole = torch.from_numpy(tokens)
            with plain_autograd():
                logits = torch.func.functional_call(self._module, weights, (whole[:, :-1],))
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, self._model.vocab_size), whole[:, 1:].reshape(-1)
            )
            torch.autograd.backward([loss])
            for replica in met:
                replica.num_now += 1
        for replica in self.replicas.values():
            self._inner_step(replica, learning_rate(self._optimizer, iteration))
        number, rest = divmod(iteration, self._sync.every // self._sync.fragments)
        if not rest or last:
            for stage in filter(lambda each: each.anchor, self.stages):
                here = stage.fragments[(number - 1) % self._sync.fragments]
                self._outer_step(stage, [*stage.anchor] if last else here, last=last)
        elif arrival:
            for stage in filter(lambda each: each.anchor, self.stages):
                assert stage.delayed is not None, "it was used already"
                self._use(stage, stage.delayed)
                stage.delayed = None

    def _merged(self, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all weights of the model, by definition: W + alpha / rank * B A."""
        if not self._base:
            return trained
        merged = {**self._base}
        for name, second in trained.items():
            if name.endswith(LORA_B):
                change = second @ trained[name.removesuffix(LORA_B) + LORA_A]
                target = name.removesuffix(LORA_B) + "weight"
                merged[target] = merged[target] + change * self._adapter.scaling
        return merged

    def _inner_step(self, replica: Replica, rate: float) -> None:
        if replica.num_now:
            for weights in replica.weights.values():
                assert weights.grad is not None
                weights.grad /= replica.num_now
            for group in replica.inner.param_groups:
                group["lr"] = rate
            replica.inner.step()
        replica.inner.zero_grad()
        replica.num_learnt.update(dict.fromkeys(replica.weights, replica.num_now))
        replica.num_now = 0

    @torch.no_grad()
    def _use(self, stage: Stage, average: dict[str, Tensor] | None) -> None:
        """Move the anchor, and with it what members have learnt since their phases began."""
        if average is None:
            return
        for name, anchor in stage.anchor.items():
            anchor.grad = average.get(name)
        stage.outer.step()
        for replica, name in itertools.product(stage.replicas, average):
            replica.weights[name] += stage.anchor[name] - replica.start[name]
            replica.start[name].copy_(stage.anchor[name])

    @torch.no_grad()
    def _outer_step(self, stage: Stage, here: Sequence[str], *, last: bool) -> None:
        # All parameters together weigh as much as the one whose average is longest ago.
        learnt = [max(replica.num_learnt[name] for name in here) for replica in stage.replicas]
        average = {
            name: sum(
                (
                    num * (replica.start[name] - replica.weights[name])
                    for num, replica in zip(learnt, stage.replicas, strict=True)
                ),
                torch.zeros_like(stage.anchor[name]),
            )
            / sum(learnt)
            for name in here
        }
        guesses = [
            {name: replica.start[name] - replica.weights[name] for name in here}
            for replica in stage.replicas
        ]
        due = [average]
        if self._sync.overlap:
            due = [stage.delayed, average] if last else [stage.delayed]
            stage.delayed = average
        for used in due:
            self._use(stage, used)
        for (replica, guess), name in itertools.product(
            zip(stage.replicas, guesses, strict=True), here
        ):
            replica.num_learnt[name] = 0
            replica.start[name].copy_(stage.anchor[name])
            if self._sync.overlap and not last:
                replica.start[name] -= guess[name]
            replica.weights[name].copy_(replica.start[name])

    @property
    def anchors(self) -> dict[str, Tensor]:
        """The weights of the whole model after the last outer step."""
        return {
            name: tensor.detach() for stage in self.stages for name, tensor in stage.anchor.items()
        }

"""Replicas of a model that train in one process: members of a run without nodes and sockets.

Each replica is a chain of `StageExecutor`s, as in the compute processes of a run. Averages go
through the executors' own exchanges, part by part and phase by phase, as members send them.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import decod.train.exchange
from decod.data.dataset import Dataset
from decod.ids import MicrobatchId
from decod.model.stage import empty_model
from decod.run.run_config import RunConfig
from decod.run.training_config import OptimizerName
from decod.train.diloco import DiLoCoState
from decod.train.exchange import Place, Residuals
from decod.train.executor import Sources, StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.optimizers import OptimizerState

_STALE_WEIGHT = decod.train.exchange.STALE_WEIGHT


class Replicas:
    """The members of all stages. Each data node's microbatches go through a chain of their own.

    Args:
        run: The run. `batch.num_data_nodes` is the number of replicas.
        dataset: The tokens.
        delay: Iterations after which an average that travels counts. None: `sync.every`.
        goes_back: Whether members go back to the anchor when an average begins to travel.
        anew: Whose moments become zero when a local phase ends. `churn`: one replica's, in turn.
            `resumed`: all of them, after each quarter of the run.
        late: If given, the last replica misses every other average that travels, and what it
            contributes counts so much in the next.
    """

    def __init__(
        self,
        run: RunConfig,
        dataset: Dataset,
        delay: int | None = None,
        *,
        goes_back: bool = False,
        anew: str = "",
        late: float | None = None,
    ) -> None:
        self._run, self._dataset = run, dataset
        self._anew, self._misses = anew, late is not None
        decod.train.exchange.STALE_WEIGHT = _STALE_WEIGHT if late is None else late
        self._delay = run.sync.every if delay is None else delay
        self._goes_back = goes_back
        config = ExecutorConfig(run=run)
        stages = range(run.stages.num_relay_stages + 1)
        self._chains = [
            [StageExecutor(config, tokens=dataset) for _ in stages]
            for _ in range(run.batch.num_data_nodes)
        ]
        for chain in self._chains:
            for index, executor in enumerate(chain):
                executor.build(index)
        self._stages = list(zip(*self._chains, strict=True))
        self._travelling: dict[int, list[Tensor]] = {}
        """By stage, with overlap: the means of the last local phase."""
        self.iteration = self.phase_end = 0
        """The last that all have committed, and the last that ended a local phase."""

    # Training

    def iterate(self) -> float:
        """Train for one iteration. Return the mean loss of its microbatches."""
        iteration = self.iteration + 1
        # The average of the last local phase begins here, so that a checkpoint never lies in it.
        if self._run.sync.overlap and self.iteration and self.phase_end == self.iteration:
            for index, members in enumerate(self._stages):
                self._travelling[index] = self._average(members, self.iteration, ahead=True)
        num_microbatches = self._run.batch.num_microbatches
        losses = [
            _train(chain, MicrobatchId(iteration, replica, index))
            for replica, chain in enumerate(self._chains)
            for index in range(num_microbatches)
        ]
        last = iteration == self._run.num_iterations
        ends_phase = last or iteration - self.phase_end >= self._run.sync.every
        for index, members in enumerate(self._stages):
            if ends_phase:
                self._end_phase(index, members, iteration)
            else:
                self._step(index, members, iteration)
            for member in members:
                member.commit(iteration)
                if ends_phase and self._goes_back and not last:
                    _go_back(member)
            for member in self._beginners(members, iteration) if ends_phase and not last else ():
                _begin_anew(member)
        self.iteration = iteration
        self.phase_end = iteration if ends_phase else self.phase_end
        return sum(losses) / len(losses)

    def _beginners(
        self, members: Sequence[StageExecutor], iteration: int
    ) -> Sequence[StageExecutor]:
        """Return who begins anew when a local phase ends."""
        if self._anew == "churn":
            return [members[iteration // self._run.sync.every % len(members)]]
        quarter = self._run.num_iterations // 4
        stops = self._anew == "resumed" and self.phase_end // quarter < iteration // quarter
        return members if stops else ()

    def _step(self, index: int, members: Sequence[StageExecutor], iteration: int) -> None:
        """Have one stage step amid a local phase."""
        means = list[Tensor]()
        if iteration - self.phase_end == self._delay:
            means = self._travelling.pop(index, [])
        for member in members:
            if means:
                missed = self._missed(members, member, len(means))
                how = Sources(len(means), missed=missed, ends_phase=False)
                member.propose(iteration, means, weights_total=0, how=how)
            else:
                member.step_locally(iteration)

    def _end_phase(self, index: int, members: Sequence[StageExecutor], iteration: int) -> None:
        """Have one stage step, and end its local phase."""
        at_once = iteration == self._run.num_iterations or not self._run.sync.overlap
        ahead = self._travelling.pop(index, [])
        now = self._average(members, iteration) if at_once else []
        for member in members:
            means = [*ahead, *now]
            total = None if now else 0
            how = Sources(len(ahead), missed=self._missed(members, member, len(ahead)))
            member.propose(iteration, means, weights_total=total, how=how)

    def _missed(
        self, members: Sequence[StageExecutor], member: StageExecutor, num_means: int
    ) -> tuple[int, ...]:
        """Return the parts of an average that travels which lack a member's contribution."""
        return tuple(range(num_means)) if self._is_late(members, member) else ()

    def _is_late(self, members: Sequence[StageExecutor], member: StageExecutor) -> bool:
        """Whether a member comes too late for the average of the last local phase."""
        number = self.phase_end // self._run.sync.every
        return self._misses and number % 2 == 1 and member is members[-1]

    def _average(
        self, members: Sequence[StageExecutor], iteration: int, *, ahead: bool = False
    ) -> list[Tensor]:
        """Return the means of an average, of all phases. Each member reduces one part."""
        num_parts = len(members)
        # Only the last interval of a run may be shorter, and its average does not travel.
        before = iteration - self._run.sync.every if ahead else self.phase_end
        weight = (iteration - before) * self._run.batch.num_microbatches
        exchanges = [member.exchange(ahead=ahead) for member in members]
        parts = [member.gather(num_parts, iteration, ahead=ahead) for member in members]
        found, means = list[Tensor](), list[Tensor]()
        for phase in range(members[0].config.run.sync.num_phases):
            if phase:
                parts = [exchange.parts(phase, num_parts, means) for exchange in exchanges]
            there = [
                own
                for own, member in zip(parts, members, strict=True)
                if not (ahead and self._is_late(members, member))
            ]
            means = [
                exchange.reduce(
                    [own[part] for own in there],
                    Place(part, num_parts, phase),
                    [weight] * len(there),
                )
                for part, exchange in enumerate(exchanges)
            ]
            found += means
        return found

    # Measuring

    def average_bytes(self) -> int:
        """Return the bytes of one average: a member's contribution, and all means."""
        num_parts, total = len(self._chains), 0
        for members in self._stages:
            exchange = members[0].exchange(ahead=self._run.sync.overlap)
            for phase in range(members[0].config.run.sync.num_phases):
                for dtype, sizes in (
                    exchange.part_sizes(phase, num_parts),
                    exchange.mean_sizes(phase, num_parts),
                ):
                    total += dtype.itemsize * sum(sizes)
        return total

    def weights(self) -> dict[str, Tensor]:
        """Return what the members have in common, by name. They are views: do not change."""
        return {k: v for executor in self._chains[0] for k, v in executor.weights().items()}

    def num_parameters(self) -> int:
        """Return the size of the model."""
        return sum(executor.num_elements for executor in self._chains[0])

    @torch.no_grad()
    def held_out_loss(self, num_microbatches: int) -> float:
        """Return the mean loss of what the members have in common, on tokens of no iteration."""
        model, first = empty_model(self._run.model), self._run.num_iterations + 1
        model.place(self.weights())
        total, num_data_nodes = 0.0, self._run.batch.num_data_nodes
        for index in range(num_microbatches):
            iteration, data_node = divmod(index, num_data_nodes)
            mb = MicrobatchId(first + iteration, data_node, 0)
            tokens = self._dataset.microbatch(mb, self._run.batch, self._run.seed)
            tokens_BT = torch.from_numpy(tokens)
            total += float(model.loss(model.embed(tokens_BT[:, :-1]), tokens_BT[:, 1:]))
        return total / num_microbatches

    # Checkpoints

    def save(self, path: Path, text: str) -> None:
        """Write everything that the members hold, and a text. Only at the end of a phase."""
        assert self.phase_end == self.iteration, "members hold gradients of an average"
        tensors = dict[str, Tensor]()
        for name, executor in self._named():
            tensors |= {f"{name}.{key}": value for key, value in _tensors_of(executor).items()}
        numbers = [
            str(_inner_of(executor).num_steps) for chain in self._chains for executor in chain
        ]
        facts = {"iteration": str(self.iteration), "num_steps": " ".join(numbers), "text": text}
        staging = path.with_suffix(".new")
        # Members may share tensors, which the format refuses.
        save_file({key: value.clone() for key, value in tensors.items()}, staging, metadata=facts)
        staging.replace(path)

    def load(self, path: Path) -> str:
        """Go on from what `save` has written. Return the text."""
        with safe_open(path, framework="pt") as file:
            facts: dict[str, str] = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.iteration = self.phase_end = int(facts["iteration"])
        for (name, executor), num_steps in zip(
            self._named(), facts["num_steps"].split(), strict=True
        ):
            own = {
                key.removeprefix(f"{name}."): value
                for key, value in tensors.items()
                if key.startswith(f"{name}.")
            }
            _restore(executor, own, int(num_steps), self.iteration)
        return facts["text"]

    def _named(self) -> list[tuple[str, StageExecutor]]:
        return [
            (f"replica{replica}.stage{stage}", executor)
            for replica, chain in enumerate(self._chains)
            for stage, executor in enumerate(chain)
        ]


def _train(chain: Sequence[StageExecutor], mb: MicrobatchId) -> float:
    """Run one microbatch forward and backward through a replica. Return its loss."""
    hidden_BTD = chain[0].passes.embed(mb)
    for executor in chain[1:]:
        hidden_BTD = executor.passes.forward(mb, hidden_BTD)
    gradient_BTD, loss = chain[0].passes.head(mb, hidden_BTD)
    for executor in reversed(chain[1:]):
        gradient_BTD = executor.passes.backward(mb, gradient_BTD)
    chain[0].passes.embed_backward(mb, gradient_BTD)
    return loss


# What follows reaches into the executors: in a run nobody goes back to an anchor while an average
# travels, and nobody keeps a member's own weights and residuals.


def _go_back(executor: StageExecutor) -> None:
    """Let a member begin its local phase with the anchor (DiLoCoX)."""
    state = executor._built.state.committed
    assert isinstance(state, DiLoCoState)
    state.inner.weights.copy_(state.anchor)
    state.start = state.anchor


def _begin_anew(executor: StageExecutor) -> None:
    """Put a newcomer in a member's place. Both begin with the anchor, but it has no moments."""
    state = executor._built.state.committed
    assert isinstance(state, DiLoCoState)
    for moment in state.inner.moments:
        moment.zero_()
    state.inner.num_steps = 0


_MOMENTS = OptimizerName.ADAMW.moments


def _inner_of(executor: StageExecutor) -> OptimizerState:
    committed = executor._built.state.committed
    inner: OptimizerState = committed.inner if isinstance(committed, DiLoCoState) else committed
    return inner


def _residuals_of(executor: StageExecutor) -> dict[str, Residuals]:
    built = executor._built
    return {"now": built.now._residuals, "ahead": built.ahead._residuals}


def _tensors_of(executor: StageExecutor) -> dict[str, Tensor]:
    committed, inner = executor._built.state.committed, _inner_of(executor)
    found = {"weights": inner.weights} | dict(zip(_MOMENTS, inner.moments, strict=True))
    if isinstance(committed, DiLoCoState):
        found |= {"anchor": committed.anchor, "momentum": committed.momentum}
        if committed.start is not committed.anchor:
            found["start"] = committed.start
        if committed.sending is not None:
            found["sending"] = committed.sending
    for name, residuals in _residuals_of(executor).items():
        if residuals._residual_P is not None:
            found[f"residual.{name}"] = residuals._residual_P
    return found


def _restore(
    executor: StageExecutor, tensors: dict[str, Tensor], num_steps: int, iteration: int
) -> None:
    state = executor._built.state
    inner = OptimizerState(tensors["weights"], tuple(tensors[name] for name in _MOMENTS), num_steps)
    if isinstance(state.committed, DiLoCoState):
        sending = tensors.get("sending")
        anchor, momentum = tensors["anchor"], tensors["momentum"]
        start = tensors.get("start", anchor)
        state.committed = DiLoCoState(inner, anchor, momentum, start, sending=sending)
    else:
        state.committed = inner
    state.iteration = state.anchor = iteration
    state.hash = executor.rule.hash(state.layout, state.committed)
    for name, residuals in _residuals_of(executor).items():
        residuals._residual_P = tensors.get(f"residual.{name}")
    executor._begin()

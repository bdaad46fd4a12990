"""Trains with real scripts while peers are killed and come back, and checks that nothing is lost.

    python scripts/soak_optimizer.py --minutes 5

Each peer is a training script with its node and its averaging process. Now and then one is killed,
whichever it is, or one that was killed is started again. Afterwards:
- Each sample of the peers that are left is in an average, outstanding, or dropped and counted so.
- Each average has as many samples as peers have given. Only those of a peer that was killed before
  it saw the average may be missing in that sum.
- Peers have had equal parameters after each round.
- The loss is that of one process with as many samples, within 2 %.
- No call of `step` took longer than `averaging_timeout_s`.
Exits with 1 if something of it does not hold.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn.utils import vector_to_parameters  # noqa: E402

from tests.support.scripts import RunningScript, Scripts, require_equal  # noqa: E402
from tests.support.training_script import (  # noqa: E402
    OPTIMIZERS,
    Script,
    flat,
    loss_of,
    make_model,
)

BATCH, STEPS = 16, 4
"""Samples of a step, and steps of each peer in a round."""
TIMEOUT_S = 20.0
LOSS_ERROR_MOST = 0.02
_NUM_JUDGED = 500
"""Steps whose data judge a model. Nobody trains with them."""
_JUDGE = 1 << 20
_TWIN = _JUDGE + 1

_never = threading.Event()


def usual(num: int) -> Script:
    """Return what each peer does."""
    settings = {
        "target_batch_size": num * STEPS * BATCH,
        "batch_size_per_step": BATCH,
        "averaging_timeout_s": TIMEOUT_S,
        "verbose": False,
    }
    return Script(
        settings=settings, optimizer="adamw", hidden=32, noise=0.5, step_s=0.15, dtype="float32"
    )


def loss_after(script: Script, parameters: torch.Tensor) -> float:
    """Return the loss of some parameters on data that nobody has trained with."""
    model, judge = make_model(script), replace(script, peer=_JUDGE)
    vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        return sum(loss_of(model, judge, step).item() for step in range(_NUM_JUDGED)) / _NUM_JUDGED


def twin(script: Script, rounds: int) -> torch.Tensor:
    """Return the parameters of one process that takes as many steps with as many samples."""
    size = script.settings["target_batch_size"]
    alone = replace(script, peer=_TWIN, settings={"batch_size_per_step": size})
    model = make_model(alone)
    optimizer = OPTIMIZERS[alone.optimizer](model.parameters())
    for step in range(rounds):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, alone, step))
        optimizer.step()
    return flat(model).detach()


class Storm:
    """Kills and restarts.

    Args:
        group: The scripts, all of which train.
        seed: Of the choice.
    """

    def __init__(self, group: Scripts, seed: int) -> None:
        self._group = group
        self._random = random.Random(seed)  # noqa: S311 - it is no secret who is killed.
        self._down: list[RunningScript] = []
        self.num_kills = self.num_restarts = 0

    def strike(self) -> str:
        """Restart a peer that was killed, or kill one."""
        if self._down:
            ended = self._down.pop()
            again = self._group.restart(ended).wait_joined()
            again.train()
            self.num_restarts += 1
            return f"{ended.name} is back"
        doomed = self._random.choice(self._group.living)
        doomed.kill()
        self._down.append(doomed)
        self.num_kills += 1
        return f"{doomed.name} was killed"


def complaints_of(group: Scripts, num_kills: int) -> list[str]:
    """Return what is wrong with accounts, averages and parameters; print what is counted."""
    found: list[str] = []
    for each in group.living:
        account = each.said("trained")[-1]
        parts = account["contributed"] + account["outstanding"] + account["dropped"]
        if account["stepped"] != parts:
            found.append(f"{each.name} has stepped {account['stepped']}, and accounts for {parts}")
    longest_s = max(a["longest_s"] for each in group.all for a in each.said("round"))
    if longest_s > TIMEOUT_S:
        found.append(f"a step took {longest_s:.1f} s")
    given: Counter[int] = Counter()
    totals: dict[int, set[int]] = {}
    for each in {one.state_dir: one for one in group.all}.values():
        for record in each.events("round.committed"):
            given[record["round"]] += record["own"]
            totals.setdefault(record["round"], set()).add(record["samples"])
    found += [f"round {number} has {each}" for number, each in totals.items() if len(each) > 1]
    missing = {n: max(each) - given[n] for n, each in totals.items() if max(each) != given[n]}
    if len(missing) > num_kills or any(lack < 0 for lack in missing.values()):
        found.append(f"of averages are missing, or too many, by round: {missing}")
    try:
        compared = require_equal(group.all)
    except AssertionError as error:
        found.append(str(error))
    else:
        print(f"{compared} rounds: equal parameters at all peers that saw them")
    print(
        f"{len(totals)} averages of {sum(map(max, totals.values()))} samples, of which peers that "
        f"were killed then gave {sum(missing.values())} in {len(missing)}; "
        f"longest step {longest_s:.1f} s"
    )
    return found


def soak(folder: Path, options: argparse.Namespace) -> list[str]:
    """Train through a storm; return what is wrong."""
    script = usual(options.peers)
    with Scripts(folder, script) as group:
        for each in group.start_run(options.peers):
            each.train()
        storm, begun_s = Storm(group, options.seed), time.monotonic()
        while time.monotonic() - begun_s < 60 * options.minutes:
            _never.wait(options.pause)
            print(f"{time.monotonic() - begun_s:5.0f} s  {storm.strike()}", flush=True)
        for each in group.living:
            each.stand_still()
        complaints = complaints_of(group, storm.num_kills)
        last = max(group.living, key=lambda each: int(each.said("trained")[-1]["round"]))
        account = last.said("trained")[-1]
        found = loss_after(script, torch.tensor(account["parameters"]))
        expected = loss_after(script, twin(script, account["round"]))
        print(
            f"{storm.num_kills} kills, {storm.num_restarts} restarts; loss {found:.5f} after "
            f"round {account['round']}, of one process {expected:.5f} ({found / expected - 1:+.2%})"
        )
        if abs(found / expected - 1) > LOSS_ERROR_MOST:
            complaints.append("the loss differs")
    return complaints


def main(arguments: Sequence[str]) -> int:
    """Soak and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--peers", type=int, default=8, help="that train (default: 8)")
    add("--minutes", type=float, default=5.0, help="how long the storm lasts (default: 5)")
    add("--pause", type=float, default=15.0, metavar="S", help="between two faults (default: 15)")
    add("--seed", type=int, default=1, help="of the choice of peers (default: 1)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="decod-soak-") as folder:
        complaints = soak(Path(folder), options)
    for complaint in complaints:
        print(f"WRONG: {complaint}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

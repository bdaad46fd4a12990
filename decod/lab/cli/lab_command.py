"""`decod lab`: research. Each of its commands is in a module of this folder."""

import click

from decod.lab.cli.plan_command import plan
from decod.lab.cli.simulate_command import simulate
from decod.lab.cli.study_command import study


@click.group(no_args_is_help=True)
def lab() -> None:
    """Plan, simulate, and repeat experiments of the papers.

    \b
    Examples:
      decod lab plan run run.toml --hosts hosts.json
      decod lab simulate --paper gwtf-table2 --seeds 2
      decod lab study hivemind-thesis --quick
    """


for command in (plan, simulate, study):
    lab.add_command(command)

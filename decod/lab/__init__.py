"""Research: what the papers have shown, repeated; planners and forecasts; runs in virtual time.

Nothing outside imports anything of it. `decod.cli.main` finds its commands by their names.
"""

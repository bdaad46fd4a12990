"""`decod doctor`: checks of this host, and of its way to a run, for a volunteer.

    facts (`host_facts`, `network_facts`, `asking`) -> checks (`host_checks`, `network_checks`)
    -> diagnoses, one a line

Gathering facts is what touches the system and the network. A check is a pure function of facts, and
returns one `Diagnosis`. `examine` connects the two.
"""

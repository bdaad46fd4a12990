"""Layouts of the servers organisation: who serves, who computes, and how long an iteration takes.

A stage has *servers*, which are reliable hosts, and *clients*, which are unreliable ones. Frontal
servers keep a stage's input, backward servers its output. Clients, and servers with a device,
compute. `servers_layout` holds the words, `stage_time` and `objective` the time of an iteration,
`paper_planner` the heuristic of the paper, `servers_search` decod's planner, and `exact` the best
layout of a few hosts.

Source: "Reliable/unreliable parameter servers" (docs/research/papers.md), sections 3.2 and 3.3.
"""

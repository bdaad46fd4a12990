"""Every organisation that decod has, for the same hosts and the same model: which is the fastest?

`run_work` holds what a run asks of hosts. `pipeline_time` and `data_parallel_time` say how long an
iteration takes, `pipeline_search` chooses the stages of hosts, and `compare` puts the organisations
side by side. The servers organisation has a planner of its own, `planner.servers`.
"""

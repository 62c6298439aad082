"""Plans for users: whether a model fits a machine, how long a step takes, which settings are the
fastest.

    machine    GPUs, memory and drives of a node; each figure with its source
    workload   the model (units and FlatParameters as the engine finds them, on the meta device),
               the job (a policy, and the tokens of a step), and stacks of experts in tiles
    memory     placement of the states, by the engine's planner; the memory of a GPU; the RAM that
               ranks take in addition to their budgets
    ranks      collectives of several ranks, and the bytes that each rank holds
    predict    needs and time of a step (`memory.roofline`, `memory.pcie`), the drives' peak, set-up
    changes    predictions after a single change of the job or machine
    search     the fastest settings that fit, over all settings that the user does not fix

A plan allocates no tensors and measures nothing.
"""

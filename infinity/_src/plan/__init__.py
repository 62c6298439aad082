"""Planning for people: does a model fit a machine, how long is its step, which way is the fastest.

    machine    GPUs, memory and drives of a node; each figure with its source
    workload   the model (units and FlatParameters as the engine finds them, on the meta device),
               the job (a policy, and the tokens of a step), and stacks of experts in tiles
    memory     placement of the states, by the engine's planner; the memory of a GPU; the RAM that
               ranks take in addition to their budgets
    ranks      collectives of several ranks, and the bytes that each rank holds
    predict    needs and time of a step (`memory.roofline`, `memory.pcie`), the drives' peak, set-up
    changes    predictions with one thing changed
    search     the fastest way that fits, of all that a user leaves open

A plan allocates no tensors and measures nothing.
"""

"""Planning for people: does a model fit a machine, how long is its step, what would a change buy.

    machine    GPUs, memory and drives of a node; each figure with its source
    workload   the model (units and flats as the engine finds them, on the meta device), the job (a
               policy, and the tokens of a step), and stacks of experts in the job's tiles
    memory     placement of the states, which is the engine's own; the memory of a GPU; the RAM
               that ranks take in addition to their budgets
    ranks      exchanges of several ranks, and the bytes that each rank holds
    predict    needs and time of a step (`memory.roofline`, `memory.pcie`), the drives' peak, set-up
    changes    the same with one thing changed

No tensors are allocated and nothing is measured.
"""

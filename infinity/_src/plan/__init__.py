"""Planning for people: does a model fit a machine, how long is its step, what would a change buy.

    machine    GPUs, memory and drives of a node; each figure with its source
    workload   the model (units and flats as the engine finds them, on the meta device) and the job
               (a policy, and the tokens of a step)
    experts    stacks of experts in tiles, and the tiles that tokens touch
    memory     placement of the states, which is the engine's own, and the memory of a GPU
    ram_beside what the ranks of a node take beside their budgets
    ranks      exchanges of several ranks, and what each of them holds
    predict    needs and time of a step (`perf.roofline`, `perf.pcie`)
    outside    what no budget has: RAM beside it, the drives' peak, set-up
    changes    the same with one thing changed

No tensors are allocated and nothing is measured.
"""

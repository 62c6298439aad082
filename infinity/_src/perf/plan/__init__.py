"""Planning for people: whether a model fits a machine, how long its step will take, and what a change would buy.

    machine   what there is: GPUs, memory, drives; each figure with where it comes from
    gpus      kinds of GPU, with what is assumed of each
    shape     what is to be trained: units and flats found as the engine finds them, on the meta device
    job       how it is trained, and where its states may rest
    placed    where they rest: the engine's own placement (`infinity._src.memory.placement`)
    device_memory  what a GPU has to hold, and which change makes it fit
    predict   what that takes, and how long a step is (`infinity._src.perf.roofline`, `infinity._src.perf.pcie`)
    changes   the same with one thing changed

No tensors are allocated and nothing is measured.
"""

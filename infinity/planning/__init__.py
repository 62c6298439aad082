"""Planning for people: whether a model fits a machine, how long its step will take, and what a change would buy.

    machine   what there is: GPUs, memory, drives; each figure with where it comes from
    shape     what is to be trained: units and flats found as the engine finds them, on the meta device
    predict   placement (`infinity.memory.placement`) and limits (`infinity.limits`) of both
    changes   the same with one thing changed

No tensors are allocated and nothing is measured.
"""

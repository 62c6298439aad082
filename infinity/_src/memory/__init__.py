"""Memory: tiers, placement, layout, budget, pools and swap space. Planning is pure and tensor-free.
"""

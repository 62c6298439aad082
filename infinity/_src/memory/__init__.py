"""Memory: tiers, placement, partition, pools and swap space. Planning here is pure and tensor-free."""

/* Host memory for slots, and its place on a NUMA node. */

/* Anonymous memory, 2 MiB aligned, MADV_HUGEPAGE, MADV_DONTFORK, every page touched. 0, or a
 * negative errno. */
int32_t inf_slab_map(uint64_t size_bytes, uint64_t *address);
/* The same, on a node (-1: any). Where the node cannot be had, *numa_error is a negative errno, and
 * the slab is as without. */
int32_t inf_slab_map_on(uint64_t size_bytes, int32_t node, uint64_t *address, int32_t *numa_error);
/* Pages of this range that are touched from now on are taken from a node as long as it has some. 0,
 * or a negative errno. */
int32_t inf_numa_prefer(uint64_t address, uint64_t size_bytes, int32_t node);
void inf_slab_unmap(uint64_t address, uint64_t size_bytes);
/* Bytes of the slab that huge pages back, from /proc/self/smaps; -1 when that cannot be read. */
int64_t inf_slab_huge_bytes(uint64_t address, uint64_t size_bytes);

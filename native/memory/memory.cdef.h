/* Host memory for slots, and its NUMA node. */

/* Anonymous memory, 2 MiB aligned, MADV_HUGEPAGE, MADV_DONTFORK, every page touched. 0, or a
 * negative errno. */
int32_t inf_slab_map(uint64_t size_bytes, uint64_t *address);
/* The same, preferring a node (-1: any). If binding fails, *numa_error is a negative errno, and the
 * slab is unbound. */
int32_t inf_slab_map_on(uint64_t size_bytes, int32_t node, uint64_t *address, int32_t *numa_error);
/* Makes the kernel prefer a node for pages of this range that are not touched yet. 0, or a negative
 * errno. */
int32_t inf_numa_prefer(uint64_t address, uint64_t size_bytes, int32_t node);
void inf_slab_unmap(uint64_t address, uint64_t size_bytes);
/* Bytes of the slab backed by huge pages; -1 if the kernel does not say. */
int64_t inf_slab_huge_bytes(uint64_t address, uint64_t size_bytes);

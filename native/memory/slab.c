/* The slab: host memory for the executor's slots (slots.c). aio.Slab makes slabs for sections in
 * RAM and for gradients in the same way.
 *
 * Huge pages speed up drives (3.9 instead of 1.7 GB/s on a virtio disk): a 1 MiB request of 4 KiB
 * pages has 256 segments, which drives split. MADV_DONTFORK, because a page under DMA must not
 * become copy-on-write.
 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE_BYTES 4096
#define HUGE_BYTES ((uint64_t)2 << 20)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

int32_t inf_slab_map(uint64_t size_bytes, uint64_t *address) {
    int32_t ignored;
    return inf_slab_map_on(size_bytes, -1, address, &ignored);
}

int32_t inf_slab_map_on(uint64_t size_bytes, int32_t node, uint64_t *address, int32_t *numa_error) {
    *numa_error = 0;
    if (size_bytes == 0 || size_bytes > UINT64_MAX / 2) return -EINVAL;
    uint64_t size = (size_bytes + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
    void *raw =
        mmap(NULL, size + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return -errno;
    uint64_t start = (uint64_t)(uintptr_t)raw;
    uint64_t aligned = (start + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
    if (aligned > start) munmap(raw, aligned - start);
    uint64_t tail = start + HUGE_BYTES - aligned;
    if (tail > 0) munmap((void *)(uintptr_t)(aligned + size), tail);
    void *base = (void *)(uintptr_t)aligned;
    /* Errors are ignored: without transparent huge pages the slab is slower, which `doctor`
     * reports. */
    (void)madvise(base, size, MADV_HUGEPAGE);
    (void)madvise(base, size, MADV_DONTFORK);
    /* before the first touch, which assigns a page to a node */
    if (node >= 0) *numa_error = inf_numa_prefer(aligned, size, node);
    if (madvise(base, size, MADV_POPULATE_WRITE) != 0) {
        if (errno != EINVAL) {
            int32_t error = errno == EFAULT ? ENOMEM : errno;
            munmap(base, size);
            return -error;
        }
        for (uint64_t at = 0; at < size; at += PAGE_BYTES) ((volatile uint8_t *)base)[at] = 0;
    }
    *address = aligned;
    return 0;
}

void inf_slab_unmap(uint64_t address, uint64_t size_bytes) {
    uint64_t size = (size_bytes + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
    if (address != 0) munmap((void *)(uintptr_t)address, size);
}

/* Linux 6.7 (include/uapi/linux/fs.h); headers of older systems lack these. */
typedef struct {
    uint64_t start, end, categories;
} page_region;

typedef struct {
    uint64_t size, flags, start, end, walk_end, regions, region_count, pages_max;
    uint64_t inverted, all_of, any_of, returned;
} pagemap_scan;

#define PAGEMAP_SCAN _IOWR('f', 16, pagemap_scan)
#define PAGE_IS_HUGE ((uint64_t)1 << 6)
#define REGIONS 64

/* -1 where the kernel is older. */
static int64_t scanned_huge_bytes(uint64_t address, uint64_t end) {
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pagemap < 0) return -1;
    page_region regions[REGIONS];
    pagemap_scan scan = {.size = sizeof scan, .start = address, .end = end};
    scan.regions = (uint64_t)(uintptr_t)regions;
    scan.region_count = REGIONS;
    scan.all_of = scan.returned = PAGE_IS_HUGE;
    int64_t huge = 0;
    while (scan.start < end) {
        int found = ioctl(pagemap, PAGEMAP_SCAN, &scan);
        for (int i = 0; i < found; i++) huge += (int64_t)(regions[i].end - regions[i].start);
        if (found < 0) huge = -1;
        if (found < 0 || scan.walk_end <= scan.start) break;
        scan.start = scan.walk_end;
    }
    close(pagemap);
    return huge;
}

/* Slower: the kernel looks at each page of the process whose address is lower. */
static int64_t listed_huge_bytes(uint64_t address, uint64_t size_bytes) {
    FILE *maps = fopen("/proc/self/smaps", "re");
    if (maps == NULL) return -1;
    uint64_t end = address + size_bytes;
    int64_t huge = 0;
    bool inside = false;
    char line[512];
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long low = 0, high = 0, kib = 0;
        /* Ranges ascend. Stop early, since the kernel counts pages for each range that is read. */
        if (sscanf(line, "%lx-%lx ", &low, &high) == 2 && strchr(line, ':') > strchr(line, '-')) {
            /* Adjacent mappings are merged: a slab may share its entry with another one. */
            if (low >= end) break;
            inside = high > address;
        } else if (inside && sscanf(line, "AnonHugePages: %lu kB", &kib) == 1) {
            huge += (int64_t)kib * 1024;
        }
    }
    fclose(maps);
    return huge < (int64_t)size_bytes ? huge : (int64_t)size_bytes;
}

int64_t inf_slab_huge_bytes(uint64_t address, uint64_t size_bytes) {
    uint64_t pages_end = (address + size_bytes + PAGE_BYTES - 1) & ~(uint64_t)(PAGE_BYTES - 1);
    int64_t huge = scanned_huge_bytes(address, pages_end);
    if (huge < 0) return listed_huge_bytes(address, size_bytes);
    return huge < (int64_t)size_bytes ? huge : (int64_t)size_bytes;
}

/* NUMA: memory on a node, and threads on its CPUs. Called only if infinity/_src/memory/numa.py has
 * chosen a node.
 *
 * The kernel prefers the node, and uses others when it is full, which is slower; a strict binding
 * would end the process instead. Threads created between `enter` and `leave` inherit the CPUs.
 */
#include "memory.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NODE_MAX 1024
#define WORD_BITS (8 * sizeof(unsigned long))

int32_t inf_numa_prefer(uint64_t address, uint64_t size_bytes, int32_t node) {
    unsigned long nodes[NODE_MAX / WORD_BITS] = {0};
    if (node < 0 || node >= NODE_MAX) return -EINVAL;
    nodes[(size_t)node / WORD_BITS] = 1ul << ((size_t)node % WORD_BITS);
    /* The kernel uses one bit less than the given number. */
    long result = syscall(SYS_mbind, (unsigned long)address, (unsigned long)size_bytes,
                          MPOL_PREFERRED, nodes, NODE_MAX + 1ul, 0u);
    return result == 0 ? 0 : -errno;
}

int32_t inf_cpus_enter(const uint64_t *cpus, cpu_set_t *before) {
    cpu_set_t wanted, both;
    CPU_ZERO(&wanted);
    for (int cpu = 0; cpu < INF_CPU_MAX && cpu < CPU_SETSIZE; cpu++) {
        if (cpus[cpu / 64] >> (cpu % 64) & 1) CPU_SET(cpu, &wanted);
    }
    int error = pthread_getaffinity_np(pthread_self(), sizeof *before, before);
    if (error == 0) {
        /* The process may be restricted to some CPUs. */
        CPU_AND(&both, &wanted, before);
        error = CPU_COUNT(&both) == 0 ? ENODEV
                                      : pthread_setaffinity_np(pthread_self(), sizeof both, &both);
    }
    if (error != 0) CPU_ZERO(before);
    return -error;
}

int32_t inf_cpus_leave(const cpu_set_t *before) {
    if (CPU_COUNT(before) == 0) return 0;
    return -pthread_setaffinity_np(pthread_self(), sizeof *before, before);
}

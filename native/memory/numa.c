/* NUMA: memory on a node, and threads on its CPUs. Asked for by the caller
 * (infinity/_src/memory/numa.py); without that nothing is called.
 *
 * Memory is preferred on the node, not bound to it: what the node has no room for lies elsewhere,
 * which is slower; a strict binding would end the process instead. Threads that are made between
 * `enter` and `leave` inherit the CPUs.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "executor/executor.h"

#define NODE_MAX 1024
#define WORD_BITS (8 * sizeof(unsigned long))

int32_t inf_numa_prefer(uint64_t address, uint64_t size_bytes, int32_t node) {
    unsigned long nodes[NODE_MAX / WORD_BITS] = {0};
    if (node < 0 || node >= NODE_MAX) return -EINVAL;
    nodes[(size_t)node / WORD_BITS] = 1ul << ((size_t)node % WORD_BITS);
    /* The kernel takes one bit less than it is told. */
    long result = syscall(SYS_mbind, (unsigned long)address, (unsigned long)size_bytes,
                          MPOL_PREFERRED, nodes, NODE_MAX + 1ul, 0u);
    return result == 0 ? 0 : -errno;
}

static void note(struct inf_executor *ex, int error) {
    if (ex->numa_error == 0) ex->numa_error = -error;
}

void inf_numa_enter(struct inf_executor *ex, cpu_set_t *before) {
    CPU_ZERO(before);
    if (ex->config.numa == 0) return;
    cpu_set_t wanted, both;
    CPU_ZERO(&wanted);
    for (int cpu = 0; cpu < INF_CPU_MAX && cpu < CPU_SETSIZE; cpu++) {
        if (ex->config.cpus[cpu / 64] >> (cpu % 64) & 1) CPU_SET(cpu, &wanted);
    }
    int error = pthread_getaffinity_np(pthread_self(), sizeof *before, before);
    if (error != 0) {
        CPU_ZERO(before);
        note(ex, error);
        return;
    }
    /* Whoever started the process may have given it some of them only. */
    CPU_AND(&both, &wanted, before);
    error =
        CPU_COUNT(&both) == 0 ? ENODEV : pthread_setaffinity_np(pthread_self(), sizeof both, &both);
    if (error != 0) {
        CPU_ZERO(before);
        note(ex, error);
    }
}

void inf_numa_leave(struct inf_executor *ex, const cpu_set_t *before) {
    if (CPU_COUNT(before) == 0) return;
    int error = pthread_setaffinity_np(pthread_self(), sizeof *before, before);
    if (error != 0) note(ex, error);
}

int32_t inf_executor_numa_error(const inf_executor *ex) { return ex->numa_error; }

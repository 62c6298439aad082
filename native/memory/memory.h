/* Host memory: huge pages, and the node and CPUs that the executor uses. */
#ifndef INF_MEMORY_H
#define INF_MEMORY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <sched.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* aio/_slab.py looks some of them up by name */
#include "memory.cdef.h"
#pragma GCC visibility pop

#define INF_CPU_MAX 1024

/* Around the making of threads, which inherit the caller's CPUs: `cpus` (a bit each, INF_CPU_MAX of
 * them) are the caller's for as long. 0 or a negative errno; *before is for the second call. */
int32_t inf_cpus_enter(const uint64_t *cpus, cpu_set_t *before);
int32_t inf_cpus_leave(const cpu_set_t *before);

#endif

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

/* Before and after the creation of threads, which inherit the caller's CPUs: in between the caller
 * runs on `cpus` (INF_CPU_MAX bits). 0 or a negative errno; *before: for the second call. */
int32_t inf_cpus_enter(const uint64_t *cpus, cpu_set_t *before);
int32_t inf_cpus_leave(const cpu_set_t *before);

#endif

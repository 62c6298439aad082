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

/* Call inf_cpus_enter before creating threads, and inf_cpus_leave after: new threads inherit the
 * caller's CPUs, which in between are those of `cpus` (INF_CPU_MAX bits) that the caller already
 * had. Both return 0 or a negative errno. inf_cpus_enter stores the old CPUs in *before. */
int32_t inf_cpus_enter(const uint64_t *cpus, cpu_set_t *before);
int32_t inf_cpus_leave(const cpu_set_t *before);

#endif

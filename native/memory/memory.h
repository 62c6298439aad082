/* Host memory: huge pages, and the node and CPUs that the executor uses. */
#ifndef INF_MEMORY_H
#define INF_MEMORY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <sched.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* exported: aio/_slab.py finds functions by name */
#include "memory.cdef.h"
#pragma GCC visibility pop

#define INF_CPU_MAX 1024

/* Call inf_cpus_enter before creating threads, and inf_cpus_leave after: new threads inherit the
 * caller's CPUs. inf_cpus_enter stores the caller's CPUs in *before, and restricts the caller to
 * the ones that are also in `cpus` (a bitmap of INF_CPU_MAX bits); inf_cpus_leave restores *before.
 * Both return 0 or a negative errno. */
int32_t inf_cpus_enter(const uint64_t *cpus, cpu_set_t *before);
int32_t inf_cpus_leave(const cpu_set_t *before);

#endif

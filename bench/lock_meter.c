/* Counts what threads do with one mutex: preloaded by executor.py, so that the code that it measures
 * is the one in use.
 *
 * A lock that is taken at once is a try; one that is not is contended, and the time until it is
 * taken is waited. A hold longer than LONG_NS is counted apart: its thread lost its CPU. All figures
 * are changed while the mutex is held, which guards them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#define LONG_NS 100000

typedef struct {
    uint64_t holds;
    uint64_t contended;
    uint64_t long_holds;
    int64_t hold_ns; /* of those that are not long */
    int64_t long_ns;
    int64_t waited_ns;
} lock_figures;

static void *watched;
static lock_figures figures;
static int64_t since_ns;
static int (*real_lock)(pthread_mutex_t *);
static int (*real_trylock)(pthread_mutex_t *);
static int (*real_unlock)(pthread_mutex_t *);
static int (*real_wait)(pthread_cond_t *, pthread_mutex_t *);
static int (*real_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static void *symbol(const char *name) {
#ifdef __x86_64__ /* the plain name may lead to a condition variable of before 2003 */
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    if (found != NULL) return found;
#endif
    return dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void resolve(void) {
    if (real_lock != NULL) return;
    *(void **)&real_trylock = dlsym(RTLD_NEXT, "pthread_mutex_trylock");
    *(void **)&real_unlock = dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    *(void **)&real_wait = symbol("pthread_cond_wait");
    *(void **)&real_timedwait = symbol("pthread_cond_timedwait");
    *(void **)&real_lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void end_hold(void) {
    int64_t took_ns = now_ns() - since_ns;
    figures.holds++;
    if (took_ns <= LONG_NS) {
        figures.hold_ns += took_ns;
    } else {
        figures.long_holds++;
        figures.long_ns += took_ns;
    }
}

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    if (real_lock == NULL) resolve();
    if (mutex != watched) return real_lock(mutex);
    int result = real_trylock(mutex);
    if (result == EBUSY) {
        int64_t from_ns = now_ns();
        result = real_lock(mutex);
        figures.contended++;
        figures.waited_ns += now_ns() - from_ns;
    }
    since_ns = now_ns();
    return result;
}

int pthread_mutex_unlock(pthread_mutex_t *mutex) {
    if (real_lock == NULL) resolve();
    if (mutex == watched) end_hold();
    return real_unlock(mutex);
}

int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex) {
    if (real_lock == NULL) resolve();
    if (mutex == watched) end_hold();
    int result = real_wait(cond, mutex);
    if (mutex == watched) since_ns = now_ns();
    return result;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                           const struct timespec *deadline) {
    if (real_lock == NULL) resolve();
    if (mutex == watched) end_hold();
    int result = real_timedwait(cond, mutex, deadline);
    if (mutex == watched) since_ns = now_ns();
    return result;
}

/* While no thread holds it. NULL: none from now on. */
void lock_meter_watch(void *mutex) { watched = mutex; }

void lock_meter_read(lock_figures *out) {
    pthread_mutex_lock(watched);
    *out = figures;
    pthread_mutex_unlock(watched);
}

/* A liburing that misbehaves on request: it exports the functions that infinity uses, passes them
 * on to the real library (ODD_REAL), and does what the environment says. Compiled and loaded by
 * test_liburing.py, in processes of their own.
 *
 *   ODD_REFUSE_FLAGS   queue_init_params: -EINVAL when one of these setup flags is asked for, as
 *                      older kernels do
 *   ODD_REFUSE_ALL     queue_init_params fails with this errno whatever is asked for
 *   ODD_BUFFERS        register_buffers fails with this errno
 *   ODD_FILES          register_files fails with this errno
 *   ODD_BUSY           every third submit_and_wait fails with this errno, ODD_BURST times in a row
 *                      (1), and sends nothing
 *   ODD_BREAK          submit_and_wait fails with this errno for good from its ODD_BREAK_AT-th call
 *                      on (0), on ring ODD_RING (0)
 *   ODD_LOG            file that is told what happened
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define RINGS_MAX 64

typedef struct {
    unsigned sq_entries, cq_entries, flags, rest[27];
} params;

static void *rings[RINGS_MAX];
static int calls[RINGS_MAX];
static int bursts[RINGS_MAX];
static int ring_count;

static void *real(const char *name) {
    static void *library;
    if (library == NULL) library = dlopen(getenv("ODD_REAL"), RTLD_NOW | RTLD_LOCAL);
    void *found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) abort();
    return found;
}

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text == NULL ? otherwise : strtol(text, NULL, 0);
}

static void say(const char *what, long value) {
    const char *path = getenv("ODD_LOG");
    FILE *file = path == NULL ? NULL : fopen(path, "a");
    if (file == NULL) return;
    fprintf(file, "%s %ld\n", what, value);
    fclose(file);
}

static int index_of(const void *ring) {
    for (int i = 0; i < ring_count; i++) {
        if (rings[i] == ring) return i;
    }
    return -1;
}

int io_uring_queue_init_params(unsigned entries, void *ring, void *settings) {
    const params *asked = settings;
    if (asked->flags & (unsigned)setting("ODD_REFUSE_FLAGS", 0)) {
        say("refused", asked->flags);
        return -EINVAL;
    }
    long refused = setting("ODD_REFUSE_ALL", 0);
    if (refused != 0) return (int)-refused;
    say("made", asked->flags);
    int (*call)(unsigned, void *, void *) = real("io_uring_queue_init_params");
    int result = call(entries, ring, settings);
    /* the probe's has 4 */
    if (result == 0 && ring_count < RINGS_MAX && entries > 4) rings[ring_count++] = ring;
    return result;
}

void io_uring_queue_exit(void *ring) {
    void (*call)(void *) = real("io_uring_queue_exit");
    int index = index_of(ring);
    say("exit", index);
    /* the next ring may be made at the same address, and is another one */
    if (index >= 0) rings[index] = NULL;
    call(ring);
}

void *io_uring_get_sqe(void *ring) {
    static void *(*call)(void *);
    if (call == NULL) call = real("io_uring_get_sqe");
    return call(ring);
}

int io_uring_submit_and_wait(void *ring, unsigned wait_nr) {
    int (*call)(void *, unsigned) = real("io_uring_submit_and_wait");
    int index = index_of(ring);
    if (index < 0) return call(ring, wait_nr);
    int nth = calls[index]++;
    long breaks = setting("ODD_BREAK", 0);
    if (breaks != 0 && index == setting("ODD_RING", 0) && nth >= setting("ODD_BREAK_AT", 0)) {
        say("broken", nth);
        return (int)-breaks;
    }
    long busy = setting("ODD_BUSY", 0);
    if (busy != 0 && (nth % 3 == 2 || bursts[index] > 0)) {
        bursts[index] = bursts[index] > 0 ? bursts[index] - 1 : (int)setting("ODD_BURST", 1) - 1;
        say("busy", nth);
        return (int)-busy;
    }
    return call(ring, wait_nr);
}

unsigned io_uring_peek_batch_cqe(void *ring, void **cqes, unsigned count) {
    unsigned (*call)(void *, void **, unsigned) = real("io_uring_peek_batch_cqe");
    return call(ring, cqes, count);
}

void io_uring_cq_advance(void *ring, unsigned count) {
    void (*call)(void *, unsigned) = real("io_uring_cq_advance");
    call(ring, count);
}

int io_uring_register_buffers(void *ring, const struct iovec *pieces, unsigned count) {
    int (*call)(void *, const struct iovec *, unsigned) = real("io_uring_register_buffers");
    long fails = setting("ODD_BUFFERS", 0);
    say("buffers", fails);
    return fails != 0 ? (int)-fails : call(ring, pieces, count);
}

int io_uring_register_files(void *ring, const int *files, unsigned count) {
    int (*call)(void *, const int *, unsigned) = real("io_uring_register_files");
    long fails = setting("ODD_FILES", 0);
    say("files", fails);
    return fails != 0 ? (int)-fails : call(ring, files, count);
}

int io_uring_unregister_buffers(void *ring) {
    int (*call)(void *) = real("io_uring_unregister_buffers");
    return call(ring);
}

int io_uring_unregister_files(void *ring) {
    int (*call)(void *) = real("io_uring_unregister_files");
    return call(ring);
}

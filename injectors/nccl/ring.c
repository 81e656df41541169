/* The ring: fixed entries in a file that is mapped shared, so that anyone may read it while we run, hang or are stopped.
 *
 * Writers claim a slot by compare-and-swap on its stamp and never wait. A slot whose call has not returned is passed over:
 * however many calls other threads make, the call that hangs stays in the ring.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

enum { WRITING = 1, ENTERED = 2, RETURNED = 3, TRIES = 32 };
#define FILE_BYTES (sizeof(struct ring_header) + RING_ENTRIES * sizeof(struct ring_entry))

static struct ring_header *_Atomic header;

struct ring_header *ring_header(void) { return atomic_load_explicit(&header, memory_order_acquire); }

static struct ring_entry *entry_at(struct ring_header *ring, int64_t slot) { return (struct ring_entry *)(ring + 1) + slot; }

/* The file's final name, once it is whole: the same process id may have run another program before (exec, reuse). */
static bool publish(const char *folder, const char *fresh) {
    char path[1024];
    for (int again = 0; again < 1000; again++) {
        int length = again ? snprintf(path, sizeof path, "%s/nccl-%d-%d.ring", folder, (int)getpid(), again)
                           : snprintf(path, sizeof path, "%s/nccl-%d.ring", folder, (int)getpid());
        if (length < 0 || (size_t)length >= sizeof path) return false;
        if (access(path, F_OK) != 0) return rename(fresh, path) == 0;
    }
    return false;
}

void ring_create(const char *folder, int rank, bool forked) {
    char fresh[1024];
    snprintf(fresh, sizeof fresh, "%s/.nccl-%d.new", folder, (int)getpid());
    unlink(fresh);
    int fd = open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0) {
        say("no ring in %s: %s", folder, strerror(errno));
        return;
    }
    /* All blocks now: a write to a hole on a full disk would be a SIGBUS in somebody's training job. */
    int error = posix_fallocate(fd, 0, (off_t)FILE_BYTES);
    void *mapped = error ? MAP_FAILED : mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) {
        say("no ring in %s: %s", folder, strerror(error ? error : errno));
        unlink(fresh);
        return;
    }
    struct ring_header *ring = mapped;
    ring->version = RING_VERSION;
    ring->header_bytes = sizeof *ring;
    ring->entry_bytes = sizeof(struct ring_entry);
    ring->entries = RING_ENTRIES;
    ring->pid = (int32_t)getpid();
    ring->rank = rank;
    struct timespec real;
    uint64_t before = now_ns();
    clock_gettime(CLOCK_REALTIME, &real);
    ring->created = now_ns();
    ring->realtime_minus = (int64_t)real.tv_sec * 1000000000 + real.tv_nsec - (int64_t)(before + (ring->created - before) / 2);
    ring->calls = CALLS;
    ring->faults = (uint32_t)plan_faults();
    ring->flags = forked ? RING_FORKED : 0;
    gethostname(ring->host, sizeof ring->host - 1);
    for (int id = 0; id < CALLS; id++) {
        strncpy(ring->names[id], call_table[id].name, sizeof ring->names[id] - 2);
        ring->names[id][31] = call_table[id].kind;
    }
    for (int i = 0; i < plan_faults(); i++) memcpy(ring->labels[i], plan_label(i), LABEL_BYTES);
    memcpy(ring->magic, RING_MAGIC, sizeof ring->magic);
    if (!publish(folder, fresh)) {
        say("no ring in %s: %s", folder, strerror(errno));
        unlink(fresh);
        munmap(mapped, FILE_BYTES);
        return;
    }
    atomic_store_explicit(&header, ring, memory_order_release);
}

void ring_forget(void) {
    struct ring_header *ring = atomic_exchange(&header, NULL);
    if (ring) munmap(ring, FILE_BYTES);
}

void ring_count(int id) {
    struct ring_header *ring = ring_header();
    if (ring) atomic_fetch_add_explicit(&ring->called[id], 1, memory_order_relaxed);
}

void ring_enter(struct call *call) {
    struct ring_header *ring = ring_header();
    call->slot = -1;
    if (!ring) return;
    for (int attempt = 0; attempt < TRIES; attempt++) {
        uint64_t ticket = atomic_fetch_add_explicit(&ring->next, 1, memory_order_relaxed) + 1;
        int64_t slot = (int64_t)(ticket % RING_ENTRIES);
        struct ring_entry *entry = entry_at(ring, slot);
        uint64_t old = atomic_load_explicit(&entry->stamp, memory_order_relaxed);
        if ((old & 3) == WRITING || (old & 3) == ENTERED || old >> 2 >= ticket) continue;
        if (!atomic_compare_exchange_strong_explicit(&entry->stamp, &old, ticket << 2 | WRITING, memory_order_acquire,
                                                     memory_order_relaxed))
            continue;
        atomic_thread_fence(memory_order_release);
        entry->t_enter = call->t_enter;
        entry->t_return = 0;
        entry->count = call->count;
        entry->stream = (uint64_t)(uintptr_t)call->stream;
        entry->comm = call->comm_id;
        entry->ordinal = call->ordinal;
        entry->asked = call->asked;
        entry->call = (uint32_t)call->id;
        entry->result = NONE;
        entry->nranks = call->nranks;
        entry->rank = call->rank;
        entry->comm_index = call->comm_index;
        entry->dtype = call->dtype;
        entry->root = call->root;
        entry->op = call->op;
        entry->tid = thread_id();
        entry->fault = call->fault;
        entry->in_group = call->in_group;
        atomic_store_explicit(&entry->stamp, ticket << 2 | ENTERED, memory_order_release);
        call->slot = slot;
        call->ticket = ticket;
        return;
    }
    atomic_fetch_add_explicit(&ring->lost, 1, memory_order_relaxed);
}

void ring_leave(const struct call *call) {
    struct ring_header *ring = ring_header();
    if (!ring || call->slot < 0) return;
    struct ring_entry *entry = entry_at(ring, call->slot);
    atomic_store_explicit(&entry->stamp, call->ticket << 2 | WRITING, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    entry->t_return = now_ns();
    entry->result = call->result;
    entry->comm = call->comm_id; /* an init call knows them only now */
    entry->nranks = call->nranks;
    entry->rank = call->rank;
    entry->comm_index = call->comm_index;
    entry->fault = call->fault;
    atomic_store_explicit(&entry->stamp, call->ticket << 2 | RETURNED, memory_order_release);
}

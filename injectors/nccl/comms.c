/* The communicators of this process: a fixed table, read without a lock.
 *
 * A communicator's id is the same on every rank: the hash of the ncclUniqueId it was made with, or of its parent's id, the
 * colour and the ordinal of the split. ncclCommInitAll, ncclCommGrow on joining ranks, and communicators that were made
 * without passing through the shim have an id of this process alone.
 */
#include <pthread.h>

#include "shim.h"

enum { SLOTS = 1024, WINDOW = 64 };
#define GONE ((uintptr_t)1)

static struct comm_info slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int next_index;

uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t length) {
    uint64_t hash = seed ^ 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < length; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

static size_t home(uintptr_t key) { return (size_t)((key * 0x9e3779b97f4a7c15u) >> 54); }

struct comm_info *comm_find(const void *comm) {
    uintptr_t key = (uintptr_t)comm;
    if (key <= GONE) return NULL;
    for (size_t i = 0, at = home(key); i < WINDOW; i++, at = (at + 1) % SLOTS) {
        uintptr_t found = atomic_load_explicit(&slots[at].key, memory_order_acquire);
        if (found == key) return &slots[at];
        if (!found) return NULL;
    }
    return NULL;
}

struct comm_info *comm_add(void *comm, uint64_t id, int nranks, int rank) {
    uintptr_t key = (uintptr_t)comm;
    if (key <= GONE) return NULL;
    pthread_mutex_lock(&lock);
    struct comm_info *slot = comm_find(comm);
    for (size_t i = 0, at = home(key); !slot && i < WINDOW; i++, at = (at + 1) % SLOTS)
        if (atomic_load(&slots[at].key) <= GONE) slot = &slots[at];
    if (slot) {
        slot->id = id;
        slot->nranks = nranks;
        slot->rank = rank;
        slot->index = next_index++;
        atomic_store(&slot->calls, 0);
        atomic_store(&slot->children, 0);
        atomic_store(&slot->async_error, 0);
        atomic_store(&slot->last_async, 0);
        atomic_fetch_add(&slot->generation, 1);
        atomic_store_explicit(&slot->key, key, memory_order_release);
    } else {
        say("more live communicators than the table holds: calls on the newest are recorded without a communicator");
    }
    pthread_mutex_unlock(&lock);
    return slot;
}

void comm_complete(struct comm_info *info, void *comm) {
    int (*count)(const void *, int *) = (int (*)(const void *, int *))resolve_name("ncclCommCount");
    int (*user_rank)(const void *, int *) = (int (*)(const void *, int *))resolve_name("ncclCommUserRank");
    int nranks, rank;
    if (!info || !count || !user_rank || count(comm, &nranks) || user_rank(comm, &rank)) return;
    info->rank = rank;
    info->nranks = nranks;
}

struct comm_info *comm_adopt(void *comm) {
    uint64_t own = hash_bytes(now_ns(), &comm, sizeof comm);
    struct comm_info *info = comm_add(comm, own, NONE, NONE);
    comm_complete(info, comm);
    return info;
}

void comm_remove(const void *comm) {
    pthread_mutex_lock(&lock);
    struct comm_info *slot = comm_find(comm);
    if (slot) {
        atomic_fetch_add(&slot->generation, 1);
        atomic_store_explicit(&slot->key, GONE, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
}

void comms_after_fork(void) { pthread_mutex_init(&lock, NULL); }

/* What the parts of the shim share: one call, one communicator, one fault, and the ring's layout on disk.
 *
 * shim.c stands in front of libnccl, process.c sets up and logs, resolve.c finds the real functions, comms.c knows the
 * communicators, plan.c reads what is to be injected, act.c injects it, ring.c records. None of them includes a header of
 * NCCL or CUDA: handles are opaque pointers, enumerations are ints with the values of the public ABI of NCCL 2.
 */
#ifndef DTPROBE_NCCL_SHIM_H
#define DTPROBE_NCCL_SHIM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2, NCCL_INTERNAL_ERROR = 3, NCCL_INVALID_USAGE = 5, NCCL_IN_PROGRESS = 7 };
enum { NCCL_SUM = 0, NCCL_MAX = 2 };

enum kind { KIND_COLLECTIVE = 'c', KIND_P2P = 'p', KIND_INIT = 'i', KIND_GROUP = 'g', KIND_LIFE = 'l', KIND_QUERY = 'q' };
enum may { DROP = 1, COUNT = 2, ROOT = 4, OP = 8 };

enum call_id {
#define CALL(name, family, kind, may) ID_##name,
#include "calls.h"
#undef CALL
    CALLS
};

struct call_info {
    const char *name;
    int family;
    char kind;
    unsigned may;
};
extern const struct call_info call_table[CALLS];

#define MAX_FAULTS 64 /* a bit each in call.due */
#define NONE INT32_MIN /* "this call has no such argument" */

struct comm_info { /* one live communicator of this process */
    _Atomic uintptr_t key;
    _Atomic uint64_t generation; /* changes when the slot is taken and when it is given back */
    uint64_t id;                 /* the same on every rank where it can be: see comms.c */
    int32_t nranks, rank, index; /* index: order of creation in this process, from 0 */
    _Atomic uint64_t calls;      /* collectives and point-to-point calls so far */
    _Atomic uint64_t children;
    _Atomic int32_t async_error; /* planted; 0 is none */
    _Atomic int32_t last_async;  /* last one reported to the program */
};

struct call {
    int id;
    void *comm;
    uint64_t count;
    int32_t dtype, root, op;
    void *stream;
    void **made; /* an init call: where the new communicator goes */
    /* filled in by enter() */
    struct comm_info *info;
    uint64_t generation, comm_id, ordinal, t_enter;
    int32_t nranks, rank, comm_index;
    bool nested, in_group, skip, failed;
    uint64_t due;  /* faults that fire at this call, one bit each */
    int32_t fault; /* the last of them, -1 for none */
    int64_t asked; /* the value that a fault replaced (count, root or op) */
    int64_t slot;
    uint64_t ticket;
    int result;
    int async_error; /* ncclCommGetAsyncError: what the program is told */
};

/* ---- ring.c: the file format; dtprobe/readers/nccl_ring.py reads it. Little endian, no pointers. ---- */
#define RING_MAGIC "DTPNCCL1"
#define RING_VERSION 1u
#define RING_ENTRIES 8192u
#define MAX_CALLS 64
#define LABEL_BYTES 128
enum { RING_PLAN_REFUSED = 1, RING_EXITED = 2, RING_FORKED = 4 };

struct ring_entry {
    _Atomic uint64_t stamp; /* ticket << 2 | state; 0 never used, state 1 being written, 2 entered, 3 returned */
    uint64_t t_enter, t_return; /* CLOCK_MONOTONIC, ns */
    uint64_t count, stream, comm, ordinal;
    int64_t asked;
    uint32_t call;
    int32_t result, nranks, rank, comm_index, dtype, root, op, tid, fault;
    uint32_t in_group;
    uint8_t pad[20];
};
_Static_assert(sizeof(struct ring_entry) == 128, "two cache lines an entry");

struct ring_header {
    char magic[8];
    uint32_t version, header_bytes, entry_bytes, entries;
    int32_t pid, rank;
    uint64_t created;       /* CLOCK_MONOTONIC, ns */
    int64_t realtime_minus; /* CLOCK_REALTIME - CLOCK_MONOTONIC when the ring was made, ns */
    _Atomic uint64_t next, lost;
    int32_t nccl_version;
    uint32_t faults, calls;
    _Atomic uint32_t flags;
    uint8_t pad[48];
    char host[64];
    char library[832];
    _Atomic uint64_t called[MAX_CALLS];
    _Atomic uint64_t fired[MAX_FAULTS];
    _Atomic uint64_t matched[MAX_FAULTS];
    char names[MAX_CALLS][32]; /* byte 31 is the kind */
    char labels[MAX_FAULTS][LABEL_BYTES];
};
_Static_assert(sizeof(struct ring_header) == 12800, "the reader knows this layout");
_Static_assert((int)CALLS <= MAX_CALLS, "room for the names");

void ring_create(const char *folder, int rank, bool forked);
void ring_forget(void); /* after fork: the parent's ring is not ours */
struct ring_header *ring_header(void);
void ring_count(int id);
void ring_enter(struct call *call);
void ring_leave(const struct call *call);

/* ---- process.c ---- */
uint64_t now_ns(void);
uint64_t started_ns(void); /* when the program was loaded */
int thread_id(void);
int job_rank(void); /* RANK or its like; else the rank in the first communicator; -1 while unknown */
void job_rank_from_comm(int rank);
void setup(void);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));            /* a problem, into the log */
void say_fired(const struct call *call, int fault, uint64_t match, const char *not_applied); /* NULL: it took effect */
void say_ended(const struct call *call, int fault, uint64_t match, const char *why);

/* ---- resolve.c ---- */
void *resolve(int id, const void *caller);
void describe_library(void); /* which libnccl it is, into the ring's header */
void *resolve_name(const char *name); /* any other function of the same libnccl */
void *find_symbol(const char *name, const char *library_prefix);
int libraries_loaded(char *path, size_t bytes); /* how many libnccl.so*, and the first one's path */

/* ---- comms.c ---- */
uint64_t hash_bytes(uint64_t seed, const void *bytes, size_t length);
struct comm_info *comm_find(const void *comm);
struct comm_info *comm_add(void *comm, uint64_t id, int nranks, int rank);
struct comm_info *comm_adopt(void *comm); /* made behind our back */
void comm_complete(struct comm_info *info, void *comm); /* asks the library for its size and our rank in it */
void comm_remove(const void *comm);
void comms_after_fork(void);

/* ---- plan.c and act.c ---- */
bool plan_load(const char *path); /* false: refused, and said why */
int plan_faults(void);
const char *plan_label(int fault);
bool plan_released(void); /* the harness let go: the release file is there, or the plan is gone */
void decide(struct call *call);    /* changes the arguments, marks what is due */
void carry_out(struct call *call); /* waits, fails, leaves out */

enum action { ACT_FAIL, ACT_DELAY, ACT_BLOCK, ACT_DROP, ACT_COUNT, ACT_ROOT, ACT_OP, ACT_ASYNC, ACTIONS };

struct numbers {
    const uint64_t *values;
    size_t length;
};

struct fault {
    enum action action;
    bool on_stream;
    int32_t call, kind; /* -1 any; a call stands for its family too */
    struct numbers ranks, nth;
    int32_t comm_index, comm_rank, result; /* -1 any */
    uint64_t comm_id;                      /* 0 any */
    uint64_t seed, every, times, ppm, after_ns, hold_ns; /* hold: length of a delay, cap of a block */
    int64_t value;                         /* count, root, op; -1: the shim chooses */
    _Atomic uint64_t matched, fired;
    char label[LABEL_BYTES];
};
#define PPM_ALWAYS 1000000u
extern struct fault faults[MAX_FAULTS];

#endif

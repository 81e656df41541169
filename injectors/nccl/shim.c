/* The shim: every entry point of libnccl that communicates, by name, in front of the real one.
 *
 * Preloaded into a job (LD_PRELOAD). It does nothing until the program's first NCCL call; then it opens its ring and reads
 * its plan. Environment: DTPROBE_NCCL_FOLDER (where rings and logs go, below rank<k>/ when the rank is known) and
 * DTPROBE_NCCL_PLAN. Whatever is wrong with either is said in nccl-<pid>.jsonl there, and the job runs on untouched.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include "shim.h"

#define INIT KIND_INIT
#define COLLECTIVE KIND_COLLECTIVE
#define P2P KIND_P2P
#define GROUP KIND_GROUP
#define LIFE KIND_LIFE
#define QUERY KIND_QUERY
const struct call_info call_table[CALLS] = {
#define CALL(name, family, kind, may) {#name, ID_##family, kind, may},
#include "calls.h"
#undef CALL
};
#undef INIT
#undef COLLECTIVE
#undef P2P
#undef GROUP
#undef LIFE
#undef QUERY

typedef struct { char internal[128]; } unique_id;

struct pending { /* a communicator that is made when the group ends */
    void **where;
    uint64_t id;
    int nranks, rank;
};

static _Thread_local struct {
    int depth; /* libnccl may call its own entry points: only the outermost call is the program's */
    int group, pendings;
    struct pending pending[16];
} self __attribute__((tls_model("initial-exec")));

static void know(struct call *call, struct comm_info *info) {
    call->info = info;
    if (!info) return;
    call->generation = atomic_load(&info->generation);
    call->comm_id = info->id;
    call->nranks = info->nranks;
    call->rank = info->rank;
    call->comm_index = info->index;
}

/* True when the real function is to be called. */
static bool enter(struct call *call, bool found) {
    call->nested = self.depth++ > 0;
    if (call->nested) return found;
    int saved_errno = errno;
    setup();
    call->t_enter = now_ns();
    call->fault = -1;
    call->slot = -1;
    call->in_group = self.group > 0;
    char kind = call_table[call->id].kind;
    if (call->made) *call->made = NULL; /* as NCCL does when it fails */
    if (call->comm) {
        struct comm_info *info = comm_find(call->comm);
        if (!info && kind != KIND_LIFE) info = comm_adopt(call->comm);
        if (info && info->nranks == NONE && kind != KIND_LIFE) comm_complete(info, call->comm);
        know(call, info);
    }
    if (call->info && (kind == KIND_COLLECTIVE || kind == KIND_P2P))
        call->ordinal = atomic_fetch_add_explicit(&call->info->calls, 1, memory_order_relaxed) + 1;
    ring_count(call->id);
    if (plan_faults()) decide(call);
    if (call->id != ID_ncclCommGetAsyncError || call->due) ring_enter(call); /* watchdogs poll: see leave() */
    if (call->due) carry_out(call);
    if (!found && !call->skip) {
        call->skip = true;
        call->result = NCCL_INVALID_USAGE;
    }
    if ((call->id == ID_ncclCommDestroy || call->id == ID_ncclCommAbort) && !call->skip) comm_remove(call->comm);
    errno = saved_errno;
    return !call->skip;
}

static void report_async_error(struct call *call, int *out) {
    if (!call->info || !out) return;
    int planted = atomic_load_explicit(&call->info->async_error, memory_order_relaxed);
    if (planted && !call->skip) {
        *out = planted;
        call->result = NCCL_SUCCESS;
    }
    /* Polls that report nothing new are counted, not recorded: they would push everything else out of the ring. */
    if (call->skip || atomic_exchange(&call->info->last_async, *out) == *out || call->slot >= 0) return;
    ring_enter(call);
}

/* The program's variable may be gone by the time that its group ends: ask the kernel to read it, which cannot fault. */
static void *peek(void **where) {
    void *found = NULL;
    struct iovec to = {&found, sizeof found}, from = {where, sizeof found};
    return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == (ssize_t)sizeof found ? found : NULL;
}

static int leave(struct call *call) {
    self.depth--;
    if (call->nested) return call->result;
    int saved_errno = errno;
    if (call->id == ID_ncclGroupStart && call->result == NCCL_SUCCESS) self.group++;
    if (call->id == ID_ncclGroupEnd && self.group > 0 && --self.group == 0) {
        for (int i = 0; i < self.pendings; i++) {
            struct pending *one = &self.pending[i];
            void *comm = peek(one->where);
            if (comm) comm_add(comm, one->id, one->nranks, one->rank);
        }
        self.pendings = 0;
    }
    ring_leave(call);
    errno = saved_errno;
    return call->result;
}

/* After an init call: remember the communicator, or that the end of the group will make it. `nranks` and `rank` are NONE
 * where only the library knows them. */
static void made(struct call *call, void **where, uint64_t id, int nranks, int rank) {
    if (call->nested || !where || call->skip) return;
    if (call->result != NCCL_SUCCESS && call->result != NCCL_IN_PROGRESS) return;
    if (*where) {
        struct comm_info *info = comm_add(*where, id, nranks, rank);
        if (call->result == NCCL_SUCCESS && !self.group) comm_complete(info, *where);
        know(call, info);
    } else if (self.group > 0 && self.pendings < (int)(sizeof self.pending / sizeof *self.pending)) {
        self.pending[self.pendings++] = (struct pending){where, id, nranks, rank};
    }
}

/* What every entry point does: arguments may have been changed by a fault; `after` sees the result. */
#define ENTRY(name, parameters, arguments, after, ...)                                                                         \
    __attribute__((visibility("default"))) int name parameters;                                                                \
    int name parameters {                                                                                                      \
        struct call call = {.id = ID_##name, .dtype = NONE, .root = NONE, .op = NONE, .nranks = NONE,                          \
                            .rank = NONE, .comm_index = NONE};                                                                 \
        (void)0, __VA_ARGS__;                                                                                                  \
        int(*real) parameters = (int(*) parameters)resolve(ID_##name, __builtin_return_address(0));                            \
        if (enter(&call, real != NULL)) {                                                                                      \
            int result = real arguments;                                                                                       \
            if (!call.failed) call.result = result;                                                                            \
        } else if (call.nested) {                                                                                              \
            call.result = NCCL_INVALID_USAGE;                                                                                  \
        }                                                                                                                      \
        after;                                                                                                                 \
        return leave(&call);                                                                                                   \
    }
#define NOTHING (void)0

#define DATA call.count = count, call.dtype = dtype, call.comm = comm, call.stream = stream
#define REDUCTION(name)                                                                                                        \
    ENTRY(name, (const void *in, void *out, size_t count, int dtype, int op, void *comm, void *stream),                        \
          (in, out, call.count, dtype, call.op, comm, stream), NOTHING, DATA, call.op = op)                                    \
    ENTRY(name##Config,                                                                                                        \
          (const void *in, void *out, size_t count, int dtype, int op, void *comm, void *stream, const void *config),          \
          (in, out, call.count, dtype, call.op, comm, stream, config), NOTHING, DATA, call.op = op)
#define EXCHANGE(name)                                                                                                         \
    ENTRY(name, (const void *in, void *out, size_t count, int dtype, void *comm, void *stream),                                \
          (in, out, call.count, dtype, comm, stream), NOTHING, DATA)                                                           \
    ENTRY(name##Config, (const void *in, void *out, size_t count, int dtype, void *comm, void *stream, const void *config),    \
          (in, out, call.count, dtype, comm, stream, config), NOTHING, DATA)
#define ROOTED(name)                                                                                                           \
    ENTRY(name, (const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream),                      \
          (in, out, call.count, dtype, call.root, comm, stream), NOTHING, DATA, call.root = root)                              \
    ENTRY(name##Config,                                                                                                        \
          (const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream, const void *config),        \
          (in, out, call.count, dtype, call.root, comm, stream, config), NOTHING, DATA, call.root = root)

REDUCTION(ncclAllReduce)
REDUCTION(ncclReduceScatter)
EXCHANGE(ncclAllGather)
EXCHANGE(ncclAlltoAll)
ROOTED(ncclBroadcast)
ROOTED(ncclGather)
ROOTED(ncclScatter)
ENTRY(ncclReduce, (const void *in, void *out, size_t count, int dtype, int op, int root, void *comm, void *stream),
      (in, out, call.count, dtype, call.op, call.root, comm, stream), NOTHING, DATA, call.op = op, call.root = root)
ENTRY(ncclReduceConfig,
      (const void *in, void *out, size_t count, int dtype, int op, int root, void *comm, void *stream, const void *config),
      (in, out, call.count, dtype, call.op, call.root, comm, stream, config), NOTHING, DATA, call.op = op, call.root = root)
ENTRY(ncclBcast, (void *buffer, size_t count, int dtype, int root, void *comm, void *stream),
      (buffer, call.count, dtype, call.root, comm, stream), NOTHING, DATA, call.root = root)
ENTRY(ncclSend, (const void *in, size_t count, int dtype, int peer, void *comm, void *stream),
      (in, call.count, dtype, call.root, comm, stream), NOTHING, DATA, call.root = peer)
ENTRY(ncclRecv, (void *out, size_t count, int dtype, int peer, void *comm, void *stream),
      (out, call.count, dtype, call.root, comm, stream), NOTHING, DATA, call.root = peer)
ENTRY(ncclPutSignal,
      (const void *in, size_t count, int dtype, int peer, void *window, size_t offset, int signal, int context, unsigned flags,
       void *comm, void *stream),
      (in, call.count, dtype, peer, window, offset, signal, context, flags, comm, stream), NOTHING, DATA, call.root = peer)
ENTRY(ncclSignal, (int peer, int signal, int context, unsigned flags, void *comm, void *stream),
      (peer, signal, context, flags, comm, stream), NOTHING, call.comm = comm, call.stream = stream, call.root = peer)
ENTRY(ncclWaitSignal, (int many, void *signals, void *comm, void *stream), (many, signals, comm, stream), NOTHING,
      call.count = (uint64_t)many, call.comm = comm, call.stream = stream)

ENTRY(ncclGroupStart, (void), (), NOTHING, NOTHING)
ENTRY(ncclGroupEnd, (void), (), NOTHING, NOTHING)
ENTRY(ncclGetUniqueId, (unique_id *id), (id), NOTHING, NOTHING)
ENTRY(ncclCommGetAsyncError, (void *comm, int *error), (comm, error), report_async_error(&call, error), call.comm = comm)
ENTRY(ncclCommFinalize, (void *comm), (comm), NOTHING, call.comm = comm)
ENTRY(ncclCommDestroy, (void *comm), (comm), NOTHING, call.comm = comm)
ENTRY(ncclCommAbort, (void *comm), (comm), NOTHING, call.comm = comm)
ENTRY(ncclCommRevoke, (void *comm, int flags), (comm, flags), NOTHING, call.comm = comm)
ENTRY(ncclCommWindowRegister, (void *comm, void *buffer, size_t size, void **window, int flags),
      (comm, buffer, size, window, flags), NOTHING, call.comm = comm, call.count = size)

static uint64_t id_of(const unique_id *ids, int many) {
    return ids && many > 0 ? hash_bytes(0, ids, (size_t)many * sizeof *ids) : 0;
}

#define MADE(id, many, position) made(&call, comm, id, many, position)
#define ABOUT(many, position) call.nranks = many, call.rank = (job_rank_from_comm(position), position), call.made = comm
ENTRY(ncclCommInitRank, (void **comm, int nranks, unique_id id, int rank), (comm, nranks, id, rank),
      MADE(id_of(&id, 1), nranks, rank), ABOUT(nranks, rank))
ENTRY(ncclCommInitRankConfig, (void **comm, int nranks, unique_id id, int rank, void *config), (comm, nranks, id, rank, config),
      MADE(id_of(&id, 1), nranks, rank), ABOUT(nranks, rank))
ENTRY(ncclCommInitRankScalable, (void **comm, int nranks, int rank, int many, unique_id *ids, void *config),
      (comm, nranks, rank, many, ids, config), MADE(id_of(ids, many), nranks, rank), ABOUT(nranks, rank))

static void made_all(struct call *call, void **comms, int many) {
    uint64_t base = hash_bytes(now_ns(), &comms, sizeof comms);
    for (int i = 0; comms && i < many && !call->skip; i++) made(call, &comms[i], base, many, i);
}
ENTRY(ncclCommInitAll, (void **comms, int many, const int *devices), (comms, many, devices), made_all(&call, comms, many),
      call.nranks = many)

/* A child's id: the parent's, what distinguishes its members, and how many children the parent had before. */
static void made_child(struct call *call, void **child, int64_t distinction) {
    if (call->nested || !call->info) return;
    uint64_t ordinal = atomic_fetch_add(&call->info->children, 1);
    uint64_t id = hash_bytes(hash_bytes(call->info->id, &distinction, sizeof distinction), &ordinal, sizeof ordinal);
    made(call, child, id, NONE, NONE);
}
ENTRY(ncclCommSplit, (void *comm, int color, int key, void **child, void *config), (comm, color, key, child, config),
      made_child(&call, child, color), call.comm = comm, call.made = child)
ENTRY(ncclCommShrink, (void *comm, int *excluded, int many, void **child, void *config, int flags),
      (comm, excluded, many, child, config, flags),
      made_child(&call, child, (int64_t)hash_bytes(0, excluded, (size_t)(many > 0 ? many : 0) * sizeof *excluded)),
      call.comm = comm, call.made = child)
ENTRY(ncclCommGrow, (void *comm, int nranks, const unique_id *id, int rank, void **child, void *config),
      (comm, nranks, id, rank, child, config), made_child(&call, child, nranks), call.comm = comm, call.made = child)

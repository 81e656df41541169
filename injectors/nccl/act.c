/* Which faults fire at a call, and what they do to it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "shim.h"

enum { STEP_NS = 5 * 1000 * 1000 };
static const char communicator_gone[] = "the communicator was aborted or destroyed";

/* Of the faults that are due at this thread's call: the call's number among those that the fault aims at. */
static _Thread_local uint64_t matches[MAX_FAULTS] __attribute__((tls_model("initial-exec")));

static uint64_t mix(uint64_t x) { /* splitmix64's finaliser */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static bool among(const struct numbers *numbers, uint64_t value) {
    for (size_t i = 0; i < numbers->length; i++)
        if (numbers->values[i] == value) return true;
    return false;
}

static bool aims_at(const struct fault *fault, const struct call *call) {
    const struct call_info *info = &call_table[call->id];
    if (fault->call >= 0 && fault->call != call->id && fault->call != info->family) return false;
    if (fault->kind > 0 && fault->kind != info->kind) return false;
    if (fault->ranks.length && (job_rank() < 0 || !among(&fault->ranks, (uint64_t)job_rank()))) return false;
    if (fault->comm_index >= 0 && fault->comm_index != call->comm_index) return false;
    if (fault->comm_rank >= 0 && fault->comm_rank != call->rank) return false;
    return !fault->comm_id || fault->comm_id == call->comm_id;
}

/* Chance depends on (seed, rank, number of the call) alone: the same calls fire again, in whatever order threads come. */
static bool due(const struct fault *fault, uint64_t match) {
    if (now_ns() < fault->after_ns + started_ns()) return false;
    if (fault->nth.length) return among(&fault->nth, match);
    if (fault->every) return match % fault->every == 0;
    return mix(mix(fault->seed ^ mix((uint64_t)job_rank() + 1)) ^ match) % PPM_ALWAYS < fault->ppm;
}

static bool within_times(struct fault *fault) {
    uint64_t before = atomic_fetch_add(&fault->fired, 1);
    if (!fault->times || before < fault->times) return true;
    atomic_fetch_sub(&fault->fired, 1);
    return false;
}

typedef int (*launch_host_function)(void *stream, void (*function)(void *), void *data);

static launch_host_function host_function(void) {
    return (launch_host_function)find_symbol("cuLaunchHostFunc", "libcuda.so");
}

static int64_t wrong_count(const struct fault *fault, uint64_t count) {
    if (fault->value >= 0) return fault->value;
    return count > 1 ? (int64_t)(count / 2) : (int64_t)count;
}

/* Why the fault cannot be done to this call; NULL when it can. Counts only shrink: more than the caller's buffers hold
 * would be read and written beyond them. */
static const char *obstacle(const struct fault *fault, const struct call *call) {
    unsigned may = call_table[call->id].may;
    switch (fault->action) {
    case ACT_DROP: return may & DROP ? NULL : "the call cannot be left out";
    case ACT_COUNT:
        if (!(may & COUNT)) return "the call has no count that may change";
        return (uint64_t)wrong_count(fault, call->count) < call->count ? NULL : "the count would not become smaller";
    case ACT_ROOT:
        if (!(may & ROOT)) return "the call has no root or peer that may change";
        if (call->nranks < 2) return "the communicator has one rank, or is unknown";
        if (fault->value >= call->nranks) return "the communicator has no such rank";
        return fault->value == call->root ? "it is that root or peer already" : NULL;
    case ACT_OP:
        if (!(may & OP)) return "the call has no reduction";
        return fault->value == call->op ? "it is that reduction already" : NULL;
    case ACT_ASYNC: return call->info ? NULL : "the call belongs to no known communicator";
    default:
        if (!fault->on_stream) return NULL;
        if (call_table[call->id].kind != KIND_COLLECTIVE && call_table[call->id].kind != KIND_P2P)
            return "the call has no stream";
        return host_function() ? NULL : "no cuLaunchHostFunc: libcuda is not loaded in this process";
    }
}

static void alter(struct call *call, int index, uint64_t match) {
    const struct fault *fault = &faults[index];
    call->fault = index;
    call->due |= 1ull << index;
    matches[index] = match;
    switch (fault->action) {
    case ACT_COUNT:
        call->asked = (int64_t)call->count;
        call->count = (uint64_t)wrong_count(fault, call->count);
        break;
    case ACT_ROOT:
        call->asked = call->root;
        call->root = fault->value >= 0 ? (int32_t)fault->value : (call->root + 1) % call->nranks;
        break;
    case ACT_OP:
        call->asked = call->op;
        call->op = fault->value >= 0 ? (int32_t)fault->value : call->op == NCCL_SUM ? NCCL_MAX : NCCL_SUM;
        break;
    default: break;
    }
}

void decide(struct call *call) {
    struct ring_header *ring = ring_header();
    for (int i = 0; i < plan_faults(); i++) {
        struct fault *fault = &faults[i];
        if (!aims_at(fault, call)) continue;
        uint64_t match = atomic_fetch_add(&fault->matched, 1) + 1;
        if (ring) atomic_store_explicit(&ring->matched[i], match, memory_order_relaxed);
        if (!due(fault, match)) continue;
        const char *why_not = obstacle(fault, call);
        if (why_not) {
            say_fired(call, i, match, why_not);
            continue;
        }
        if (!within_times(fault)) continue;
        if (ring) atomic_fetch_add_explicit(&ring->fired[i], 1, memory_order_relaxed);
        alter(call, i, match);
        say_fired(call, i, match, NULL);
    }
}

/* Wait. A block ends when the harness releases it, when another thread aborts or destroys the communicator, or at its cap.
 * Answers which of them it was. */
static const char *hold(uint64_t ns, struct comm_info *info, uint64_t generation, bool releasable) {
    uint64_t until = now_ns() + ns;
    for (uint64_t now; (now = now_ns()) < until;) {
        if (info && atomic_load(&info->generation) != generation) return communicator_gone;
        if (releasable && plan_released()) return "released";
        uint64_t left = until - now < STEP_NS ? until - now : STEP_NS;
        nanosleep(&(struct timespec){.tv_nsec = (long)left}, NULL);
    }
    return "time is up";
}

struct held {
    struct call call;
    int fault;
    uint64_t match;
};

static const char *hold_for(const struct fault *fault, const struct call *call) {
    return hold(fault->hold_ns, call->info, call->generation, fault->action == ACT_BLOCK);
}

static void hold_stream(void *data) {
    struct held *held = data;
    const char *why = hold_for(&faults[held->fault], &held->call);
    say_ended(&held->call, held->fault, held->match, why);
    free(held);
}

/* The stream waits in a host function before the collective's kernel: the call returns, the work never begins. */
static void hold_on_stream(int fault, const struct call *call) {
    struct held *held = malloc(sizeof *held);
    if (!held) return;
    *held = (struct held){*call, fault, matches[fault]};
    int error = host_function()(call->stream, hold_stream, held);
    if (!error) return;
    free(held);
    say("cuLaunchHostFunc answered %d: the stream is not held", error);
}

void carry_out(struct call *call) {
    for (int i = 0; i < plan_faults(); i++) {
        struct fault *fault = &faults[i];
        const char *why;
        if (!(call->due & 1ull << i)) continue;
        switch (fault->action) {
        case ACT_DELAY:
        case ACT_BLOCK:
            if (fault->on_stream) {
                hold_on_stream(i, call);
                break;
            }
            why = hold_for(fault, call);
            say_ended(call, i, matches[i], why);
            if (why != communicator_gone) break;
            call->skip = true; /* nothing may touch it any more */
            call->result = NCCL_INTERNAL_ERROR;
            return;
        case ACT_ASYNC: atomic_store(&call->info->async_error, fault->result); break;
        case ACT_DROP: call->skip = true; return;
        case ACT_FAIL:
            call->result = fault->result;
            call->failed = true;
            /* A failing ncclGroupEnd still closes the group, or every later call would only be queued. */
            call->skip = call->id != ID_ncclGroupEnd;
            return;
        default: break;
        }
    }
}

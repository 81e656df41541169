/* This process: its clock, its rank, its log, and the set-up at the first NCCL call. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"

static uint64_t started;
static _Atomic bool ready;
static bool forked;
static _Atomic int rank = -1;
static char folder[768];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int tid __attribute__((tls_model("initial-exec")));

static uint64_t clock_ns(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

uint64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }
uint64_t started_ns(void) { return started; }

int thread_id(void) {
    if (!tid) tid = (int)syscall(SYS_gettid);
    return tid;
}

int job_rank(void) { return atomic_load_explicit(&rank, memory_order_relaxed); }

static int rank_from_environment(void) {
    static const char *const names[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        char *end;
        if (!text || *text < '0' || *text > '9') continue;
        errno = 0;
        long value = strtol(text, &end, 10);
        if (!*end && !errno && value <= INT32_MAX) return (int)value;
    }
    return -1;
}

void job_rank_from_comm(int comm_rank) {
    setup();
    int unknown = -1;
    if (comm_rank < 0 || !atomic_compare_exchange_strong(&rank, &unknown, comm_rank)) return;
    struct ring_header *ring = ring_header();
    if (ring) ring->rank = comm_rank;
}

/* ---- the log: one JSON object a line, each written by one write() to a file opened for appending ---- */

struct line {
    char text[2048];
    size_t used;
};

static void put(struct line *line, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(struct line *line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line->text + line->used, sizeof line->text - line->used, format, arguments);
    va_end(arguments);
    if (length < 0) return;
    line->used += (size_t)length;
    if (line->used > sizeof line->text - 1) line->used = sizeof line->text - 1;
}

/* At most `most` bytes, so that the object can always be closed. */
static void put_string(struct line *line, const char *text, size_t most) {
    put(line, "\"");
    for (size_t i = 0; text[i] && i < most; i++) {
        unsigned char c = (unsigned char)text[i];
        put(line, "%c", c < 0x20 || c > 0x7e || c == '"' || c == '\\' ? '?' : c);
    }
    put(line, "\"");
}

static void open_object(struct line *line, const char *kind) {
    put(line, "{\"kind\":\"%s\",\"t_ns\":%llu,\"pid\":%d,\"tid\":%d,\"rank\":", kind,
        (unsigned long long)clock_ns(CLOCK_REALTIME), (int)getpid(), thread_id());
    if (job_rank() >= 0) put(line, "%d", job_rank());
    else put(line, "null");
}

static void write_line(struct line *line) {
    if (!folder[0]) return;
    put(line, "}\n");
    char path[sizeof folder + 32];
    snprintf(path, sizeof path, "%s/nccl-%d.jsonl", folder, (int)getpid());
    int saved_errno = errno;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd >= 0) {
        ssize_t written = write(fd, line->text, line->used);
        (void)written; /* a full disk is no reason to trouble the job */
        close(fd);
    }
    errno = saved_errno;
}

void say(const char *format, ...) {
    char text[1200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    struct line line = {.used = 0};
    open_object(&line, "problem");
    put(&line, ",\"text\":");
    put_string(&line, text, sizeof text);
    write_line(&line);
}

void say_fired(const struct call *call, int fault, uint64_t match, const char *not_applied) {
    struct line line = {.used = 0};
    open_object(&line, not_applied ? "not_applied" : "fired");
    put(&line, ",\"call\":\"%s\",\"nth\":%llu,\"comm\":\"%016llx\",\"seq\":%llu,\"fault\":", call_table[call->id].name,
        (unsigned long long)match, (unsigned long long)call->comm_id, (unsigned long long)call->ordinal);
    put_string(&line, plan_label(fault), LABEL_BYTES);
    put(&line, ",\"index\":%d,\"text\":", fault);
    char change[64] = "";
    switch (faults[fault].action) {
    case ACT_COUNT:
        snprintf(change, sizeof change, "count %lld -> %lld", (long long)call->asked, (long long)call->count);
        break;
    case ACT_ROOT: snprintf(change, sizeof change, "root %lld -> %d", (long long)call->asked, call->root); break;
    case ACT_OP: snprintf(change, sizeof change, "op %lld -> %d", (long long)call->asked, call->op); break;
    default: break;
    }
    put_string(&line, not_applied ? not_applied : change, 200);
    write_line(&line);
}

void say_ended(const struct call *call, int fault, uint64_t match, const char *why) {
    struct line line = {.used = 0};
    open_object(&line, "ended");
    put(&line, ",\"call\":\"%s\",\"nth\":%llu,\"fault\":", call_table[call->id].name, (unsigned long long)match);
    put_string(&line, plan_label(fault), LABEL_BYTES);
    put(&line, ",\"index\":%d,\"text\":\"%s\"", fault, why);
    write_line(&line);
}

/* ---- set-up ---- */

static void choose_folder(void) {
    const char *base = getenv("DTPROBE_NCCL_FOLDER");
    folder[0] = 0;
    if (!base || !*base || strlen(base) > sizeof folder - 32) return;
    if (job_rank() < 0) {
        strcpy(folder, base);
        return;
    }
    snprintf(folder, sizeof folder, "%s/rank%d", base, job_rank());
    mkdir(folder, 0755); /* there already, as a rule; if it can be neither made nor used, ring and log are missing */
}

void setup(void) {
    if (atomic_load_explicit(&ready, memory_order_acquire)) return;
    pthread_mutex_lock(&lock);
    if (!atomic_load(&ready)) {
        atomic_store(&rank, rank_from_environment());
        choose_folder();
        const char *plan = getenv("DTPROBE_NCCL_PLAN");
        bool refused = plan && *plan && !plan_load(plan);
        if (folder[0]) ring_create(folder, job_rank(), forked);
        struct ring_header *ring = ring_header();
        describe_library(); /* known already in the child of a fork */
        if (ring && refused) atomic_fetch_or(&ring->flags, RING_PLAN_REFUSED);
        atomic_store_explicit(&ready, true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
}

static void after_fork(void) { /* the child starts anew at its first NCCL call, if it ever makes one */
    ring_forget();
    pthread_mutex_init(&lock, NULL);
    comms_after_fork();
    forked = true;
    tid = 0;
    atomic_store(&ready, false);
}

__attribute__((constructor)) static void loaded(void) {
    started = now_ns();
    pthread_atfork(NULL, NULL, after_fork);
}

/* A program that found the library by dlopen and dlsym never comes past us: say so, or it looks as if nothing happened. */
__attribute__((destructor)) static void unloaded(void) {
    struct ring_header *ring = ring_header();
    if (ring) atomic_fetch_or(&ring->flags, RING_EXITED);
    char path[832];
    if (atomic_load(&ready) || !getenv("DTPROBE_NCCL_FOLDER") || !libraries_loaded(path, sizeof path)) return;
    atomic_store(&rank, rank_from_environment());
    choose_folder();
    say("%s is loaded but was never called through the shim: no NCCL call was made, or dlopen and dlsym went past it", path);
}

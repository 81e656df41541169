/* The plan: a text file of lines, read once, refused as a whole when one word of it is not understood.
 *
 *   dtprobe-nccl-plan 1
 *   fault action=fail call=ncclAllReduce rank=1+3 nth=3 result=2 ... label=the rest of the line
 *
 * injector.py writes it. Numbers are decimal and unsigned, comm is 16 hexadecimal digits; nothing is allocated.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shim.h"

enum { PLAN_BYTES = 128 * 1024, POOL = 16384 };
static const char first_line[] = "dtprobe-nccl-plan 1";

struct fault faults[MAX_FAULTS];
static int fault_count;
static char text[PLAN_BYTES + 1];
static uint64_t pool[POOL];
static size_t pool_used;
static char plan_path[PATH_MAX], release_path[PATH_MAX + 16];

int plan_faults(void) { return fault_count; }
const char *plan_label(int fault) { return faults[fault].label; }

bool plan_released(void) {
    if (!plan_path[0]) return true;
    return access(release_path, F_OK) == 0 || (access(plan_path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR));
}

static bool number(const char *word, uint64_t most, uint64_t *out) {
    uint64_t value = 0;
    if (!*word) return false;
    for (; *word; word++) {
        if (*word < '0' || *word > '9') return false;
        uint64_t digit = (uint64_t)(*word - '0');
        if (value > (UINT64_MAX - digit) / 10) return false;
        value = value * 10 + digit;
    }
    *out = value;
    return value <= most;
}

static bool number32(const char *word, int32_t *out) {
    uint64_t value;
    if (!number(word, INT32_MAX, &value)) return false;
    *out = (int32_t)value;
    return true;
}

static bool hexadecimal(const char *word, uint64_t *out) {
    uint64_t value = 0;
    if (strlen(word) != 16 || strspn(word, "0123456789abcdef") != 16) return false;
    for (; *word; word++) value = value << 4 | (uint64_t)(*word <= '9' ? *word - '0' : *word - 'a' + 10);
    *out = value;
    return value != 0;
}

static bool list(char *word, struct numbers *out) {
    out->values = pool + pool_used;
    out->length = 0;
    for (char *rest = word; rest; out->length++) {
        char *one = strsep(&rest, "+");
        if (pool_used == POOL || !number(one, UINT64_MAX, &pool[pool_used])) return false;
        pool_used++;
    }
    return true;
}

static bool named_call(const char *word, struct fault *fault) {
    static const struct { const char *name; int32_t kind; } kinds[] = {
        {"collective", KIND_COLLECTIVE}, {"p2p", KIND_P2P}, {"init", KIND_INIT}, {"any", -1}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(word, kinds[i].name) == 0) return fault->kind = kinds[i].kind, true;
    for (int id = 0; id < CALLS; id++)
        if (strcmp(word, call_table[id].name) == 0) return fault->call = id, true;
    return false;
}

static bool named_action(const char *word, struct fault *fault) {
    static const char *const names[ACTIONS] = {"fail", "delay", "block", "drop", "count", "root", "op", "async"};
    for (int i = 0; i < ACTIONS; i++)
        if (strcmp(word, names[i]) == 0) return fault->action = (enum action)i, true;
    return false;
}

static bool setting(const char *key, char *value, struct fault *fault) {
    uint64_t n;
    if (strcmp(key, "action") == 0) return named_action(value, fault);
    if (strcmp(key, "call") == 0) return named_call(value, fault);
    if (strcmp(key, "rank") == 0) return list(value, &fault->ranks);
    if (strcmp(key, "nth") == 0) return list(value, &fault->nth);
    if (strcmp(key, "comm") == 0) return hexadecimal(value, &fault->comm_id);
    if (strcmp(key, "comm_index") == 0) return number32(value, &fault->comm_index);
    if (strcmp(key, "comm_rank") == 0) return number32(value, &fault->comm_rank);
    if (strcmp(key, "result") == 0) return number32(value, &fault->result);
    if (strcmp(key, "seed") == 0) return number(value, UINT64_MAX, &fault->seed);
    if (strcmp(key, "every") == 0) return number(value, UINT64_MAX, &fault->every) && fault->every > 0;
    if (strcmp(key, "times") == 0) return number(value, UINT64_MAX, &fault->times) && fault->times > 0;
    if (strcmp(key, "ppm") == 0) return number(value, PPM_ALWAYS, &fault->ppm);
    if (strcmp(key, "after_ns") == 0) return number(value, INT64_MAX, &fault->after_ns);
    if (strcmp(key, "hold_ns") == 0) return number(value, INT64_MAX, &fault->hold_ns);
    if (strcmp(key, "stream") == 0) return number(value, 1, &n) && ((fault->on_stream = n != 0), true);
    if (strcmp(key, "value") == 0) return number(value, INT64_MAX, &n) && ((fault->value = (int64_t)n), true);
    return false;
}

static bool makes_sense(const struct fault *fault) {
    if (fault->call < 0 && fault->kind == 0) return false; /* no call named */
    switch (fault->action) {
    case ACT_FAIL:
    case ACT_ASYNC: return fault->result > 0;
    case ACT_DELAY:
    case ACT_BLOCK: return fault->hold_ns > 0;
    default: return true;
    }
}

static bool parse_fault(char *line, struct fault *fault) {
    *fault = (struct fault){.action = ACTIONS, .call = -1, .comm_index = -1, .comm_rank = -1, .result = -1, .value = -1,
                            .ppm = PPM_ALWAYS};
    char *label = strstr(line, " label=");
    if (label) {
        snprintf(fault->label, sizeof fault->label, "%s", label + strlen(" label="));
        *label = 0;
    }
    for (char *word; (word = strsep(&line, " "));) {
        char *value = strchr(word, '=');
        if (!value) return false;
        *value++ = 0;
        if (!setting(word, value, fault)) return false;
    }
    return fault->action != ACTIONS && makes_sense(fault);
}

static ssize_t read_plan(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return say("the plan cannot be read: %s: %s", path, strerror(errno)), -1;
    struct stat status;
    size_t used = 0;
    ssize_t got = 0;
    bool plain = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    while (plain && used < PLAN_BYTES && ((got = read(fd, text + used, PLAN_BYTES - used)) > 0 || (got < 0 && errno == EINTR)))
        used += got > 0 ? (size_t)got : 0;
    close(fd);
    if (!plain || got < 0 || used == PLAN_BYTES || memchr(text, 0, used))
        return say("the plan is refused: %s is no text file of less than %d bytes", path, PLAN_BYTES), -1;
    text[used] = 0;
    return (ssize_t)used;
}

bool plan_load(const char *path) {
    fault_count = 0;
    pool_used = 0;
    plan_path[0] = 0;
    if (read_plan(path) < 0 || strlen(path) >= sizeof plan_path) return false;
    int line_number = 1, found = 0;
    char *rest = text;
    char *line = strsep(&rest, "\n");
    if (strcmp(line, first_line) != 0) {
        say("the plan is refused, no fault is injected: line 1 of %s is not \"%s\"", path, first_line);
        return false;
    }
    while ((line = strsep(&rest, "\n"))) {
        line_number++;
        if (!*line) continue;
        if (strncmp(line, "fault ", 6) != 0 || found == MAX_FAULTS || !parse_fault(line + 6, &faults[found])) {
            say("the plan is refused, no fault is injected: line %d of %s is not understood", line_number, path);
            return false;
        }
        found++;
    }
    strcpy(plan_path, path);
    snprintf(release_path, sizeof release_path, "%s.release", path);
    fault_count = found;
    return true;
}

/* Preloaded into a rank: its wall clock is shifted by what a shared table says, from one call to the next.
 *
 * Only the wall clock: the monotonic one goes on, as it does when a real clock is stepped. Waits until a moment of the wall clock
 * are translated back, so that they last as long as their caller computed. libfaketime 0.9.10 cannot do this for Python 3.11: with
 * the monotonic clock left alone time.sleep() fails with EINVAL, and with it shifted threading waits never end (measured).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define RANKS 1024 /* the column after the last rank is for processes that are no rank */
#define SLOTS 8
#define NANO 1000000000LL
#define WALL_CLOCK_SINCE 1000000000LL /* seconds: no machine is up for so long, no wall clock shows less */

#pragma GCC visibility push(default) /* the compiler is told to hide everything else */

static _Atomic int64_t *table; /* [SLOTS][RANKS + 1], nanoseconds */
static int column = RANKS;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DTPROBE_CLOCK_FILE"), *folder = getenv("DTPROBE_RANK_FOLDER");
    if (path == NULL) return;
    const char *name = folder ? strrchr(folder, '/') : NULL;
    if (name != NULL && strncmp(name, "/rank", 5) == 0 && name[5] >= '0' && name[5] <= '9') {
        long rank = strtol(name + 5, NULL, 10);
        column = rank < RANKS ? (int)rank : RANKS;
    }
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t) * SLOTS * (RANKS + 1), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) table = mapped;
}

static int64_t offset(void) {
    int64_t sum = 0;
    if (table != NULL)
        for (int slot = 0; slot < SLOTS; slot++)
            sum += __atomic_load_n((int64_t *)&table[slot * (RANKS + 1) + column], __ATOMIC_RELAXED);
    return sum;
}

static struct timespec moved(struct timespec when, int64_t by) {
    int64_t seconds = when.tv_sec + by / NANO, nanoseconds = when.tv_nsec + by % NANO;
    if (nanoseconds >= NANO) seconds++, nanoseconds -= NANO;
    if (nanoseconds < 0) seconds--, nanoseconds += NANO;
    return (struct timespec){.tv_sec = seconds, .tv_nsec = nanoseconds};
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int wall(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int done = real(clock, now);
    if (done == 0 && wall(clock)) *now = moved(*now, offset());
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone; /* obsolete, gettimeofday(2) */
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    if (now != NULL) *now = (struct timeval){.tv_sec = exact.tv_sec, .tv_usec = exact.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    if (now != NULL) *now = exact.tv_sec;
    return exact.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}

/* Waits until a moment */

static const struct timespec *back(struct timespec *room, const struct timespec *until) {
    *room = moved(*until, -offset());
    return room;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *request, struct timespec *rest) {
    REAL(clock_nanosleep);
    struct timespec room;
    return real(clock, flags, wall(clock) && (flags & TIMER_ABSTIME) ? back(&room, request) : request, rest);
}

/* A condition variable keeps its clock to itself; the moment tells which one it is of. Of the versions that glibc has of this
 * function dlsym may find the oldest, whose condition variables are laid out otherwise. */
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec room;
    if (real == NULL) {
        void *found = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        *(void **)&real = found != NULL ? found : dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    }
    return real(cond, mutex, until->tv_sec >= WALL_CLOCK_SINCE ? back(&room, until) : until);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until) {
    REAL(pthread_cond_clockwait);
    struct timespec room;
    return real(cond, mutex, clock, wall(clock) ? back(&room, until) : until);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    REAL(pthread_mutex_timedlock);
    struct timespec room;
    return real(mutex, back(&room, until));
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    REAL(sem_timedwait);
    struct timespec room;
    return real(semaphore, back(&room, until));
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    REAL(sem_clockwait);
    struct timespec room;
    return real(semaphore, clock, wall(clock) ? back(&room, until) : until);
}

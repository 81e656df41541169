/* Two processes of four threads each that call as fast as they can, under faults, with communicators that come and go: for the
 * sanitizers. `stress TURNS`; with 0 turns only one call is made, to have the plan read. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { char bytes[128]; } unique_id;
int ncclGetUniqueId(unique_id *);
int ncclCommInitRank(void **, int, unique_id, int);
int ncclCommSplit(void *, int, int, void **, void *);
int ncclAllReduce(const void *, void *, unsigned long, int, int, void *, void *);
int ncclBcast(void *, unsigned long, int, int, void *, void *);
int ncclCommGetAsyncError(void *, int *);
int ncclCommDestroy(void *);
int ncclGroupStart(void);
int ncclGroupEnd(void);

static void *comm;
static _Atomic int over;

static void *watch(void *nothing) {
    for (int error; !atomic_load(&over);) {
        ncclCommGetAsyncError(comm, &error);
        ncclGroupStart();
        ncclGroupEnd();
    }
    return nothing;
}

int main(int count, char **words) {
    int turns = count > 1 ? atoi(words[1]) : 0;
    unique_id id;
    if (ncclGetUniqueId(&id)) return 2;
    if (!turns) return 0;
    pid_t child = fork();
    int rank = child == 0;
    setenv("RANK", rank ? "1" : "0", 1);
    if (ncclCommInitRank(&comm, 2, id, rank)) return 3;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, watch, NULL);
    for (int i = 0; i < turns; i++) {
        float data[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        ncclAllReduce(data, data, 8, 7, 0, comm, NULL);
        ncclBcast(data, 1, 7, 0, comm, NULL);
        if (i % 50) continue;
        void *part = NULL;
        if (ncclCommSplit(comm, 0, 0, &part, NULL) || !part) return 4;
        ncclAllReduce(data, data, 8, 7, 0, part, NULL);
        ncclCommDestroy(part);
    }
    atomic_store(&over, 1);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    ncclCommDestroy(comm);
    int status = 0;
    return child > 0 && (waitpid(child, &status, 0) < 0 || status) ? 5 : 0;
}

/* For benchmarks/nccl_ring.py: `calls MANY` prints the nanoseconds that each of MANY calls of ncclAllReduce took on average, on
 * a communicator of one rank, so that next to nothing but the call itself is timed. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct { char bytes[128]; } unique_id;
int ncclGetUniqueId(unique_id *);
int ncclCommInitRank(void **, int, unique_id, int);
int ncclAllReduce(const void *, void *, unsigned long, int, int, void *, void *);
int ncclCommDestroy(void *);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

int main(int count, char **words) {
    long many = count > 1 ? atol(words[1]) : 100000;
    unique_id id;
    void *comm = NULL;
    float data = 1;
    if (ncclGetUniqueId(&id) || ncclCommInitRank(&comm, 1, id, 0)) return 1;
    for (long i = 0; i < many / 10; i++) ncclAllReduce(&data, &data, 1, 7, 0, comm, NULL);
    double start = now();
    for (long i = 0; i < many; i++)
        if (ncclAllReduce(&data, &data, 1, 7, 0, comm, NULL)) return 1;
    printf("%.2f\n", (now() - start) / (double)many);
    return ncclCommDestroy(comm);
}

/* A caller that is linked with libnccl: a program, or, as torch's libraries are, a shared object that a program opens. */
#include <stdio.h>

typedef struct { char bytes[128]; } unique_id;
int ncclGetUniqueId(unique_id *);
int ncclCommInitRank(void **, int, unique_id, int);
int ncclAllReduce(const void *, void *, unsigned long, int, int, void *, void *);
int ncclCommDestroy(void *);

int run(void) {
    unique_id id;
    void *comm = 0;
    float data = 5;
    int results[4];
    results[0] = ncclGetUniqueId(&id);
    results[1] = ncclCommInitRank(&comm, 1, id, 0);
    results[2] = comm ? ncclAllReduce(&data, &data, 1, 7, 0, comm, 0) : -1;
    results[3] = comm ? ncclCommDestroy(comm) : -1;
    printf("%d %d %d %d %g\n", results[0], results[1], results[2], results[3], data);
    return fflush(stdout);
}

int main(void) { return run(); }

/* Finding the real libnccl, whoever loaded it and however.
 *
 * torch loads its libraries with dlopen and finds NCCL by RPATH, so the library may be in nobody's global scope and
 * dlsym(RTLD_NEXT) may answer NULL. Asked in turn: the dependency tree of the object that called us (that is the library
 * the caller was linked with, where a machine has two), the objects after us, every loaded object named libnccl.so*.
 * The first library that answers is kept for the life of the process: two of them must never be mixed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

#include "shim.h"

static _Atomic(void *) real[CALLS];
static void *_Atomic library; /* handle of the libnccl in use */
static char library_path[832];
static int library_version;

static const void *own_base(void) {
    Dl_info info;
    return dladdr((const void *)own_base, &info) ? info.dli_fbase : NULL;
}

static bool ours(const void *symbol) {
    Dl_info info;
    return dladdr(symbol, &info) && info.dli_fbase == own_base();
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

struct search {
    const char *prefix;
    char path[832];
    int seen;
};

static int visit(struct dl_phdr_info *object, size_t size, void *data) {
    (void)size;
    struct search *search = data;
    const char *name = object->dlpi_name ? object->dlpi_name : "";
    if (strncmp(base_name(name), search->prefix, strlen(search->prefix)) != 0 || strlen(name) >= sizeof search->path) return 0;
    if (search->seen++ == 0) strcpy(search->path, name);
    return 0;
}

/* Only names are gathered under the loader's lock; dlopen follows outside of it. */
static void *in_object_named(const char *prefix, const char *symbol) {
    struct search search = {.prefix = prefix};
    dl_iterate_phdr(visit, &search);
    if (!search.seen) return NULL;
    void *handle = dlopen(search.path, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return NULL;
    void *found = dlsym(handle, symbol);
    dlclose(handle);
    return found;
}

static void *in_callers_tree(const void *caller, const char *symbol) {
    Dl_info info;
    if (!caller || !dladdr(caller, &info) || !info.dli_fname) return NULL;
    void *handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return NULL; /* the program itself cannot be opened by name */
    void *found = dlsym(handle, symbol);
    dlclose(handle);
    return found && !ours(found) ? found : NULL;
}

/* No lock: whoever calls the loader must hold none of ours, and several threads that look find the same. */
static void keep(void *symbol) {
    Dl_info info;
    if (!dladdr(symbol, &info) || !info.dli_fname) return;
    void *handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); /* this count is ours: the library stays loaded */
    void *none = NULL;
    if (!handle || !atomic_compare_exchange_strong(&library, &none, handle)) return;
    int (*get_version)(int *) = (int (*)(int *))dlsym(handle, "ncclGetVersion");
    if (get_version) get_version(&library_version);
    snprintf(library_path, sizeof library_path, "%s", info.dli_fname);
    describe_library();
    char first[832];
    int loaded = libraries_loaded(first, sizeof first);
    if (loaded > 1) say("%d copies of libnccl are loaded; faults and records are about calls into %s", loaded, info.dli_fname);
}

void describe_library(void) {
    struct ring_header *ring = ring_header();
    if (!ring) return;
    memcpy(ring->library, library_path, sizeof ring->library);
    ring->nccl_version = library_version;
}

static void *look(const char *symbol, const void *caller) {
    void *handle = atomic_load(&library);
    if (handle) return dlsym(handle, symbol);
    void *found = in_callers_tree(caller, symbol);
    if (!found) {
        found = dlsym(RTLD_NEXT, symbol);
        if (found && ours(found)) found = NULL;
    }
    if (!found) found = in_object_named("libnccl.so", symbol);
    if (!found) return NULL;
    keep(found);
    handle = atomic_load(&library);
    return handle ? dlsym(handle, symbol) : found;
}

void *resolve(int id, const void *caller) {
    void *found = atomic_load_explicit(&real[id], memory_order_acquire);
    if (found) return found;
    setup();
    found = look(call_table[id].name, caller);
    if (found) atomic_store_explicit(&real[id], found, memory_order_release);
    else say("%s was called but no loaded libnccl has it: the call fails with ncclInvalidUsage", call_table[id].name);
    return found;
}

void *resolve_name(const char *name) {
    void *handle = atomic_load(&library);
    return handle ? dlsym(handle, name) : NULL;
}

void *find_symbol(const char *name, const char *library_prefix) {
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : in_object_named(library_prefix, name);
}

int libraries_loaded(char *path, size_t bytes) {
    struct search search = {.prefix = "libnccl.so"};
    dl_iterate_phdr(visit, &search);
    if (bytes) {
        path[0] = 0;
        if (strlen(search.path) < bytes) strcpy(path, search.path);
    }
    return search.seen;
}

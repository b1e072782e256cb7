// Reads a file into fresh memory as fast as plain calls can: the ceiling of scripts/bench_load_file.py.
//
//     read_fresh FILE [READS [BLOCK]]
//
// O_DIRECT, in order, READS (8) threads each with one pread of BLOCK (2 MiB) in flight, into anonymous memory in huge
// pages, which threads bring in ahead of the reads: as many as processors, at most 4. The clock runs from before the
// file is opened until its last byte is there. Prints one line of JSON.
//
//     cc -O2 -pthread -o read_fresh benches/compare/read_fresh.c
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { SLICE = 2 << 20, MOST = 64, TOUCHERS = 4 };

static char *memory;
static size_t size, room, block;
static int file;
static atomic_size_t next_slice, next_block;
static unsigned char *touched;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;

static void fail(const char *what) {
    fprintf(stderr, "read_fresh: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *touch(void *unused) {
    (void)unused;
    for (size_t slice; (slice = atomic_fetch_add(&next_slice, 1)) * SLICE < room;) {
        size_t start = slice * SLICE, len = room - start < SLICE ? room - start : SLICE;
        if (madvise(memory + start, len, MADV_POPULATE_WRITE)) {
            for (size_t at = 0; at < len; at += 4096) ((volatile char *)memory)[start + at] = 0;
        }
        pthread_mutex_lock(&lock);
        touched[slice] = 1;
        pthread_cond_broadcast(&more);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void *fill(void *unused) {
    (void)unused;
    for (size_t at; (at = atomic_fetch_add(&next_block, 1) * block) < room;) {
        size_t len = room - at < block ? room - at : block;
        pthread_mutex_lock(&lock);
        for (size_t slice = at / SLICE; slice * SLICE < at + len; slice++)
            while (!touched[slice]) pthread_cond_wait(&more, &lock);
        pthread_mutex_unlock(&lock);
        size_t wanted = size - at < len ? size - at : len;
        ssize_t got = pread(file, memory + at, len, (off_t)at);
        if (got < (ssize_t)wanted) fail("a read is short");
    }
    return NULL;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int count, char **arguments) {
    long reads = count > 2 ? atol(arguments[2]) : 8;
    block = count > 3 ? strtoul(arguments[3], NULL, 10) : 2 << 20;
    if (count < 2 || reads < 1 || reads > MOST || block == 0 || block % 4096) {
        fprintf(stderr, "usage: read_fresh FILE [READS [BLOCK]]; at most %d reads, blocks of whole 4096 bytes\n", MOST);
        return 2;
    }
    double start = now();
    file = open(arguments[1], O_RDONLY | O_DIRECT);
    struct stat found;
    if (file < 0 || fstat(file, &found)) fail(arguments[1]);
    size = (size_t)found.st_size;
    room = (size + 4095) / 4096 * 4096;
    char *mapped = mmap(NULL, room + SLICE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) fail("no memory");
    memory = (char *)(((uintptr_t)mapped + SLICE - 1) / SLICE * SLICE);
    madvise(memory, room, MADV_HUGEPAGE);
    touched = calloc(room / SLICE + 1, 1);
    if (!touched) fail("no memory");
    long processors = sysconf(_SC_NPROCESSORS_ONLN), touchers = processors < TOUCHERS ? processors : TOUCHERS;
    pthread_t threads[MOST + TOUCHERS];
    for (long n = 0; n < touchers + reads; n++)
        if (pthread_create(&threads[n], NULL, n < touchers ? touch : fill, NULL)) fail("no thread");
    for (long n = 0; n < touchers + reads; n++) pthread_join(threads[n], NULL);
    printf("{\"seconds\": %.6f, \"bytes\": %zu}\n", now() - start, size);
    return 0;
}

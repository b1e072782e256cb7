/* ggml's products of matrices with vectors, as a peer of the bench `kernels`.
 *
 *     ggml-peer TYPE COLUMNS ROWS MATRICES VECTORS THREADS
 *
 * Makes that many matrices of random weights, laid out as llama.cpp lays them out on a processor. For each line of its
 * input it multiplies each with the vectors, and prints the seconds that took.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *why) {
    fprintf(stderr, "ggml-peer: %s\n", why);
    exit(1);
}

static float next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

static void quiet(enum ggml_log_level level, const char *text, void *unused) {
    (void)unused;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

/* The layout that llama.cpp would choose for these weights: one of the processor's own, where it has one. */
static ggml_backend_buffer_type_t layout_for(ggml_backend_dev_t device, struct ggml_tensor *product) {
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    ggml_backend_dev_get_extra_bufts_t extra = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
        registry, "ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t *types = extra ? extra(device) : NULL;
    for (; types && *types; types++) {
        struct ggml_tensor *weights = product->src[0];
        weights->buffer = ggml_backend_buft_alloc_buffer(*types, 0);
        int fits = ggml_backend_dev_supports_op(device, product);
        ggml_backend_buffer_free(weights->buffer);
        weights->buffer = NULL;
        if (fits) return *types;
    }
    return ggml_backend_dev_buffer_type(device);
}

int main(int argc, char **argv) {
    if (argc != 7) fail("usage: ggml-peer TYPE COLUMNS ROWS MATRICES VECTORS THREADS");
    enum ggml_type type = GGML_TYPE_COUNT;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char *name = ggml_type_name((enum ggml_type)i);
        if (name && !strcmp(name, argv[1])) type = (enum ggml_type)i;
    }
    if (type == GGML_TYPE_COUNT) fail("no such type");
    int64_t columns = atoll(argv[2]), rows = atoll(argv[3]);
    int matrices = atoi(argv[4]), vectors = atoi(argv[5]), threads = atoi(argv[6]);
    if (columns < 1 || rows < 1 || matrices < 1 || vectors < 1 || threads < 1) fail("bad sizes");

    ggml_log_set(quiet, NULL);
    ggml_backend_t backend = ggml_backend_cpu_init();
    if (!backend) fail("no backend");
    ggml_backend_cpu_set_n_threads(backend, threads);
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    struct ggml_init_params params = {(size_t)(3 * matrices + 8) * ggml_tensor_overhead(), NULL, true};
    struct ggml_context *stored = ggml_init(params);
    params.mem_size += ggml_graph_overhead_custom((size_t)(matrices + 8), false);
    struct ggml_context *computed = ggml_init(params);
    if (!stored || !computed) fail("no memory");
    struct ggml_cgraph *graph = ggml_new_graph_custom(computed, (size_t)(matrices + 8), false);
    struct ggml_tensor *x = ggml_new_tensor_2d(computed, GGML_TYPE_F32, columns, vectors), *first = NULL;
    ggml_set_input(x);
    for (int i = 0; i < matrices; i++) {
        struct ggml_tensor *product = ggml_mul_mat(computed, ggml_new_tensor_2d(stored, type, columns, rows), x);
        first = first ? first : product;
        ggml_build_forward_expand(graph, product);
    }
    if (!ggml_backend_alloc_ctx_tensors_from_buft(stored, layout_for(device, first))) fail("no memory for weights");
    ggml_gallocr_t allocated = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    if (!ggml_gallocr_alloc_graph(allocated, graph)) fail("no memory for products");

    uint32_t seed = 1;
    float *values = malloc((size_t)(columns * (rows > vectors ? rows : vectors)) * sizeof *values);
    size_t bytes = ggml_row_size(type, columns) * (size_t)rows;
    void *weights = malloc(bytes);
    if (!values || !weights) fail("no memory");
    for (int64_t i = 0; i < columns * rows; i++) values[i] = next_random(&seed);
    ggml_quantize_chunk(type, values, weights, 0, rows, columns, NULL);
    for (struct ggml_tensor *t = ggml_get_first_tensor(stored); t; t = ggml_get_next_tensor(stored, t)) {
        ggml_backend_tensor_set(t, weights, 0, bytes);
    }
    for (int64_t i = 0; i < columns * vectors; i++) values[i] = next_random(&seed);
    ggml_backend_tensor_set(x, values, 0, (size_t)(columns * vectors) * sizeof *values);
    free(values);
    free(weights);

    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) fail("a product failed");
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        double start = now();
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) fail("a product failed");
        printf("%.9f\n", now() - start);
        fflush(stdout);
    }
    return 0;
}

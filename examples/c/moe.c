/*
 * Keeps the experts of one layer of a mixture of experts within a budget.
 *
 *     moe MODEL.gguf [LAYER [BUDGET_MIB [TOKENS]]]
 *
 * For each token it draws two experts, as a router would, pins just these, multiplies their bytes with the token's
 * vector, and compares them with the file's. At the end it says how many uses found their pages in memory.
 */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <inttypes.h>
#include <outcore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PARTS = 3, DRAWN = 2 };
static const char *const part_names[PARTS] = {"gate", "up", "down"};

/* One of the three tensors of a layer's experts. */
typedef struct part {
    outcore_tensor **experts; /* rows n to n + 1 of the tensor: expert n */
    uint64_t count, bytes;    /* experts, and bytes of each */
    int file;                 /* to compare with */
    uint64_t offset;
    int is_f32;
} part;

/* Ends the program with the error's sentence and its remedy. */
static void check(outcore_status status, outcore_error *error, const char *what)
{
    if (status == OUTCORE_OK)
        return;
    fprintf(stderr, "moe: %s: %s: %s\n", what, outcore_status_name(status), outcore_error_text(error));
    outcore_error_free(error);
    exit(1);
}

static void fail(const char *what, const char *name)
{
    fprintf(stderr, "moe: %s: %s\n", what, name);
    exit(1);
}

static part open_part(outcore_model *model, const char *name)
{
    outcore_error *error = NULL;
    outcore_tensor *whole = NULL;
    outcore_tensor_info info = {.size = sizeof info};
    part part = {0};
    uint32_t file = 0;
    size_t index = 0;

    check(outcore_model_tensor(model, name, &whole, &error), error, "find the experts");
    check(outcore_tensor_describe(whole, &info, &error), error, name);
    if (info.rank != 3)
        fail("is no tensor of experts", name);
    part.count = info.shape[0];
    part.bytes = info.bytes / part.count;
    part.is_f32 = strcmp(info.dtype, "F32") == 0;
    part.experts = calloc(part.count, sizeof *part.experts);
    if (!part.experts)
        fail("no memory for the handles of", name);
    for (uint64_t n = 0; n < part.count; n++)
        check(outcore_tensor_rows(whole, n, n + 1, &part.experts[n], &error), error, name);
    outcore_tensor_free(whole);

    while (strcmp(outcore_model_name(model, index), name) != 0)
        index++;
    check(outcore_model_place(model, index, &file, &part.offset, &error), error, name);
    part.file = open(outcore_model_file(model, file), O_RDONLY);
    if (part.file < 0)
        fail("cannot be opened", outcore_model_file(model, file));
    return part;
}

/* The first experts are drawn more often, as in models that were trained. */
static uint64_t draw(uint64_t *state, uint64_t count)
{
    uint64_t least = count;
    for (int n = 0; n < 3; n++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        uint64_t one = (*state >> 33) % count;
        least = one < least ? one : least;
    }
    return least;
}

static double product(const void *bytes, uint64_t length, int is_f32, uint64_t token)
{
    double sum = 0;
    if (is_f32) {
        const float *weights = bytes; /* model files align tensors to 32 bytes or more */
        for (uint64_t n = 0; n < length / sizeof *weights; n++)
            sum += (double)weights[n] * (double)((token + n) % 7);
    } else {
        for (uint64_t n = 0; n < length; n++)
            sum += (double)(((const unsigned char *)bytes)[n] * ((token + n) % 7));
    }
    return sum;
}

static void compare(const part *part, uint64_t expert, const void *bytes, char *buffer)
{
    uint64_t done = 0;
    while (done < part->bytes) {
        off_t at = (off_t)(part->offset + expert * part->bytes + done);
        ssize_t got = pread(part->file, buffer + done, part->bytes - done, at);
        if (got <= 0)
            fail("cannot be read", "the model file");
        done += (uint64_t)got;
    }
    if (memcmp(bytes, buffer, part->bytes) != 0)
        fail("the pinned bytes are not", "the file's");
}

int main(int argc, char **argv)
{
    if (argc < 2)
        fail("usage", "moe MODEL.gguf [LAYER [BUDGET_MIB [TOKENS]]]");
    const int layer = argc > 2 ? atoi(argv[2]) : 0;
    const uint64_t budget = (argc > 3 ? strtoull(argv[3], NULL, 10) : 64) << 20;
    const uint64_t tokens = argc > 4 ? strtoull(argv[4], NULL, 10) : 100;

    outcore_error *error = NULL;
    outcore_runtime *runtime = NULL;
    outcore_model *model = NULL;
    /* Experts have no order that a plan could follow; some are drawn more often than others. */
    outcore_options options = {
        .size = sizeof options, .device_budget = budget, .policy = "model", .for_model = argv[1]};
    check(outcore_runtime_open(&options, &runtime, &error), error, "open a runtime");
    check(outcore_model_open(runtime, argv[1], &model, &error), error, "open the model");

    part parts[PARTS];
    uint64_t all = 0, largest = 0;
    for (int p = 0; p < PARTS; p++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight", layer, part_names[p]);
        parts[p] = open_part(model, name);
        all += parts[p].count * parts[p].bytes;
        largest = parts[p].bytes > largest ? parts[p].bytes : largest;
    }
    char *buffer = malloc(largest);
    if (!buffer)
        fail("no memory for", "a buffer");

    uint64_t state = 1;
    double sum = 0;
    for (uint64_t token = 0; token < tokens; token++) {
        uint64_t experts[DRAWN];
        outcore_tensor *wanted[DRAWN * PARTS];
        outcore_guard *guard = NULL;
        for (int n = 0; n < DRAWN; n++)
            do
                experts[n] = draw(&state, parts[0].count);
            while (n > 0 && experts[n] == experts[0] && parts[0].count > 1);
        for (int n = 0; n < DRAWN * PARTS; n++)
            wanted[n] = parts[n % PARTS].experts[experts[n / PARTS]];
        /* All that the token needs, as a unit: it is read at depth, and stays until the guard ends. */
        check(outcore_pin_set(runtime, wanted, DRAWN * PARTS, NULL, &guard, &error), error, "pin a token's experts");
        for (size_t n = 0; n < DRAWN * PARTS; n++) {
            const void *bytes = outcore_guard_data_at(guard, n);
            sum += product(bytes, outcore_guard_length_at(guard, n), parts[n % PARTS].is_f32, token);
            compare(&parts[n % PARTS], experts[n / PARTS], bytes, buffer);
        }
        outcore_unpin(guard);
    }

    outcore_stats stats = {.size = sizeof stats};
    check(outcore_stats_read(runtime, &stats, &error), error, "read the statistics");
    printf("%" PRIu64 " tokens, experts of %" PRIu64 " bytes, sum %.6e, equal to the file's\n", tokens, all, sum);
    printf("pages of %" PRIu64 ": %" PRIu64 " uses, %" PRIu64 " hits; %" PRIu64 " bytes read; peak %" PRIu64
           " of %" PRIu64 "\n",
           stats.page_size, stats.uses, stats.hits, stats.disk_read, stats.device_peak, stats.device_budget);

    for (int p = 0; p < PARTS; p++) {
        for (uint64_t n = 0; n < parts[p].count; n++)
            outcore_tensor_free(parts[p].experts[n]);
        free(parts[p].experts);
        close(parts[p].file);
    }
    free(buffer);
    outcore_model_close(model);
    check(outcore_runtime_close(runtime, &error), error, "close the runtime");
    return 0;
}

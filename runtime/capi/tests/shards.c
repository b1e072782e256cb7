/*
 * A model in two files: opened as one, pinned and mapped in a budget smaller than either file; and files that are no
 * whole model, of which it is told why.
 *
 *     shards FOLDER
 *
 * FOLDER is empty. The program writes its files there.
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <outcore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

/* Tensors are no multiples of a page, so some pages have bytes of two, and others are the last of a file. */
enum { PAGE = 65536, ROWS = 100, COLUMNS = 1003, BYTES = ROWS * COLUMNS, COUNT = 14, FIRST = 7 };

/* In the order of the header, which is that of the files and of the bytes there. Names sort otherwise, and a pass uses
 * the layers otherwise: of layer 1 the query is in the second file. */
static const char *const names[COUNT] = {
    "model.layers.1.mlp.experts.1.up_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",      "model.layers.0.mlp.experts.0.up_proj.weight",
    "model.layers.0.mlp.experts.1.up_proj.weight", "model.embed_tokens.weight",
    "model.layers.2.self_attn.q_proj.weight",      "lm_head.weight",
    "model.layers.1.self_attn.q_proj.weight",      "model.layers.3.mlp.experts.0.up_proj.weight",
    "model.layers.3.mlp.experts.1.up_proj.weight", "model.layers.2.mlp.experts.1.up_proj.weight",
    "model.layers.2.mlp.experts.0.up_proj.weight", "model.norm.weight",
};
static const char *const files[2] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};

/* Where the bytes of a file's tensors begin. */
static uint64_t begins[2];

static const char *folder;

static unsigned char byte_of(int tensor, size_t at)
{
    return (unsigned char)((size_t)tensor * 37 + at + at / 256 * 11);
}

static void check_bytes(int tensor, const unsigned char *bytes)
{
    for (size_t at = 0; at < BYTES; at++)
        CHECK(bytes[at] == byte_of(tensor, at));
}

/* The path of a file, or of a folder if `file` is "". The text is good until the fourth call from here. */
static const char *path_of(const char *within, const char *file)
{
    static char texts[4][4096];
    static int turn;
    char *text = texts[turn++ % 4];
    const int length = snprintf(text, sizeof texts[0], "%s/%s%s%s", folder, within, *file ? "/" : "", file);
    CHECK(length > 0 && (size_t)length < sizeof texts[0]);
    return text;
}

/* Writes tensors `first` to `end` (without `end`) as a file, and returns where the bytes of the first one begin. */
static uint64_t write_shard(const char *path, int first, int end)
{
    static char header[8192];
    static unsigned char bytes[BYTES];
    size_t length = 0;
    for (int n = first; n < end; n++) {
        const int start = (n - first) * BYTES;
        length += (size_t)snprintf(header + length, sizeof header - length,
                                   "%s\"%s\":{\"dtype\":\"U8\",\"shape\":[%d,%d],\"data_offsets\":[%d,%d]}",
                                   n == first ? "{" : ",", names[n], ROWS, COLUMNS, start, start + BYTES);
        CHECK(length + 2 < sizeof header);
    }
    header[length++] = '}';
    unsigned char prefix[8];
    for (int n = 0; n < 8; n++)
        prefix[n] = (unsigned char)((uint64_t)length >> (8 * n));
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(prefix, 1, 8, file) == 8 && fwrite(header, 1, length, file) == length);
    for (int n = first; n < end; n++) {
        for (size_t at = 0; at < BYTES; at++)
            bytes[at] = byte_of(n, at);
        CHECK(fwrite(bytes, 1, BYTES, file) == BYTES);
    }
    CHECK(fclose(file) == 0);
    return 8 + length;
}

/* Writes an index by which the second file is `other`, from the last tensor to the first one: its order is nothing.
 * With `again` that tensor is named twice. */
static void write_index(const char *path, const char *other, const char *again)
{
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs("{\"weight_map\":{", file) >= 0);
    if (again)
        CHECK(fprintf(file, "\"%s\":\"%s\",", again, files[0]) > 0);
    for (int n = COUNT; n-- > 0;)
        CHECK(fprintf(file, "\"%s\":\"%s\"%s", names[n], n < FIRST ? files[0] : other, n ? "," : "}}\n") > 0);
    CHECK(fclose(file) == 0);
}

static const char index_name[] = "model.safetensors.index.json";

/* A folder with the first file, the second one if there is to be one, and an index that calls it `other`, if any. */
static void make(const char *within, int has_second, const char *other, const char *again)
{
    CHECK(mkdir(path_of(within, ""), 0777) == 0);
    begins[0] = write_shard(path_of(within, files[0]), 0, FIRST);
    if (has_second)
        begins[1] = write_shard(path_of(within, files[1]), FIRST, COUNT);
    if (other)
        write_index(path_of(within, index_name), other, again);
}

static outcore_status open_runtime(const char *device, outcore_runtime **runtime, outcore_error **error)
{
    const outcore_options options = {.size = sizeof options,
                                     .device = device,
                                     .device_budget = 8 * PAGE,
                                     .page_size = PAGE,
                                     .policy = device ? NULL : "plan",
                                     .scratch_dir = folder};
    return outcore_runtime_open(&options, runtime, error);
}

/* What the interface tells of the order: tensors by number, across both files, and where each lies. */
static void check_order(const outcore_model *model, const char *within)
{
    CHECK(outcore_model_count(model) == COUNT);
    for (int n = 0; n < COUNT; n++) {
        uint32_t file = 9;
        uint64_t offset = 0;
        CHECK(strcmp(outcore_model_name(model, (size_t)n), names[n]) == 0);
        OK(outcore_model_place(model, (size_t)n, &file, &offset, &error));
        const uint32_t wanted = n < FIRST ? 0 : 1;
        CHECK(file == wanted && offset == begins[wanted] + (uint64_t)(wanted ? n - FIRST : n) * BYTES);
    }
    CHECK(strcmp(outcore_model_file(model, 0), path_of(within, files[0])) == 0);
    CHECK(strcmp(outcore_model_file(model, 1), path_of(within, files[1])) == 0);
    CHECK(outcore_model_file(model, 2) == NULL && outcore_model_name(model, COUNT) == NULL);
}

/* A cycle over the tensors of both files, which take turns. */
static void pins(outcore_runtime *runtime, const char *path, const char *within)
{
    outcore_model *model = NULL;
    outcore_tensor *cycle[COUNT];
    OK(outcore_model_open(runtime, path, &model, &error));
    check_order(model, within);
    int number[COUNT];
    for (int n = 0; n < COUNT; n++) {
        number[n] = n % 2 ? FIRST + n / 2 : n / 2;
        OK(outcore_model_tensor(model, names[number[n]], &cycle[n], &error));
    }
    CHECK(outcore_model_close(model) == OUTCORE_OK);
    outcore_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    OK(outcore_stats_read(runtime, &before, &error));
    OK(outcore_plan(runtime, cycle, COUNT, 1, &error));
    for (int step = 0; step < 3 * COUNT; step++) {
        outcore_guard *guard = NULL;
        OK(outcore_pin(runtime, cycle[step % COUNT], NULL, &guard, &error));
        CHECK(outcore_guard_length(guard) == BYTES);
        check_bytes(number[step % COUNT], outcore_guard_data(guard));
        CHECK(outcore_unpin(guard) == OUTCORE_OK);
    }
    /* Two of different files, as a unit. */
    outcore_guard *both = NULL;
    OK(outcore_pin_set(runtime, cycle, 2, NULL, &both, &error));
    check_bytes(number[0], outcore_guard_data_at(both, 0));
    check_bytes(number[1], outcore_guard_data_at(both, 1));
    CHECK(outcore_unpin(both) == OUTCORE_OK);
    OK(outcore_plan(runtime, NULL, 0, 1, &error));
    OK(outcore_stats_read(runtime, &after, &error));
    /* The order crosses the files, and pages come before their use all the same. */
    CHECK(after.prefetched > before.prefetched && after.evictions > before.evictions);
    CHECK(after.device_peak <= 8 * PAGE && after.disk_read - before.disk_read > 2 * COUNT * BYTES);
    for (int n = 0; n < COUNT; n++)
        outcore_tensor_free(cycle[n]);
}

static void as_one(void)
{
    outcore_runtime *runtime = NULL;
    make("indexed", 1, files[1], NULL);
    make("by-name", 1, NULL, NULL);
    OK(open_runtime(NULL, &runtime, &error));
    pins(runtime, path_of("indexed", index_name), "indexed");
    pins(runtime, path_of("indexed", files[1]), "indexed");
    pins(runtime, path_of("indexed", ""), "indexed");
    pins(runtime, path_of("by-name", files[0]), "by-name");
    OK(outcore_runtime_close(runtime, &error));
}

static void check_mapped(const outcore_mapped *mapped, int first, int end)
{
    const unsigned char *bytes = outcore_mapped_data(mapped);
    const uint64_t begin = begins[first ? 1 : 0];
    CHECK(outcore_mapped_length(mapped) == begin + (uint64_t)(end - first) * BYTES);
    for (int n = first; n < end; n++)
        check_bytes(n, bytes + begin + (size_t)(n - first) * BYTES);
}

/* Each file is a range of its own. They are one model all the same. */
static void mapped(void)
{
    outcore_runtime *runtime = NULL;
    outcore_mapped *one = NULL, *other = NULL, *alone = NULL;
    outcore_error *no_runtime = NULL;
    if (open_runtime("faulting", &runtime, &no_runtime) == OUTCORE_UNSUPPORTED) {
        printf("SKIPPED: %s\n", outcore_error_text(no_runtime));
        outcore_error_free(no_runtime);
        return;
    }
    CHECK(runtime != NULL && no_runtime == NULL);
    OK(outcore_mapped_open(runtime, path_of("indexed", files[0]), &one, &error));
    /* Of experts it knows those of the other file too, which is not mapped yet. */
    CHECK(outcore_mapped_has_expert(one, 1, 0) && outcore_mapped_has_expert(one, 3, 1));
    CHECK(!outcore_mapped_has_expert(one, 4, 0) && !outcore_mapped_has_expert(one, 3, 2));
    const uint32_t experts[] = {0, 1};
    OK(outcore_mapped_expert_hint(one, 3, experts, 2, &error));
    check_mapped(one, 0, FIRST);
    /* What is told of one file's mapping is read into the other's, which nobody has touched. */
    outcore_stats stats = {.size = sizeof stats};
    OK(outcore_stats_read(runtime, &stats, &error));
    const uint64_t read = stats.disk_read;
    OK(outcore_mapped_open(runtime, path_of("indexed", files[1]), &other, &error));
    OK(outcore_mapped_expert_hint(one, 3, experts, 1, &error));
    OK(outcore_stats_read(runtime, &stats, &error));
    CHECK(stats.disk_read > read);
    CHECK(outcore_mapped_has_expert(other, 0, 1));
    for (int pass = 0; pass < 3; pass++) {
        check_mapped(one, 0, FIRST);
        check_mapped(other, FIRST, COUNT);
    }
    OK(outcore_mapped_failure(one, &error));
    OK(outcore_mapped_failure(other, &error));
    CHECK(outcore_mapped_close(one) == OUTCORE_OK);
    check_mapped(other, FIRST, COUNT); /* it needs no other file */
    CHECK(outcore_mapped_close(other) == OUTCORE_OK);

    /* Any file can be mapped: one whose model is not whole is alone, and knows no experts. */
    const char *const parts[] = {"missing", "missing-by-name", "outside"};
    for (int n = 0; n < 3; n++) {
        OK(outcore_mapped_open(runtime, path_of(parts[n], files[0]), &alone, &error));
        check_mapped(alone, 0, FIRST);
        CHECK(!outcore_mapped_has_expert(alone, 0, 0));
        CHECK(outcore_mapped_close(alone) == OUTCORE_OK);
    }
    STATUS(OUTCORE_NOT_FOUND, outcore_mapped_open(runtime, path_of("missing", files[1]), &alone, &error));
    OK(outcore_stats_read(runtime, &stats, &error));
    CHECK(stats.device_peak <= 8 * PAGE && stats.evictions > 0);
    OK(outcore_runtime_close(runtime, &error));
}

/* Opens it in vain. The error says all these words; the list ends with NULL. */
static void refused(outcore_runtime *runtime, const char *path, outcore_status wanted, ...)
{
    outcore_error *error = NULL;
    outcore_model *model = (outcore_model *)(void *)runtime;
    const outcore_status status = outcore_model_open(runtime, path, &model, &error);
    const char *text = error ? outcore_error_text(error) : "";
    va_list words;
    va_start(words, wanted);
    int is_told = status == wanted && error != NULL && outcore_error_status(error) == wanted && model == NULL;
    for (const char *word; (word = va_arg(words, const char *)) != NULL;)
        is_told = is_told && strstr(text, word) != NULL;
    va_end(words);
    if (!is_told) {
        fprintf(stderr, "%s: %s: %s\n", path, outcore_status_name(status), text);
        exit(1);
    }
    outcore_error_free(error);
}

static void not_whole(void)
{
    outcore_runtime *runtime = NULL;
    OK(open_runtime(NULL, &runtime, &error));

    make("missing", 0, files[1], NULL);
    make("missing-by-name", 0, NULL, NULL);
    const char *const lacks = "file 2 of 2 of the model is missing";
    const char *const together = "put all files of the model into one folder";
    refused(runtime, path_of("missing", index_name), OUTCORE_NOT_FOUND, lacks, files[1], together, NULL);
    refused(runtime, path_of("missing", files[0]), OUTCORE_NOT_FOUND, lacks, files[1], together, NULL);
    refused(runtime, path_of("missing", ""), OUTCORE_NOT_FOUND, lacks, files[1], together, NULL);
    refused(runtime, path_of("missing-by-name", files[0]), OUTCORE_NOT_FOUND, lacks, files[1], together, NULL);
    /* The one that is missing is no file that could be opened. */
    refused(runtime, path_of("missing", files[1]), OUTCORE_NOT_FOUND, files[1], "check the path", NULL);

    /* The first file once more, in place of the second one. */
    make("twice", 0, files[1], NULL);
    make("twice-by-name", 0, NULL, NULL);
    CHECK(link(path_of("twice", files[0]), path_of("twice", files[1])) == 0);
    write_shard(path_of("twice-by-name", files[1]), 0, FIRST);
    refused(runtime, path_of("twice", index_name), OUTCORE_FORMAT, "the index says that", files[1], "does not",
            "not of the same model", NULL);
    refused(runtime, path_of("twice-by-name", files[0]), OUTCORE_FORMAT, "appears twice", NULL);
    make("twice-in-index", 1, files[1], names[FIRST]);
    refused(runtime, path_of("twice-in-index", files[0]), OUTCORE_FORMAT, index_name, "names tensor", names[FIRST],
            "twice", NULL);

    /* The file is there, and would be the right one. It is not looked at. */
    make("outside", 0, "../indexed/model-00002-of-00002.safetensors", NULL);
    CHECK(access(path_of("outside", "../indexed/model-00002-of-00002.safetensors"), R_OK) == 0);
    refused(runtime, path_of("outside", index_name), OUTCORE_FORMAT, "../indexed/model-00002-of-00002.safetensors",
            "not inside the model's folder", "do not use an index from a source you do not trust", NULL);
    refused(runtime, path_of("outside", files[0]), OUTCORE_FORMAT, "not inside the model's folder", NULL);
    make("absolute", 0, path_of("indexed", files[1]), NULL);
    refused(runtime, path_of("absolute", index_name), OUTCORE_FORMAT, "not inside the model's folder", NULL);

    /* None of this harms the runtime. */
    pins(runtime, path_of("indexed", index_name), "indexed");
    OK(outcore_runtime_close(runtime, &error));
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    folder = argv[1];
    as_one();
    not_whole();
    mapped();
    printf("outcore %s: both files are one model\n", outcore_version());
    return 0;
}

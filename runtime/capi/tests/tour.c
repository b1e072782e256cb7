/*
 * Every function of outcore.h, used as it is meant, from one thread and from several. misuse.c is the other half.
 *
 *     tour MODEL FOLDER
 *
 * MODEL has the tensors of tests/c.rs: blk.{0,1}.ffn_{gate,up,down}_exps.weight, F32 [16, 128, 128].
 */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <outcore.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { PAGE = 65536, ROW = 65536, ROWS = 16 };

static const char *path, *folder;

static const outcore_pin_options to_write = {.size = sizeof to_write, .writes = 1};

static outcore_runtime *open_runtime(const char *device, uint64_t pages)
{
    outcore_runtime *runtime = NULL;
    outcore_options options = {.size = sizeof options,
                               .device = device,
                               .device_budget = pages * PAGE,
                               .host_budget = 2 * PAGE,
                               .page_size = PAGE,
                               .policy = "plan",
                               .scratch_dir = folder,
                               .scratch_budget = 64 << 20,
                               .lookahead = "off",
                               .io = "auto",
                               .verify = "first",
                               .io_timeout_ms = 60000};
    OK(outcore_runtime_open(&options, &runtime, &error));
    return runtime;
}

static outcore_tensor *bytes_of(outcore_runtime *runtime, uint64_t rows)
{
    outcore_tensor *tensor = NULL;
    const uint64_t shape[2] = {rows, PAGE};
    OK(outcore_alloc(runtime, "U8", shape, 2, &tensor, &error));
    return tensor;
}

static outcore_tensor *row_of(const outcore_tensor *tensor, uint64_t row)
{
    outcore_tensor *part = NULL;
    OK(outcore_tensor_rows(tensor, row, row + 1, &part, &error));
    return part;
}

static int all_are(const void *bytes, size_t length, int value)
{
    for (size_t n = 0; n < length; n++)
        if (((const unsigned char *)bytes)[n] != value)
            return 0;
    return 1;
}

/* The file's bytes. */
static unsigned char *file;

static void read_file(void)
{
    int handle = open(path, O_RDONLY);
    off_t end = lseek(handle, 0, SEEK_END);
    CHECK(handle >= 0 && end > 0 && (file = malloc((size_t)end)) != NULL);
    for (off_t at = 0; at < end;) {
        ssize_t got = pread(handle, file + at, (size_t)(end - at), at);
        CHECK(got > 0);
        at += got;
    }
    close(handle);
}

static void models(void)
{
    outcore_runtime *runtime = open_runtime(NULL, 8);
    outcore_model *model = NULL;
    outcore_tensor *named = NULL, *counted = NULL;
    OK(outcore_model_open(runtime, path, &model, &error));
    CHECK(outcore_model_count(model) == 6);
    CHECK(strcmp(outcore_model_name(model, 4), "blk.1.ffn_up_exps.weight") == 0);
    CHECK(strcmp(outcore_model_file(model, 0), path) == 0);
    OK(outcore_model_tensor(model, "blk.1.ffn_up_exps.weight", &named, &error));
    OK(outcore_model_tensor_at(model, 4, &counted, &error));
    outcore_tensor_info one = {.size = sizeof one}, other = {.size = sizeof other};
    OK(outcore_tensor_describe(named, &one, &error));
    OK(outcore_tensor_describe(counted, &other, &error));
    CHECK(one.address == other.address && one.bytes == 16 * 128 * 128 * 4 && one.rank == 3 && !one.writable);
    CHECK(one.shape[0] == ROWS && one.shape[1] == 128 && one.shape[2] == 128 && one.page_size == PAGE);
    CHECK(strcmp(one.dtype, "F32") == 0 && strcmp(one.name, "blk.1.ffn_up_exps.weight") == 0);
    CHECK(one.block_elements == 1 && one.block_bytes == 4 && one.pages >= 16 && one.size == sizeof one);
    /* A program that was compiled against a shorter structure gets that much. */
    outcore_tensor_info shorter = {.size = offsetof(outcore_tensor_info, rank), .rank = 77};
    OK(outcore_tensor_describe(named, &shorter, &error));
    CHECK(shorter.rank == 77 && shorter.shape[0] == ROWS);

    uint32_t number = 9;
    uint64_t offset = 0;
    OK(outcore_model_place(model, 4, &number, &offset, &error));
    CHECK(number == 0);
    outcore_model_close(model); /* its tensors stay */
    for (uint64_t n = 0; n < ROWS; n++) {
        outcore_tensor *row = row_of(named, n);
        outcore_guard *guard = NULL;
        OK(outcore_pin(runtime, row, NULL, &guard, &error));
        CHECK(outcore_guard_length(guard) == ROW && outcore_guard_count(guard) == 1);
        CHECK((uint64_t)(uintptr_t)outcore_guard_data(guard) == one.address + n * ROW);
        CHECK(memcmp(outcore_guard_data(guard), file + offset + n * ROW, ROW) == 0);
        outcore_tensor_free(row); /* its guard stays */
        CHECK(memcmp(outcore_guard_data_at(guard, 0), file + offset + n * ROW, ROW) == 0);
        CHECK(outcore_unpin(guard) == OUTCORE_OK);
    }
    outcore_tensor_free(named);
    outcore_tensor_free(counted);
    OK(outcore_runtime_close(runtime, &error));
}

static void limits(void)
{
    outcore_runtime *runtime = open_runtime("host", 4);
    outcore_model *model = NULL;
    outcore_tensor *tensor = NULL;
    outcore_guard *guard = NULL, *write = NULL;
    const outcore_pin_options at_once = {.size = sizeof at_once, .has_timeout = 1};
    const outcore_pin_options soon = {.size = sizeof soon, .timeout_ns = 1000, .has_timeout = 1};
    const outcore_pin_options patient = {.size = sizeof patient, .timeout_ns = UINT64_MAX, .has_timeout = 1};
    outcore_pin_options patient_write = patient;
    patient_write.writes = 1;
    OK(outcore_model_open(runtime, path, &model, &error));
    OK(outcore_model_tensor(model, "blk.0.ffn_down_exps.weight", &tensor, &error));
    outcore_tensor *row = row_of(tensor, 5);
    /* Nobody has read it yet. The read that this call starts may be over before the call looks for the page. */
    outcore_error *no_error = NULL;
    const outcore_status first = outcore_pin(runtime, row, &at_once, &guard, &no_error);
    CHECK(first == OUTCORE_OK ? guard != NULL : first == OUTCORE_NOT_READY && guard == NULL);
    outcore_unpin(guard);
    outcore_error_free(no_error);
    guard = NULL;
    OK(outcore_pin(runtime, row, &patient, &guard, &error));
    outcore_unpin(guard);
    OK(outcore_pin(runtime, row, &at_once, &guard, &error));
    outcore_unpin(guard);

    outcore_tensor *own = bytes_of(runtime, 1);
    OK(outcore_pin(runtime, own, &patient_write, &write, &error));
    STATUS(OUTCORE_NOT_READY, outcore_pin(runtime, own, &at_once, &guard, &error)); /* a writer has it */
    CHECK(guard == NULL);
    STATUS(OUTCORE_NOT_READY, outcore_pin(runtime, own, &soon, &guard, &error));
    STATUS(OUTCORE_NOT_READY, outcore_pin_set(runtime, &own, 1, &at_once, &guard, &error));
    outcore_unpin(write);
    OK(outcore_pin_set(runtime, &own, 1, &patient, &guard, &error));
    outcore_unpin(guard);
    OK(outcore_pin_set(runtime, NULL, 0, NULL, &guard, &error)); /* a set of none */
    CHECK(outcore_guard_count(guard) == 0 && outcore_guard_data(guard) == NULL && outcore_unpin(guard) == OUTCORE_OK);
    outcore_tensor_free(own);
    outcore_tensor_free(row);
    outcore_tensor_free(tensor);
    outcore_model_close(model);
    OK(outcore_runtime_close(runtime, &error));
}

/* Four times the budget, written and read back by rows. */
static void writes(void)
{
    outcore_runtime *runtime = open_runtime("host", 4);
    outcore_tensor *tensor = bytes_of(runtime, ROWS), *rows[ROWS];
    outcore_guard *guard = NULL;
    for (int n = 0; n < ROWS; n++) {
        rows[n] = row_of(tensor, (uint64_t)n);
        OK(outcore_pin(runtime, rows[n], &to_write, &guard, &error));
        CHECK(outcore_guard_data_mut(guard) == outcore_guard_data(guard));
        CHECK(all_are(outcore_guard_data(guard), outcore_guard_length(guard), 0));
        memset(outcore_guard_data_mut(guard), n + 1, outcore_guard_length(guard));
        outcore_unpin(guard);
    }
    OK(outcore_pin_set(runtime, rows, 2, &to_write, &guard, &error));
    CHECK(outcore_guard_count(guard) == 2 && outcore_guard_length_at(guard, 1) == PAGE);
    CHECK(all_are(outcore_guard_data_at(guard, 1), PAGE, 2));
    memset(outcore_guard_data_mut_at(guard, 1), 99, PAGE);
    outcore_unpin(guard);
    for (int n = 0; n < ROWS; n++) {
        OK(outcore_pin(runtime, rows[n], NULL, &guard, &error));
        CHECK(all_are(outcore_guard_data(guard), PAGE, n == 1 ? 99 : n + 1));
        outcore_unpin(guard);
    }
    uint32_t pages = 0;
    uint64_t given = 0;
    OK(outcore_evict(runtime, rows[ROWS - 1], &pages, &error));
    CHECK(pages <= 1); /* what is read ahead may have its frame already */
    OK(outcore_prefetch(runtime, rows[0], &error));
    OK(outcore_trim(runtime, 16 * PAGE, &given, &error));
    OK(outcore_set_device_budget(runtime, 2 * PAGE, &error));

    outcore_stats stats = {.size = sizeof stats};
    OK(outcore_stats_read(runtime, &stats, &error));
    CHECK(stats.uses >= 2 * ROWS && stats.hits + stats.faults > 0 && stats.evictions > 0 && stats.disk_written > 0);
    CHECK(stats.device_budget == 2 * PAGE && stats.device_used <= 2 * PAGE && stats.device_peak <= 4 * PAGE);
    CHECK(stats.page_size == PAGE && stats.waiting == 0 && stats.host_budget == 2 * PAGE);
    outcore_text *json = NULL, *waiting = NULL;
    OK(outcore_stats_json(runtime, &json, &error));
    CHECK(strstr(outcore_text_chars(json), "\"hits\":") && strstr(outcore_text_chars(json), "\"policy\":\"plan\""));
    CHECK(outcore_text_length(json) == strlen(outcore_text_chars(json)));
    OK(outcore_waiting(runtime, &waiting, &error));
    CHECK(outcore_text_length(waiting) == 0);
    outcore_text_free(json);
    outcore_text_free(waiting);
    OK(outcore_health(runtime, &error));
    for (int n = 0; n < ROWS; n++)
        outcore_tensor_free(rows[n]);
    outcore_tensor_free(tensor);
    OK(outcore_runtime_close(runtime, &error));
}

/* Two scopes, each of which holds what the other one needs: both are told, and keep what they hold. */
static void scopes(void)
{
    outcore_runtime *runtime = open_runtime("host", 2);
    outcore_tensor *tensor = bytes_of(runtime, 4), *rows[4];
    for (uint64_t n = 0; n < 4; n++)
        rows[n] = row_of(tensor, n);
    outcore_scope *one = NULL, *other = NULL, *reserved = NULL;
    outcore_guard *a = NULL, *b = NULL, *c = NULL;
    outcore_scope_options label = {.size = sizeof label, .label = "one", .priority = "interactive"};
    OK(outcore_scope_open(runtime, &label, &one, &error));
    label.label = "other", label.priority = "batch";
    OK(outcore_scope_open(runtime, &label, &other, &error));
    const outcore_pin_options in_one = {.size = sizeof in_one, .scope = one};
    const outcore_pin_options in_other = {.size = sizeof in_other, .scope = other};
    const outcore_pin_options other_writes = {.size = sizeof other_writes, .scope = other, .writes = 1};
    OK(outcore_pin(runtime, rows[0], &in_one, &a, &error));
    OK(outcore_pin(runtime, rows[1], &other_writes, &b, &error));
    STATUS(OUTCORE_BUSY, outcore_pin(runtime, rows[2], &in_one, &c, &error));
    STATUS(OUTCORE_BUSY, outcore_pin(runtime, rows[3], &in_other, &c, &error));
    STATUS(OUTCORE_BUSY, outcore_pin(runtime, rows[1], &in_one, &c, &error));
    CHECK(outcore_scope_held(one) == PAGE && outcore_scope_held(other) == PAGE);
    outcore_unpin(b);
    OK(outcore_pin(runtime, rows[2], &in_one, &c, &error)); /* the other one has let go */
    outcore_unpin(c);
    outcore_unpin(a);
    outcore_scope_close(one);
    outcore_scope_close(other);

    /* Uses of a walker, in a scope. */
    outcore_walker *walker = NULL;
    OK(outcore_walker_open(runtime, &walker, &error));
    OK(outcore_walker_plan(walker, rows, 4, 1, &error));
    outcore_scope_options terms = {.size = sizeof terms, .reserve = 2 * PAGE};
    OK(outcore_scope_open(runtime, NULL, &reserved, &error));
    CHECK(outcore_scope_close(reserved) == OUTCORE_OK && outcore_scope_held(reserved) == 0);
    OK(outcore_scope_open(runtime, &terms, &reserved, &error));
    outcore_pin_options both = {.size = sizeof both, .scope = reserved, .walker = walker};
    OK(outcore_pin_set(runtime, rows, 2, &both, &a, &error));
    CHECK(outcore_scope_held(reserved) == 2 * PAGE && outcore_guard_data_mut(a) == NULL);
    STATUS(OUTCORE_BUDGET_TOO_SMALL, outcore_pin(runtime, rows[2], &both, &b, &error));
    outcore_unpin(a);
    OK(outcore_pin(runtime, rows[2], &both, &a, &error));
    CHECK(outcore_scope_held(reserved) == PAGE);
    outcore_unpin(a);
    both.writes = 1, both.timeout_ns = UINT64_MAX, both.has_timeout = 1;
    OK(outcore_pin_set(runtime, rows + 2, 2, &both, &a, &error));
    CHECK(outcore_scope_held(reserved) == 2 * PAGE && outcore_guard_data_mut_at(a, 1) != NULL);
    outcore_scope_close(reserved);
    outcore_unpin(a); /* guards may outlive their scope */
    outcore_walker_close(walker);
    for (int n = 0; n < 4; n++)
        outcore_tensor_free(rows[n]);
    outcore_tensor_free(tensor);
    OK(outcore_runtime_close(runtime, &error));
}

/* Two passes over one tensor, each with its place in the same plan. */
static void walkers(void)
{
    outcore_runtime *runtime = open_runtime("host", 8);
    outcore_tensor *tensor = bytes_of(runtime, ROWS), *rows[ROWS];
    outcore_walker *ahead = NULL, *behind = NULL;
    outcore_guard *guard = NULL;
    OK(outcore_walker_open(runtime, &ahead, &error));
    OK(outcore_walker_open(runtime, &behind, &error));
    const outcore_pin_options of_ahead = {.size = sizeof of_ahead, .walker = ahead};
    const outcore_pin_options of_behind = {.size = sizeof of_behind, .walker = behind};
    const outcore_pin_options ahead_writes = {.size = sizeof ahead_writes, .walker = ahead, .writes = 1};
    for (int n = 0; n < ROWS; n++) {
        rows[n] = row_of(tensor, (uint64_t)n);
        OK(outcore_pin(runtime, rows[n], &ahead_writes, &guard, &error));
        memset(outcore_guard_data_mut(guard), n + 1, PAGE);
        outcore_unpin(guard);
    }
    OK(outcore_plan(runtime, rows, ROWS, 1, &error));
    OK(outcore_plan(runtime, NULL, 0, 1, &error));
    OK(outcore_walker_plan(ahead, rows, ROWS, 1, &error));
    OK(outcore_walker_plan(behind, rows, ROWS, 1, &error));
    for (int step = 0; step < 3 * ROWS; step++) {
        OK(outcore_pin(runtime, rows[(step + 3) % ROWS], &of_ahead, &guard, &error));
        CHECK(all_are(outcore_guard_data(guard), PAGE, (step + 3) % ROWS + 1));
        outcore_unpin(guard);
        OK(outcore_pin_set(runtime, &rows[step % ROWS], 1, &of_behind, &guard, &error));
        CHECK(all_are(outcore_guard_data(guard), PAGE, step % ROWS + 1));
        outcore_unpin(guard);
    }
    outcore_stats stats = {.size = sizeof stats};
    OK(outcore_stats_read(runtime, &stats, &error));
    CHECK(stats.hits * 10 > stats.uses * 3); /* the one behind finds what the one ahead left */
    OK(outcore_pin_set(runtime, rows, 2, &ahead_writes, &guard, &error));
    outcore_unpin(guard);
    outcore_walker_close(ahead);
    outcore_walker_close(behind);
    for (int n = 0; n < ROWS; n++)
        outcore_tensor_free(rows[n]);
    outcore_tensor_free(tensor);
    OK(outcore_runtime_close(runtime, &error));
}

static const unsigned char *range;
static size_t range_length;

static void *read_range(void *argument)
{
    uint64_t state = (uint64_t)(uintptr_t)argument;
    for (int n = 0; n < 200; n++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        size_t at = (state >> 20) % (range_length - 300);
        CHECK(memcmp(range + at, file + at, 300) == 0);
    }
    return NULL;
}

static void mapped(void)
{
    outcore_runtime *runtime = NULL;
    outcore_mapped *mapped = NULL;
    outcore_options options = {.size = sizeof options, .device = "faulting", .device_budget = 16 * PAGE, .page_size = PAGE};
    outcore_error *error = NULL;
    outcore_status status = outcore_runtime_open(&options, &runtime, &error);
    if (status == OUTCORE_UNSUPPORTED) {
        printf("SKIPPED: %s\n", outcore_error_text(error));
        outcore_error_free(error);
        return;
    }
    CHECK(status == OUTCORE_OK && error == NULL);
    OK(outcore_mapped_open(runtime, path, &mapped, &error));
    range = outcore_mapped_data(mapped), range_length = outcore_mapped_length(mapped);
    pthread_t threads[4];
    for (uintptr_t n = 0; n < 4; n++)
        CHECK(pthread_create(&threads[n], NULL, read_range, (void *)(n + 1)) == 0);
    for (int n = 0; n < 4; n++)
        CHECK(pthread_join(threads[n], NULL) == 0);
    CHECK(memcmp(range, file, range_length) == 0);
    const uint32_t drawn[] = {0, 1}, none[] = {0, 1000000};
    CHECK(outcore_mapped_has_expert(mapped, 0, 1) && !outcore_mapped_has_expert(mapped, 0, 1000000));
    OK(outcore_mapped_expert_hint(mapped, 0, drawn, 2, &error));
    CHECK(outcore_mapped_expert_hint(mapped, 0, none, 2, &error) == OUTCORE_INVALID_ARGUMENT);
    CHECK(strstr(outcore_error_text(error), "1000000") != NULL);
    outcore_error_free(error);
    CHECK(outcore_mapped_expert_hint(mapped, 0, NULL, 2, NULL) == OUTCORE_INVALID_ARGUMENT);
    const outcore_layer_experts layers[] = {{0, drawn, 2}, {0, NULL, 0}}, unknown[] = {{0, drawn, 2}, {0, none, 2}};
    const outcore_layer_experts nowhere = {0, NULL, 2};
    OK(outcore_mapped_expect_experts(mapped, layers, 2, &error));
    OK(outcore_mapped_expect_experts(mapped, NULL, 0, &error));
    OK(outcore_mapped_expert_hint_before(mapped, layers, layers, 2, &error));
    OK(outcore_mapped_expert_hint_before(mapped, layers, NULL, 0, &error));
    CHECK(outcore_mapped_expect_experts(mapped, unknown, 2, NULL) == OUTCORE_INVALID_ARGUMENT);
    CHECK(outcore_mapped_expect_experts(mapped, NULL, 2, NULL) == OUTCORE_INVALID_ARGUMENT);
    CHECK(outcore_mapped_expect_experts(mapped, &nowhere, 1, NULL) == OUTCORE_INVALID_ARGUMENT);
    CHECK(outcore_mapped_expert_hint_before(mapped, layers, unknown, 2, NULL) == OUTCORE_INVALID_ARGUMENT);
    CHECK(outcore_mapped_expert_hint_before(mapped, NULL, layers, 2, NULL) == OUTCORE_INVALID_ARGUMENT);
    CHECK(memcmp(range, file, range_length) == 0);
    outcore_tensor *whole = NULL, *part = NULL;
    outcore_guard *guard = NULL;
    OK(outcore_mapped_tensor(mapped, &whole, &error));
    OK(outcore_tensor_rows(whole, 100, 200, &part, &error));
    OK(outcore_pin(runtime, part, NULL, &guard, &error));
    CHECK(outcore_guard_data(guard) == (const void *)(range + 100) && outcore_guard_length(guard) == 100);
    outcore_unpin(guard);
    OK(outcore_mapped_failure(mapped, &error));
    outcore_stats stats = {.size = sizeof stats};
    OK(outcore_stats_read(runtime, &stats, &error));
    CHECK(stats.device_peak <= 16 * PAGE && stats.evictions > 0);
    outcore_tensor_free(part);
    outcore_tensor_free(whole);
    CHECK(outcore_mapped_close(mapped) == OUTCORE_OK && outcore_mapped_close(mapped) == OUTCORE_INVALID_ARGUMENT);
    OK(outcore_runtime_close(runtime, &error));
}

typedef struct shared {
    outcore_runtime *runtime;
    outcore_tensor *tensor;
    uint64_t seed;
    outcore_status status;
} shared;

static void *pin_rows(void *argument)
{
    shared *shared = argument;
    for (int n = 0; n < 300; n++) {
        shared->seed = shared->seed * 6364136223846793005u + 1442695040888963407u;
        uint64_t at = (shared->seed >> 33) % ROWS;
        outcore_tensor *row = row_of(shared->tensor, at);
        outcore_guard *guard = NULL;
        OK(outcore_pin(shared->runtime, row, NULL, &guard, &error));
        CHECK(all_are(outcore_guard_data(guard), PAGE, (int)at + 1));
        CHECK(outcore_unpin(guard) == OUTCORE_OK && outcore_unpin(guard) == OUTCORE_INVALID_ARGUMENT);
        CHECK(outcore_tensor_free(row) == OUTCORE_OK);
    }
    return NULL;
}

static void *wait_for_a_writer(void *argument)
{
    shared *shared = argument;
    outcore_guard *guard = NULL;
    shared->status = outcore_pin(shared->runtime, shared->tensor, NULL, &guard, NULL);
    CHECK(guard == NULL);
    return NULL;
}

static void *free_it(void *argument)
{
    shared *shared = argument;
    shared->status = outcore_tensor_free(shared->tensor);
    return NULL;
}

static void threads(void)
{
    outcore_runtime *runtime = open_runtime("host", 8);
    outcore_tensor *tensor = bytes_of(runtime, ROWS);
    outcore_guard *guard = NULL;
    enum { MANY = 6 };
    pthread_t threads[MANY];
    shared shared[MANY];
    for (int n = 0; n < ROWS; n++) {
        outcore_tensor *row = row_of(tensor, (uint64_t)n);
        OK(outcore_pin(runtime, row, &to_write, &guard, &error));
        memset(outcore_guard_data_mut(guard), n + 1, PAGE);
        outcore_unpin(guard);
        outcore_tensor_free(row);
    }
    for (uint64_t n = 0; n < MANY; n++) {
        shared[n].runtime = runtime, shared[n].tensor = tensor, shared[n].seed = n;
        CHECK(pthread_create(&threads[n], NULL, pin_rows, &shared[n]) == 0);
    }
    for (int n = 0; n < MANY; n++)
        CHECK(pthread_join(threads[n], NULL) == 0);

    /* Of several threads that free one handle, one does. */
    for (int round = 0; round < 50; round++) {
        outcore_tensor *one = row_of(tensor, 0);
        int freed = 0;
        for (int n = 0; n < MANY; n++) {
            shared[n].tensor = one;
            CHECK(pthread_create(&threads[n], NULL, free_it, &shared[n]) == 0);
        }
        for (int n = 0; n < MANY; n++) {
            CHECK(pthread_join(threads[n], NULL) == 0);
            freed += shared[n].status == OUTCORE_OK;
        }
        CHECK(freed == 1);
    }

    /* In a child by fork everything ends, and nothing hangs. */
    outcore_tensor *row = row_of(tensor, 3);
    pid_t child = fork();
    if (child == 0) {
        outcore_status status = outcore_pin(runtime, row, NULL, &guard, NULL);
        _exit(status == OUTCORE_CLOSED && outcore_tensor_free(row) == OUTCORE_OK ? 0 : 1);
    }
    int ended = 0;
    CHECK(child > 0 && waitpid(child, &ended, 0) == child && WIFEXITED(ended) && WEXITSTATUS(ended) == 0);

    /* To close ends the waits of others. */
    OK(outcore_pin(runtime, row, &to_write, &guard, &error));
    shared[0].tensor = row;
    CHECK(pthread_create(&threads[0], NULL, wait_for_a_writer, &shared[0]) == 0);
    for (outcore_stats stats = {.size = sizeof stats}; stats.waiting == 0; sched_yield())
        OK(outcore_stats_read(runtime, &stats, &error));
    outcore_text *waiting = NULL;
    OK(outcore_waiting(runtime, &waiting, &error));
    CHECK(outcore_text_length(waiting) > 0);
    outcore_text_free(waiting);
    OK(outcore_runtime_close(runtime, &error));
    CHECK(pthread_join(threads[0], NULL) == 0 && shared[0].status == OUTCORE_CLOSED);
    memset(outcore_guard_data_mut(guard), 1, PAGE); /* guards stay valid */
    CHECK(outcore_unpin(guard) == OUTCORE_OK);
    outcore_tensor_free(row);
    outcore_tensor_free(tensor);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    path = argv[1], folder = argv[2];
    read_file();
    models();
    limits();
    writes();
    scopes();
    walkers();
    mapped();
    threads();
    free(file);
    printf("outcore %s: all as it should be\n", outcore_version());
    return 0;
}

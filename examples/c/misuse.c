/*
 * What a program can do wrong, and what it is told. Every call here is wrong in one way; none of them is undefined.
 *
 *     misuse MODEL FOLDER
 */
#include <inttypes.h>
#include <outcore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int wrong;

/* Prints what was said, and counts what should have been said and was not. Frees the error. */
static void told(const char *what, outcore_status wanted, outcore_status status, outcore_error *error, const char *words)
{
    const char *text = error ? outcore_error_text(error) : "";
    int as_it_should = status == wanted && (!words || strstr(text, words)) && (!error || outcore_error_status(error) == status);
    printf("%s: %s%s%s\n", what, outcore_status_name(status), *text ? ": " : "", text);
    if (!as_it_should) {
        printf("  WRONG: should be %s, with \"%s\"\n", outcore_status_name(wanted), words ? words : "");
        wrong++;
    }
    if (error && (outcore_error_message(error) == NULL || outcore_error_free(error) != OUTCORE_OK)) {
        printf("  WRONG: the error has no message, or could not be freed\n");
        wrong++;
    }
}

#define TELLS(wanted, words, call)                                                                                     \
    do {                                                                                                               \
        outcore_error *error = NULL;                                                                                   \
        outcore_status status = (call);                                                                                \
        told(#call, wanted, status, error, words);                                                                     \
    } while (0)

#define HOLDS(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("  WRONG: %s\n", #condition);                                                                       \
            wrong++;                                                                                                   \
        }                                                                                                              \
    } while (0)

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    const char *path = argv[1], *folder = argv[2];
    outcore_runtime *runtime = NULL, *other = NULL;
    outcore_model *model = NULL;
    outcore_tensor *tensor = NULL, *rows = NULL, *own = NULL;
    outcore_guard *guard = NULL;
    outcore_scope *scope = NULL;
    outcore_walker *walker = NULL;
    outcore_mapped *mapped = NULL;
    outcore_text *text = NULL;

    puts("-- options");
    outcore_options good = {.size = sizeof good, .device_budget = 1 << 20, .page_size = 65536, .scratch_dir = folder};
    outcore_options bad = good;
    bad.size = 0;
    TELLS(OUTCORE_INVALID_ARGUMENT, "sizeof(outcore_options)", outcore_runtime_open(&bad, &runtime, &error));
    bad = good, bad.policy = "lrru";
    TELLS(OUTCORE_INVALID_ARGUMENT, "the closest name is lru", outcore_runtime_open(&bad, &runtime, &error));
    bad = good, bad.device = "gpu";
    TELLS(OUTCORE_INVALID_ARGUMENT, "host or faulting", outcore_runtime_open(&bad, &runtime, &error));
    bad = good, bad.page_size = 1000;
    TELLS(OUTCORE_INVALID_ARGUMENT, "page", outcore_runtime_open(&bad, &runtime, &error));
    bad = good, bad.device_budget = 4096;
    TELLS(OUTCORE_BUDGET_TOO_SMALL, "give at least", outcore_runtime_open(&bad, &runtime, &error));
    bad = good, bad.policy = "\xff";
    TELLS(OUTCORE_INVALID_ARGUMENT, "UTF-8", outcore_runtime_open(&bad, &runtime, &error));
    struct {
        outcore_options known;
        uint64_t added;
    } newer = {good, 0};
    newer.known.size = sizeof newer;
    TELLS(OUTCORE_OK, NULL, outcore_runtime_open(&newer.known, &other, &error));
    TELLS(OUTCORE_OK, NULL, outcore_runtime_close(other, &error));
    newer.added = 1;
    TELLS(OUTCORE_UNSUPPORTED, "as new as the header", outcore_runtime_open(&newer.known, &other, &error));
    HOLDS(runtime == NULL && other == NULL);
    TELLS(OUTCORE_INVALID_ARGUMENT, "runtime is NULL", outcore_runtime_open(&good, NULL, &error));
    TELLS(OUTCORE_OK, NULL, outcore_runtime_open(&good, &runtime, &error));
    TELLS(OUTCORE_OK, NULL, outcore_runtime_open(&good, &other, &error));

    puts("-- files and names");
    TELLS(OUTCORE_NOT_FOUND, "no-such-file", outcore_model_open(runtime, "no-such-file.gguf", &model, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "path is NULL", outcore_model_open(runtime, NULL, &model, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "runtime is NULL", outcore_model_open(NULL, path, &model, &error));
    HOLDS(model == NULL);
    TELLS(OUTCORE_OK, NULL, outcore_model_open(runtime, path, &model, &error));
    TELLS(OUTCORE_NOT_FOUND, "blk.0.ffn_up_exps.weight", outcore_model_tensor(model, "blk.0.ffn_up_exp.weight", &tensor, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "count from 0", outcore_model_tensor_at(model, outcore_model_count(model), &tensor, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "count from 0", outcore_model_place(model, SIZE_MAX, NULL, NULL, &error));
    HOLDS(outcore_model_name(model, outcore_model_count(model)) == NULL && outcore_model_file(model, 1) == NULL);
    TELLS(OUTCORE_OK, NULL, outcore_model_tensor(model, "blk.0.ffn_up_exps.weight", &tensor, &error));

    puts("-- tensors");
    TELLS(OUTCORE_INVALID_ARGUMENT, "rows 0..100000", outcore_tensor_rows(tensor, 0, 100000, &rows, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "rows 2..1", outcore_tensor_rows(tensor, 2, 1, &rows, &error));
    outcore_tensor_info unset = {.size = 3};
    TELLS(OUTCORE_INVALID_ARGUMENT, "sizeof(outcore_tensor_info)", outcore_tensor_describe(tensor, &unset, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "info is NULL", outcore_tensor_describe(tensor, NULL, &error));
    const uint64_t shape[2] = {2, UINT64_MAX}, small[1] = {100};
    TELLS(OUTCORE_INVALID_ARGUMENT, "no size in bytes", outcore_alloc(runtime, "F32", shape, 2, &own, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "F33", outcore_alloc(runtime, "F33", small, 1, &own, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "shape is NULL", outcore_alloc(runtime, "F32", NULL, 1, &own, &error));
    TELLS(OUTCORE_OK, NULL, outcore_alloc(runtime, "F32", small, 1, &own, &error));

    puts("-- pins");
    TELLS(OUTCORE_BUDGET_TOO_SMALL, "budget", outcore_pin(runtime, tensor, NULL, &guard, &error));
    TELLS(OUTCORE_OK, NULL, outcore_tensor_rows(tensor, 0, 1, &rows, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "another runtime", outcore_pin(other, rows, NULL, &guard, &error));
    outcore_pin_options how = {.size = sizeof how, .writes = 1};
    TELLS(OUTCORE_INVALID_ARGUMENT, "read-only", outcore_pin(runtime, rows, &how, &guard, &error));
    outcore_tensor *pair[2] = {rows, own};
    TELLS(OUTCORE_INVALID_ARGUMENT, "read-only", outcore_pin_set(runtime, pair, 2, &how, &guard, &error));
    pair[0] = own;
    TELLS(OUTCORE_INVALID_ARGUMENT, "share bytes", outcore_pin_set(runtime, pair, 2, &how, &guard, &error));
    how.size = 0;
    TELLS(OUTCORE_INVALID_ARGUMENT, "sizeof(outcore_pin_options)", outcore_pin(runtime, rows, &how, &guard, &error));
    how.size = 1 << 20;
    TELLS(OUTCORE_INVALID_ARGUMENT, "sizeof(outcore_pin_options)",
          outcore_pin_set(runtime, pair, 2, &how, &guard, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "tensor is NULL", outcore_pin(runtime, NULL, NULL, &guard, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "guard is NULL", outcore_pin(runtime, rows, NULL, NULL, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "tensors is NULL", outcore_pin_set(runtime, NULL, 2, NULL, &guard, &error));
    pair[0] = rows, pair[1] = NULL;
    TELLS(OUTCORE_INVALID_ARGUMENT, "tensors[1] is NULL", outcore_pin_set(runtime, pair, 2, NULL, &guard, &error));
    pair[1] = rows;
    TELLS(OUTCORE_INVALID_ARGUMENT, "another runtime", outcore_pin_set(other, pair, 2, NULL, &guard, &error));
    HOLDS(guard == NULL && outcore_guard_data(guard) == NULL && outcore_guard_length(guard) == 0);
    TELLS(OUTCORE_OK, NULL, outcore_pin(runtime, rows, NULL, &guard, &error));
    HOLDS(outcore_guard_data(guard) != NULL && outcore_guard_data_mut(guard) == NULL);
    HOLDS(outcore_guard_data_at(guard, 1) == NULL && outcore_guard_count(guard) == 1);

    puts("-- wrong kinds, and what was freed");
    outcore_tensor *no_tensor = (outcore_tensor *)(void *)guard;
    outcore_guard *none = guard;
    TELLS(OUTCORE_INVALID_ARGUMENT, "an outcore_guard, not an outcore_tensor",
          outcore_pin(runtime, no_tensor, NULL, &none, &error));
    HOLDS(none == NULL);
    no_tensor = (outcore_tensor *)(void *)&wrong;
    TELLS(OUTCORE_INVALID_ARGUMENT, "no handle", outcore_pin(runtime, no_tensor, NULL, &none, &error));
    HOLDS(outcore_unpin((outcore_guard *)(void *)rows) == OUTCORE_INVALID_ARGUMENT);
    HOLDS(outcore_unpin(guard) == OUTCORE_OK);
    HOLDS(outcore_unpin(guard) == OUTCORE_INVALID_ARGUMENT);
    HOLDS(outcore_guard_data(guard) == NULL && outcore_guard_length(guard) == 0 && outcore_guard_count(guard) == 0);
    HOLDS(outcore_unpin(NULL) == OUTCORE_OK && outcore_tensor_free(NULL) == OUTCORE_OK);
    HOLDS(outcore_tensor_free(tensor) == OUTCORE_OK && outcore_tensor_free(tensor) == OUTCORE_INVALID_ARGUMENT);
    TELLS(OUTCORE_INVALID_ARGUMENT, "freed before", outcore_prefetch(runtime, tensor, &error));
    HOLDS(outcore_model_close(model) == OUTCORE_OK && outcore_model_close(model) == OUTCORE_INVALID_ARGUMENT);
    HOLDS(outcore_model_count(model) == 0 && outcore_model_name(model, 0) == NULL);
    outcore_error *twice = NULL;
    outcore_prefetch(runtime, NULL, &twice);
    HOLDS(outcore_error_free(twice) == OUTCORE_OK && outcore_error_free(twice) == OUTCORE_INVALID_ARGUMENT);
    HOLDS(outcore_error_text(twice) == NULL && outcore_error_remedy(twice) == NULL);
    HOLDS(outcore_prefetch(runtime, NULL, NULL) == OUTCORE_INVALID_ARGUMENT); /* nobody wants the error */
    TELLS(OUTCORE_OK, NULL, outcore_stats_json(runtime, &text, &error));
    HOLDS(outcore_text_length(text) == strlen(outcore_text_chars(text)));
    HOLDS(outcore_text_free(text) == OUTCORE_OK && outcore_text_free(text) == OUTCORE_INVALID_ARGUMENT);
    HOLDS(outcore_text_chars(text) == NULL);

    puts("-- scopes, walkers, mapped files");
    outcore_scope_options terms = {.size = sizeof terms, .reserve = 1 << 30};
    TELLS(OUTCORE_BUDGET_TOO_SMALL, "budget", outcore_scope_open(runtime, &terms, &scope, &error));
    terms.reserve = 0, terms.priority = "urgent";
    TELLS(OUTCORE_INVALID_ARGUMENT, "interactive or batch", outcore_scope_open(runtime, &terms, &scope, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "walker is NULL", outcore_walker_plan(walker, pair, 2, 1, &error));
    HOLDS(scope == NULL && outcore_scope_held(scope) == 0);
    outcore_pin_options named = {.size = sizeof named, .walker = (outcore_walker *)(void *)runtime};
    TELLS(OUTCORE_INVALID_ARGUMENT, "an outcore_runtime, not an outcore_walker",
          outcore_pin(runtime, rows, &named, &guard, &error));
    named.walker = NULL, named.scope = (outcore_scope *)(void *)rows;
    TELLS(OUTCORE_INVALID_ARGUMENT, "an outcore_tensor, not an outcore_scope",
          outcore_pin(runtime, rows, &named, &guard, &error));
    TELLS(OUTCORE_OK, NULL, outcore_scope_open(other, NULL, &scope, &error));
    TELLS(OUTCORE_OK, NULL, outcore_walker_open(other, &walker, &error));
    named.scope = scope;
    TELLS(OUTCORE_INVALID_ARGUMENT, "another runtime", outcore_pin(runtime, rows, &named, &guard, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "another runtime", outcore_pin_set(runtime, pair, 2, &named, &guard, &error));
    named.scope = NULL, named.walker = walker;
    TELLS(OUTCORE_INVALID_ARGUMENT, "another runtime", outcore_pin(runtime, rows, &named, &guard, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "another runtime", outcore_pin_set(runtime, pair, 2, &named, &guard, &error));
    HOLDS(guard == NULL && outcore_scope_held(scope) == 0);
    HOLDS(outcore_scope_close(scope) == OUTCORE_OK && outcore_scope_close(scope) == OUTCORE_INVALID_ARGUMENT);
    HOLDS(outcore_walker_close(walker) == OUTCORE_OK && outcore_walker_close(walker) == OUTCORE_INVALID_ARGUMENT);
    TELLS(OUTCORE_INVALID_ARGUMENT, "options.walker is no living", outcore_pin(runtime, rows, &named, &guard, &error));
    named.scope = scope, named.walker = NULL;
    TELLS(OUTCORE_INVALID_ARGUMENT, "options.scope is no living", outcore_pin(runtime, rows, &named, &guard, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "\"faulting\"", outcore_mapped_open(runtime, path, &mapped, &error));
    HOLDS(outcore_mapped_data(mapped) == NULL && outcore_mapped_length(mapped) == 0);

    puts("-- closed");
    TELLS(OUTCORE_OK, NULL, outcore_pin(runtime, rows, NULL, &guard, &error));
    outcore_runtime *closed = runtime;
    TELLS(OUTCORE_OK, NULL, outcore_runtime_close(runtime, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "closed or freed before", outcore_runtime_close(closed, &error));
    TELLS(OUTCORE_INVALID_ARGUMENT, "closed or freed before", outcore_pin(closed, rows, NULL, NULL, &error));
    HOLDS(((const unsigned char *)outcore_guard_data(guard))[0] <= 255); /* guards outlive their runtime */
    HOLDS(outcore_unpin(guard) == OUTCORE_OK && outcore_tensor_free(rows) == OUTCORE_OK);
    HOLDS(outcore_tensor_free(own) == OUTCORE_OK);
    TELLS(OUTCORE_OK, NULL, outcore_runtime_close(other, &error));
    TELLS(OUTCORE_OK, NULL, outcore_runtime_close(NULL, &error));
    HOLDS(strcmp(outcore_status_name(OUTCORE_INTERNAL), "internal") == 0);
    HOLDS(strcmp(outcore_status_name(-1), "unknown status") == 0 && strcmp(outcore_status_name(19), "unknown status") == 0);

    printf("%d wrong\n", wrong);
    return wrong ? 1 : 0;
}

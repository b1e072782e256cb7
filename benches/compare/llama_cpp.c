/* llama.cpp as a peer of `generate`: the same prompt ids, greedy, memory-mapped weights.
 *
 *     llama-peer MODEL ID,ID,... TOKENS THREADS [SEED [TIMES]]
 *
 * With a seed that is not 0, tokens are drawn at temperature 1: greedy words of a model with random weights fall into a
 * loop, which uses a few experts of a mixture only. With TIMES the prompt is read so often, and the last time counts.
 *
 * Prints one line of JSON, whose figures mean what those of `generate --json` mean. It is written in C because a Python
 * interpreter around the library would take a part of what llama.cpp may use under a memory limit.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama.h"

enum { TOKENS_MAX = 4096 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void quiet(enum ggml_log_level level, const char *text, void *unused) {
    (void)unused;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static int less(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void fail(const char *why) {
    fprintf(stderr, "llama-peer: %s\n", why);
    exit(1);
}

/* The SplitMix64 generator (Steele et al., 2014), as a number from 0 to 1. */
static double next_random(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static int draw(const float *logits, int count, int best, uint64_t *state) {
    double sum = 0, left = next_random(state);
    for (int i = 0; i < count; i++) sum += exp((double)logits[i] - logits[best]);
    left *= sum;
    for (int i = 0; i < count; i++) {
        left -= exp((double)logits[i] - logits[best]);
        if (left < 0) return i;
    }
    return best;
}

static void print_ids(const char *name, const llama_token *ids, int count) {
    printf("\"%s\": [", name);
    for (int i = 0; i < count; i++) printf("%s%d", i ? ", " : "", ids[i]);
    printf("], ");
}

int main(int argc, char **argv) {
    if (argc < 5 || argc > 7) fail("usage: llama-peer MODEL ID,ID,... TOKENS THREADS [SEED [TIMES]]");
    uint64_t seed = argc > 5 ? strtoull(argv[5], NULL, 10) : 0;
    int drawn = seed != 0, times = argc > 6 ? atoi(argv[6]) : 1;
    static llama_token prompt[TOKENS_MAX], made[TOKENS_MAX];
    static double passes[TOKENS_MAX];
    int given = 0, wanted = atoi(argv[3]), threads = atoi(argv[4]);
    for (char *id = strtok(argv[2], ","); id && given < TOKENS_MAX; id = strtok(NULL, ",")) prompt[given++] = atoi(id);
    if (given < 1 || wanted < 2 || wanted > TOKENS_MAX || threads < 1 || times < 1)
        fail("bad ids, number of tokens, threads or times");

    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params model_params = llama_model_default_params();
    struct llama_model *model = llama_model_load_from_file(argv[1], model_params);
    if (!model) fail("the model cannot be loaded");
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)(given + wanted);
    params.n_batch = params.n_ubatch = (uint32_t)given;
    params.n_threads = params.n_threads_batch = threads;
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) fail("no context can be made");

    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int n = 1; n < times; n++) {
        if (llama_decode(context, llama_batch_get_one(prompt, given))) fail("a pass failed");
        llama_get_logits_ith(context, -1); /* waits for the pass */
        llama_memory_clear(llama_get_memory(context), true);
    }
    struct llama_batch batch = llama_batch_get_one(prompt, given);
    double first = 0, decoding = 0;
    for (int n = 0; n < wanted; n++) {
        double start = now();
        if (llama_decode(context, batch)) fail("a pass failed");
        const float *logits = llama_get_logits_ith(context, -1);
        int best = 0;
        for (int i = 1; i < vocab; i++) {
            if (logits[i] > logits[best]) best = i;
        }
        made[n] = drawn ? draw(logits, vocab, best, &seed) : best;
        double took = now() - start;
        if (n == 0) {
            first = took;
        } else {
            passes[n - 1] = took;
            decoding += took;
        }
        batch = llama_batch_get_one(&made[n], 1);
    }
    qsort(passes, (size_t)(wanted - 1), sizeof *passes, less);
    printf("{");
    print_ids("prompt_tokens", prompt, given);
    print_ids("tokens", made, wanted);
    printf("\"threads\": %d, \"ttft_s\": %.6f, \"decode_tok_s\": %.6f, \"pass_s_median\": %.6f}\n", threads, first,
           (wanted - 1) / decoding, passes[(wanted - 1) / 2]);
    llama_free(context);
    llama_model_free(model);
    return 0;
}

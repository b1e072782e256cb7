// The kernels of the forward pass for the emulated CUDA driver, with what each reads and writes.

#include "machine.h"

#include "../../src/cuda/kernels.cu"

namespace emulation {

static uint64_t row_bytes(const char *format, uint64_t k) {
    struct {
        const char *name;
        uint64_t elements, bytes;
    } all[] = {{"f32", 1, 4}, {"f16", 1, 2}, {"bf16", 1, 2}, {"q4_0", 32, 18}, {"q4_1", 32, 20}, {"q5_0", 32, 22},
        {"q5_1", 32, 24}, {"q8_0", 32, 34}, {"q2_k", 256, 84}, {"q3_k", 256, 110}, {"q4_k", 256, 144},
        {"q5_k", 256, 176}, {"q6_k", 256, 210}};
    for (auto &one : all) {
        if (strcmp(one.name, format) == 0) {
            return k / one.elements * one.bytes;
        }
    }
    fail("a format without a size");
}

static void reach_decode(Reach &r, const u8 *row, float *out, u32 dtype, u32 k) {
    r.reads(row, bytes_of_row(dtype, k));
    r.writes(out, k);
}

static void reach_products(Reach &r, Products p) {
    for (u32 i = 0; i < (p.after == AFTER_GATE ? 2 : 3); i++) {
        const Matrix &matrix = p.matrices[i];
        r.reads(matrix.weights, matrix.rows * bytes_of_row(matrix.dtype, p.k));
        r.reads(matrix.bias, matrix.bias == nullptr ? 0 : bytes_of_row(matrix.bias_dtype, matrix.rows));
        // Vector by vector, because what lies between belongs to other rows.
        for (u32 j = 0; j < p.m && (i == 0 || p.after != AFTER_GATE); j++) {
            r.writes(matrix.out + (u64)j * matrix.stride, matrix.rows);
        }
    }
    r.reads(p.norm, p.norm == nullptr ? 0 : bytes_of_row(p.norm_dtype, p.k));
    r.reads(p.rows, p.rows == nullptr ? 0 : p.m);
    r.reads(p.x, (u64)(p.rows == nullptr ? p.m : p.vectors) * p.k);
}

static void reach_cached(Reach &r, const Cached &c) {
    r.reads(c.table, (u64)c.sequences * c.stride);
    r.reads(c.sequence_of, c.sequence_of == nullptr ? 0 : c.m);
    r.reads(c.positions, c.m);
}

static void reach_turn(Reach &r, Turn a, Cached c) {
    reach_cached(r, c);
    r.writes(a.q, (u64)c.m * a.heads * c.head_size);
    r.reads(a.k, (u64)c.m * c.heads * c.head_size);
    r.reads(a.v, (u64)c.m * c.heads * c.head_size);
    r.reads(a.q_norm, a.q_norm == nullptr ? 0 : bytes_of_row(a.q_norm_dtype, c.head_size));
    r.reads(a.k_norm, a.k_norm == nullptr ? 0 : bytes_of_row(a.k_norm_dtype, c.head_size));
    r.reads(a.frequencies, a.pairs);
}

// The rows of weights are followed.
static void reach_embed(Reach &r, u64, const u32 *tokens, float *out, u32, u32, u32 k, u32 m) {
    r.reads(tokens, m);
    r.writes(out, (u64)m * k);
}

static void reach_attention_parts(Reach &r, Attention a, Cached c) {
    reach_cached(r, c);
    r.reads(a.q, (u64)c.m * a.heads * c.head_size);
    r.writes(a.kept, (u64)c.m * a.heads * a.parts * (c.head_size + 2));
    r.reads(a.out, 0);
}

static void reach_attention_merge(Reach &r, Attention a, Cached c) {
    reach_cached(r, c);
    r.reads(a.q, 0);
    r.reads(a.kept, (u64)c.m * a.heads * a.parts * (c.head_size + 2));
    r.writes(a.out, (u64)c.m * a.heads * c.head_size);
}

static void reach_attention_prompt(Reach &r, Attention a, Cached c) {
    reach_cached(r, c);
    r.reads(a.q, (u64)c.m * a.heads * c.head_size);
    r.writes(a.kept, (u64)c.m * a.heads * 2);
    r.writes(a.out, (u64)c.m * a.heads * c.head_size);
}

static void reach_choose(Reach &r, const float *logits, const Draw *draws, u32 *tokens, u32 *positions, u32 *said, u32 n,
    u32 ring) {
    r.reads(logits, (u64)blocks * n);
    r.reads(draws, blocks);
    r.writes(tokens, blocks);
    r.writes(positions, blocks);
    r.writes(said, (u64)blocks * ring);
}

static void reach_silu_multiply(Reach &r, float *gate, const float *up, u64 n) {
    r.writes(gate, n);
    r.reads(up, n);
}

// Rows of `ld` numbers, all of which are written.
#define TILE_OF_FORMAT(name, Format, number)                                                                           \
    static void reach_tile_##name(Reach &r, const u8 *weights, u16 *out, u32 k, u32 rows, u32 ld) {                    \
        r.reads(weights, rows * row_bytes(#name, k));                                                                  \
        r.writes(out, (u64)rows * ld);                                                                                 \
    }

EACH_FORMAT(TILE_OF_FORMAT)

static void reach_halves_f16(Reach &r, const float *x, const u8 *norm, u16 *out, float *scales, u32 norm_dtype, float,
    u32 k, u32 ld) {
    r.reads(x, (u64)blocks * k);
    r.reads(norm, norm != nullptr ? bytes_of_row(norm_dtype, k) : 0);
    r.writes(out, (u64)blocks * ld);
    r.writes(scales, blocks);
}

static void reach_halves_bf16(Reach &r, const float *x, const u8 *norm, u16 *out, u32 norm_dtype, float, u32 k,
    u32 ld) {
    r.reads(x, (u64)blocks * k);
    r.reads(norm, norm != nullptr ? bytes_of_row(norm_dtype, k) : 0);
    r.writes(out, (u64)blocks * ld);
}

static void reach_unscale(Reach &r, const float *products, const float *scales, const u8 *bias, float *out,
    u32 bias_dtype, u32 n, u32 pitch, u32 stride, u32) {
    for (unsigned j = 0; j < rows_of_blocks; j++) {
        r.reads(products + (u64)j * pitch, n);
        r.writes(out + (u64)j * stride, n);
    }
    r.reads(scales, scales != nullptr ? rows_of_blocks : 0);
    r.reads(bias, bias != nullptr ? bytes_of_row(bias_dtype, n) : 0);
}

static void reach_attention_queries(Reach &r, const float *q, u16 *out, float *factors, u32 heads, u32, u32 size,
    float) {
    r.reads(q, (u64)blocks * heads * size);
    r.writes(out, (u64)blocks * heads * size);
    r.writes(factors, blocks);
}

static void reach_attention_gather(Reach &r, Cached c, u16 *keys, u16 *values, u32, u32, u32 columns, u32 room) {
    reach_cached(r, c);
    r.writes(keys, ((u64)(c.heads - 1) * room + columns) * c.head_size);
    r.writes(values, ((u64)(c.heads - 1) * room + columns) * c.head_size);
}

static void reach_attention_shares(Reach &r, float *scores, float *sums, float *kept, const float *factors, u32 heads,
    u32, u32 size, u32 m, u32, u32 rows, u32 columns, u32, u32) {
    r.writes(scores, (u64)rows_of_blocks * rows * columns);
    r.writes(sums, (u64)m * heads * size);
    r.writes(kept, (u64)m * heads * 2);
    r.reads(factors, m);
}

static void reach_attention_result(Reach &r, const float *sums, const float *kept, float *out, u32 heads, u32,
    u32 size) {
    r.reads(sums, (u64)blocks * heads * size);
    r.reads(kept, (u64)blocks * heads * 2);
    r.writes(out, (u64)blocks * heads * size);
}

static Products translated(const Reach &reach, Products p) {
    for (Matrix &matrix : p.matrices) {
        if (matrix.rows != 0) {
            matrix.weights = translated(reach, matrix.weights);
            matrix.bias = translated(reach, matrix.bias);
            matrix.out = p.after == AFTER_GATE && &matrix != p.matrices ? nullptr : translated(reach, matrix.out);
        }
    }
    p.norm = translated(reach, p.norm);
    p.rows = translated(reach, p.rows);
    p.x = translated(reach, p.x);
    return p;
}
static Cached translated(const Reach &reach, Cached c) {
    c.table = translated(reach, c.table);
    c.sequence_of = translated(reach, c.sequence_of);
    c.positions = translated(reach, c.positions);
    return c;
}
static Turn translated(const Reach &reach, Turn a) {
    a.q = translated(reach, a.q);
    a.k = translated(reach, a.k);
    a.v = translated(reach, a.v);
    a.q_norm = translated(reach, a.q_norm);
    a.k_norm = translated(reach, a.k_norm);
    a.frequencies = translated(reach, a.frequencies);
    return a;
}
static Attention translated(const Reach &reach, Attention a) {
    a.q = translated(reach, a.q);
    a.kept = translated(reach, a.kept);
    a.out = translated(reach, a.out);
    return a;
}
#define ATTENTION_TYPE(kernel, type)                                                                                   \
    ENTRY(kernel##_##type##_64, reach_##kernel) ENTRY(kernel##_##type##_128, reach_##kernel)                           \
    ENTRY(kernel##_##type##_256, reach_##kernel)
#define ATTENTION_ROWS(kernel) ATTENTION_TYPE(kernel, f16) ATTENTION_TYPE(kernel, f32)
#define TILE_ROW(name, Format, number) ONE(tile_##name)

static const Row TABLE[] = {
    ENTRY(INTERFACE, reach_nothing) ENTRY(products_1, reach_products) ENTRY(products_8, reach_products)
    ENTRY(turn_f16, reach_turn) ENTRY(turn_f32, reach_turn) ONE(embed) ONE(decode) ONE(silu_multiply)
    ATTENTION_ROWS(attention_parts) ATTENTION_ROWS(attention_prompt) ONE(attention_merge) ONE(choose)
    EACH_FORMAT(TILE_ROW) ONE(halves_f16) ONE(halves_bf16) ONE(unscale) ONE(attention_queries)
    ENTRY(attention_gather_f16, reach_attention_gather) ENTRY(attention_gather_f32, reach_attention_gather)
    ONE(attention_shares) ONE(attention_result)
};

}  // namespace emulation

#include "exports.h"
